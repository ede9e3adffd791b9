"""bf16-mixed and 16-mixed: weights that autocast casts are gathered in half precision, and the numbers are autocast's."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.parity import QUIET, Gradients, change_differs, in_turn, long, make_trainer, reference, train
from tests.workers import run
from tests.zoo.base import Base

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class Net(Base):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.router = nn.Linear(WIDTH, 1)

    def tensors(self):
        return (torch.randint(0, 50, (self.samples,), generator=torch.Generator().manual_seed(1)),)

    def features(self, batch):
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch):
        return self.features(batch).float().square().mean()


class Transposed(Net):
    """With the linear layer of Hugging Face's GPT-2."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up, block.down = Conv1D(WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)


class Routed(Net):
    """Computes a router in fp32, and a block outside of autocast after each batch."""

    def loss(self, batch):
        x = self.features(batch)
        with torch.autocast("cpu", enabled=False):
            gate = self.router(x.float())
        assert gate.dtype == torch.float32
        return (x.float() * gate.sigmoid()).square().mean()

    def on_train_batch_end(self, *args):
        with torch.no_grad():
            assert self.blocks[2](torch.ones(1, WIDTH)).dtype == torch.float32


class Both(Net):
    def loss(self, batch):
        x = self.router(self.embed(batch[0]))
        with torch.autocast("cpu", enabled=False):
            return (x.float() * self.router(self.embed(batch[0]))).square().mean()


def _both(stage):
    flags = {"max_steps": 1, "limit_val_batches": 0, "precision": "bf16-mixed"}
    with pytest.raises(UnsupportedError, match="called under autocast and, later in the same step, without it"):
        make_trainer(2, {"zero_stage": stage}, quiet=True, **flags).fit(Both())
    make_trainer(2, {"zero_stage": 0}, quiet=True, **flags).fit(Both())


def test_a_weight_is_used_in_one_precision():
    run(_both, 1, world=2)


class Gated(Block):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * gate


class Formed(Net):
    """Calls a block in fp32, in a form that the recorded run does not show, from the second batch of a window on."""

    def __init__(self):
        super().__init__()
        self.blocks[3] = Gated()

    def training_step(self, batch, batch_idx):
        self.late = bool(batch_idx)
        return super().training_step(batch, batch_idx)

    def loss(self, batch):
        x = self.embed(batch[0])
        for block in self.blocks[:3]:
            x = block(x)
        if not self.late:
            return self.blocks[3](x).float().square().mean()
        with torch.autocast("cpu", enabled=False):
            return self.blocks[3](x.float(), torch.ones(WIDTH)).square().mean()


class Kept(Callback):
    """Bytes of weights that autograd keeps from forward to backward."""

    def __init__(self):
        self.bytes, self.dtypes = [], {}

    def on_train_batch_start(self, trainer, module, *_):
        self.saved = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda t: t)
        self.hooks.__enter__()

    def _note(self, tensor):
        if tuple(tensor.shape) == (WIDTH, WIDTH):
            self.saved.append(tensor.untyped_storage())  # a hook would get a tensor in fp32
        return tensor

    def on_before_backward(self, trainer, module, loss):
        self.hooks.__exit__()
        assert len(self.saved) >= 8
        self.bytes.append(sum({memory._cdata: memory.nbytes() for memory in self.saved}.values()))
        self.saved = []

    def on_after_backward(self, trainer, module):
        for param in (p for group in trainer.strategy.run.data.groups for p in group.fsdp_params):
            self.dtypes[param._module_info.param_name] = param._unsharded_param.dtype


def _kept(stage, kind):
    kept = Kept()
    flags = {"max_steps": 3, "limit_val_batches": 0, "precision": "bf16-mixed", "callbacks": [kept]}
    Trainer(**{**QUIET, **flags}, devices=2, strategy=Strategy3D(zero_stage=stage, quiet=True)).fit(kind())
    return kept.bytes, {name: str(dtype) for name, dtype in kept.dtypes.items()}


@pytest.mark.parametrize("kind", [Net, Transposed])
def test_autograd_keeps_no_weights_of_other_blocks_and_norms_stay_in_fp32(kind):
    for kept, dtypes in run(_kept, 3, kind, world=2):
        assert kept == [0, 0, 0]
        assert dtypes["scale"] == "torch.float32"  # of the block's own code, like a norm's
    for kept, _ in run(_kept, 1, kind, world=2):
        assert kept == [8 * WIDTH * WIDTH * 2] * 3  # the gathered weights themselves: half of fp32, no second copy


@pytest.mark.parametrize("precision", in_turn(["bf16-mixed", "16-mixed"], 2))
@pytest.mark.parametrize("name", ["Net", "Routed", "Transposed", "Formed"])
@pytest.mark.parametrize("stage", [long(1), 3])
def test_the_numbers_are_those_of_autocast(stage, name, precision, tensor=1):  # noqa: PT028  # the next one calls it
    trainer = {"precision": precision, "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    attributes, world = {"optimizer": "plain_sgd"}, 2 * tensor
    layout = {"tensor_parallel_size": tensor, "zero_stage": stage, "quiet": True}
    wanted = reference(f"{__name__}:{name}", attributes, trainer)
    for got in run(train, f"{__name__}:{name}", world, layout, attributes, trainer, world=world):
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=2e-3, atol=2e-3)
        assert change_differs(got, wanted) < 0.02


class Gathered(Callback):
    """Dtypes of gathered parameters of products that tensor ranks split, and of the biases that they do not."""

    def on_after_backward(self, trainer, module):
        params = [param for group in trainer.strategy.run.data.groups for param in group.fsdp_params]
        params = [param for param in params if getattr(param._module_info.module, "out_features", 1) > 1]
        self.split = {str(param._unsharded_param.dtype) for param in params if param.is_dtensor}
        self.whole = {str(param._unsharded_param.dtype) for param in params if not param.is_dtensor}


def _of_tensor_ranks(stage):
    kept, layout = Gathered(), {"zero_stage": stage, "tensor_parallel_size": 2, "quiet": True}
    make_trainer(4, layout, max_steps=2, limit_val_batches=0, precision="bf16-mixed", callbacks=[kept]).fit(Net())
    return kept.split, kept.whole


def test_shards_of_tensor_ranks_are_gathered_in_half_precision_too():
    for stage in (1, 3):
        for split, whole in run(_of_tensor_ranks, stage, world=4):
            assert split == {"torch.bfloat16"}
            assert whole == {"torch.float32"}


@pytest.mark.parametrize("name", ["Net", "Formed"])
@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_ranks_have_the_numbers_of_autocast(stage, name):
    test_the_numbers_are_those_of_autocast(stage, name, "bf16-mixed", tensor=2)


def _in_halves():
    """Stages whose backwards run in one piece under a halved schedule, and the norm of the first gradients."""
    seed_everything(7, verbose=False)
    layout = {"pipeline_parallel_size": 2, "zero_stage": 2, "num_microbatches": 2}
    strategy = Strategy3D(**layout, schedule="interleaved_zero_bubble", quiet=True)
    gradients, ended = Gradients(), Callback()
    ended.on_train_end = lambda trainer, module: setattr(
        ended, "found", sorted(strategy._parallel.pipeline.in_one_piece)
    )
    flags = {"devices": 4, "max_steps": 1, "limit_val_batches": 0, "precision": "bf16-mixed"}
    trainer = Trainer(**QUIET, **flags, strategy=strategy, callbacks=[gradients, ended])
    trainer.fit(Net())
    return ended.found, gradients.norms


def test_a_proof_of_halved_backwards_leaves_no_gradients_and_keeps_the_halves():
    """FSDP2 moves gradients in half precision to a place of its own, in which the proof found and restored none."""
    wanted = reference("tests.zero.test_half_weights:Net", {}, {"max_steps": 1, "precision": "bf16-mixed"})["norms"]
    for one_piece, norms in run(_in_halves, world=4):
        assert one_piece == []
        torch.testing.assert_close(norms, wanted, rtol=0.02, atol=0.0)
