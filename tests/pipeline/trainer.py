"""A Trainer over a pipeline: the smallest strategy that calls the pipeline where `Strategy3D` does."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_3d.module.metrics import named_metrics
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stage_ranks
from lightning_3d.pipeline.split import apply_split, plan_split


class Piped(SingleDeviceStrategy):
    """One data rank, `dist.group.WORLD` as its pipeline."""

    def __init__(self, schedule: str = "1f1b", **options: Any) -> None:
        super().__init__(device="cpu")
        self.schedule, self.options = schedule, options

    def setup(self, trainer: Trainer) -> None:
        module, group = self.lightning_module, dist.group.WORLD
        split = plan_split(module, None, group.size())
        self.placement = stage_ranks(self.schedule, group.size(), 1)
        self.applied = apply_split(module, split, [group.rank()])
        self.pipeline = Pipeline(module, split, group, schedule=self.schedule, **self.options)
        for _, metric in named_metrics(module):
            metric.distributed_available_fn = lambda: False  # one data rank: there is nobody to gather from
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Absent parameters cannot be moved."""

    def training_step(self, *args: Any) -> Any:
        loop, window = self.lightning_module.trainer, self.lightning_module.trainer.accumulate_grad_batches
        opens = loop.fit_loop.epoch_loop.batch_idx % window == 0
        closes = not loop.fit_loop.epoch_loop._should_accumulate()
        return self.pipeline.training_step(*args, first=opens, last=closes, scale=1 / window)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.pipeline.backward(closure_loss)
        return closure_loss

    def validation_step(self, *args: Any) -> Any:
        return self.pipeline.eval_step("validation_step", *args)

    def predict_step(self, *args: Any) -> Any:
        return self.pipeline.eval_step("predict_step", *args)

    def teardown(self) -> None:
        self.pipeline.close()
        if self.lightning_module.trainer.state.status == "interrupted":
            return  # the other ranks are not here to restore the module with
        self.applied.undo(dist.group.WORLD, self.placement)
        super().teardown()


def loader(batches: list[Any]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def trainer(strategy: Any, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(strategy=strategy or "auto", accelerator="cpu", devices=1, **(quiet | {"max_epochs": 2} | options))


def fit(build: Any, strategy: bool, options: dict[str, Any] | None = None, **pipeline: Any) -> dict[str, Any]:
    """Fit with or without a pipeline: what was logged each step and at the end, and the weights."""
    torch.manual_seed(0)
    module, batches = build()
    history: list[dict[str, float]] = []
    own = module.on_train_batch_end

    def note(*args: Any) -> None:
        own(*args)
        history.append({name: float(value) for name, value in module.trainer.callback_metrics.items()})

    module.on_train_batch_end = note
    made = trainer(Piped(**pipeline) if strategy else None, **(options or {}))
    made.fit(module, loader(batches), loader(batches))
    predictions = None
    if isinstance(module, LightningModule) and hasattr(type(module), "forward_predict"):
        predictions = made.predict(module, loader(batches))
    return {
        "steps": history,
        "end": {name: float(value) for name, value in made.callback_metrics.items()},
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "seen": getattr(module, "seen", None),
        "predictions": predictions,
    }
