"""Who trains the module: `Strategy3D` in its layouts, and its peers as their own pages say to use them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from tests.bench.meter import Meter
from tests.bench.modules import LR, ByHand, ByHandTensor, ByHandZero2, Half, Task, Training

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "limit_val_batches": 0, "num_sanity_val_steps": 0, "max_epochs": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    train: Callable[[Task, Meter], None]
    world: int = 2
    limits: tuple[tuple[str, float], ...] = ()
    """Other contestants, and the ratio to the step of each that is the target."""
    kinds: tuple[str, ...] = ("llama",)
    """Modules that it can train."""
    needs: str = ""
    """A package that may not be installed."""


class Turns(Callback):
    """The meter as a callback of Lightning."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if hasattr(trainer.strategy, "data_axis"):
            self.meter.ledger = trainer.strategy.data_axis.ledger
        self.meter.step_begins()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.meter.step_ends(float(outputs["loss"]))


def lightning(task: Task, meter: Meter, strategy: str, kind: type[Training] = Training, **sizes: Any) -> None:
    warnings.simplefilter("ignore")
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_3d import Strategy3D

    task.load()
    meter.begin()
    made: Any = strategy
    if strategy == "3d":
        made = Strategy3D(**sizes, quiet=True)
    elif strategy == "model_parallel":
        tensor = sizes.get("tensor_parallel_size", 1)
        made = ModelParallelStrategy(meter.world // tensor, tensor)
    module = kind(task, meter.total)
    Trainer(**QUIET, devices=meter.world, strategy=made, callbacks=[Turns(meter)], max_steps=meter.total).fit(module)


def pipeline_by_hand(task: Task, meter: Meter) -> None:
    """torch's `PipelineStage` and `Schedule1F1B` with two stages written by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = _device(meter)
    task.load()
    meter.begin()
    dist.init_process_group()
    stage = PipelineStage(Half(task.model(), meter.rank == 0).to(device), meter.rank, 2, device)
    batch = torch.stack(task.dataset()).to(device)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, 4, loss_fn=loss)

    def step() -> float:
        if meter.rank == 0:
            schedule.step(batch, return_outputs=False)
            return 0.0
        losses: list[torch.Tensor] = []
        schedule.step(target=batch, losses=losses, return_outputs=False)
        return 2 * float(torch.stack(losses).mean())  # the mean over ranks is taken

    _loop(meter, torch.optim.AdamW(stage.submod.parameters(), lr=LR), step)


def _loop(meter: Meter, optimizer: torch.optim.Optimizer, step: Callable[[], float]) -> None:
    for _ in range(meter.total):
        meter.step_begins()
        loss = step()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ends(loss)
    dist.destroy_process_group()


def deepspeed(task: Task, meter: Meter, stage: int) -> None:
    """`deepspeed.initialize`: Lightning's own DeepSpeedStrategy refuses CPUs."""
    import deepspeed
    from deepspeed.comm.torch import build_shm_op

    task.load()
    if not torch.cuda.is_available():
        build_shm_op()  # compiled once on a machine, so it is no part of a start
    meter.begin()
    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl", verbose=False)
    model = task.model()
    here = _device(meter)
    config = {
        "train_micro_batch_size_per_gpu": task.rows // meter.world,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # 1.0 by default: another training than that of the others
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.stack(task.dataset()[meter.rank :: meter.world]).to(here)
    for _ in range(meter.total):
        meter.step_begins()
        loss = task.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        meter.step_ends(loss.item())


def hugging_face(task: Task, meter: Meter, how: str) -> None:
    """`transformers.Trainer`, with its own FSDP2 or with the model's own tensor plan."""
    import tempfile

    from torch.distributed.tensor import DTensor
    from torch.utils.data import SequentialSampler
    from transformers import Trainer as HuggingFaceTrainer
    from transformers import TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.step_begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if how == "fsdp2" and not any(isinstance(each, DTensor) for each in model.parameters()):
                raise RuntimeError("Accelerate trains with DDP on this device, whatever `fsdp` says")
            meter.step_ends(float(last[0]))

    class Own(HuggingFaceTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            last[:] = [(loss[0] if isinstance(loss, tuple) else loss).detach()]
            return loss

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    last: list[Any] = []
    task.load()
    meter.begin()
    with tempfile.TemporaryDirectory() as folder:
        model = task.model()
        if how == "tensor":
            model.save_pretrained(folder)  # first, because with a process group only one rank writes
        fsdp = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        arguments = TrainingArguments(
            folder, max_steps=meter.total, learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=0.0,
            weight_decay=0.01, per_device_train_batch_size=task.rows // (meter.world if how == "fsdp2" else 1),
            use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", **({"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp} if how == "fsdp2" else {}),
        )  # fmt: skip
        if how == "tensor":
            model = type(model).from_pretrained(folder, tp_plan="auto")
        data = [{"input_ids": row, "labels": row} for row in task.dataset()] * meter.total
        Own(model=model, args=arguments, train_dataset=data, callbacks=[Steps()]).train()


def _device(meter: Meter) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(meter.rank)
    return torch.device("cuda", meter.rank)


ALL = ("llama", "vit", "unet")


def ours(*limits: tuple[str, float], world: int = 2, **sizes: Any) -> Contestant:
    return Contestant(partial(lightning, strategy="3d", **sizes), world, limits, ALL)


CONTESTANTS = {
    "plain Lightning, 1 device": Contestant(partial(lightning, strategy="auto"), 1, kinds=ALL),
    "3D, 1 device": ours(("plain Lightning, 1 device", 1.02), world=1),
    "Lightning DDP": Contestant(partial(lightning, strategy="ddp"), kinds=ALL),
    "3D zero0": ours(("Lightning DDP", 0.85), zero_stage=0),
    "3D zero1": ours(("Lightning DDP", 0.9), ("DeepSpeed ZeRO-1", 1.0), zero_stage=1),
    "3D zero2": ours(("FSDP2 by hand, zero2", 0.6), ("DeepSpeed ZeRO-2", 1.0), zero_stage=2),
    "3D zero3": ours(("FSDP2 by hand, zero3", 0.6), ("DeepSpeed ZeRO-3", 1.0), zero_stage=3),
    "FSDP2 by hand, zero2": Contestant(partial(lightning, strategy="model_parallel", kind=ByHandZero2)),
    "FSDP2 by hand, zero3": Contestant(partial(lightning, strategy="model_parallel", kind=ByHand)),
    **{
        f"DeepSpeed ZeRO-{stage}": Contestant(partial(deepspeed, stage=stage), needs="deepspeed") for stage in (1, 2, 3)
    },
    "Hugging Face FSDP2": Contestant(partial(hugging_face, how="fsdp2"), needs="accelerate"),
    "3D tensor 2": ours(("tensor plan by hand", 0.7), tensor_parallel_size=2),
    "tensor plan by hand": Contestant(
        partial(lightning, strategy="model_parallel", kind=ByHandTensor, tensor_parallel_size=2)
    ),
    "Hugging Face tensor": Contestant(partial(hugging_face, how="tensor"), needs="accelerate"),
    "3D pipeline 2": ours(("PipelineStage by hand", 1.0), pipeline_parallel_size=2, num_microbatches=4),
    "PipelineStage by hand": Contestant(pipeline_by_hand),
    "3D tensor 2 x pipeline 2": ours(world=4, tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4),
}
"""The table in its order."""
