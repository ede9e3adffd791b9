"""The search for the plan of one block: how many candidates are tried, and on which state of the block."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.proof import Prover
from tests.parity import silent
from tests.zoo.blocks import Stack


class Mixer(nn.Module):
    """Three channels for each of four heads, a number that its code has as a literal."""

    def __init__(self, width=12):
        super().__init__()
        self.heads, self.width = 4, width
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        heads = self.into(x).unflatten(-1, (self.heads, 3)).softmax(-1).reshape(*x.shape[:-1], 12)
        return x + self.out(heads)


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{number}": Mixer() for number in range(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


class Normalized(nn.Module):
    """Evaluation uses statistics that training has changed. It reads a list of numbers, as the layers of scvi-tools."""

    def __init__(self):
        super().__init__()
        self.widths = [8]
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x[..., : self.widths[0]])).relu())


def planned(blocks, batch):
    torch.manual_seed(0)
    module = Stack(*blocks).train()
    with silent():
        return plan_tensor(module, 2, calls=record_calls(module, lambda: module(batch)))


def test_a_block_with_a_batch_norm_is_split():
    plan = planned([Normalized()], torch.randn(6, 8))
    assert {"blocks.0.up.weight", "blocks.0.down.weight"} <= plan.splits.keys(), plan.unsplit


def test_units_of_images_that_few_runs_leave_off_are_split():
    """A block that takes images of one size only is studied with two rows, in which a ReLU turns many units off."""
    block = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    assert {"blocks.0.1.weight", "blocks.0.3.weight"} <= planned([block], torch.randn(6, 1, 8, 8)).splits.keys()


class Divided(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(inputs, outputs)), inputs**-0.5

    def forward(self, x):
        return F.silu(x @ (self.weight * self.scale))


class Radial(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x[:, :4])


def test_an_activation_behind_a_product_is_seen_in_numbers_of_the_size_that_code_expects():
    """Layers of e3nn divide numbers of size 1. MACE had a first loss of 1.681 for 1.656: ranks summed behind SiLU."""
    plan = planned([Radial(Divided(4, 32), Divided(32, 32), Divided(32, 32), Divided(32, 16))], torch.randn(8, 16))
    assert not plan.splits


class Sized(nn.Module):
    """A block that gets a shape beside its activation, as those of vision models do."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleList([Reshaped()])

    def forward(self, x):
        return self.block[0](x, x.shape[1:])


class Reshaped(Normalized):
    def forward(self, x, shape):
        return super().forward(x.reshape(-1, 8)).view(-1, *shape)


def test_a_block_that_gets_a_shape_is_split():
    torch.manual_seed(0)
    module, batch = Sized().train(), torch.randn(2, 3, 8)
    assert "block.0.up.weight" in plan_tensor(module, 2, calls=record_calls(module, lambda: module(batch))).splits


@pytest.fixture
def proofs(monkeypatch):
    tried, prove = [], Prover.prove

    def counted(self, plan):
        tried.append(plan)
        return prove(self, plan)

    monkeypatch.setattr(Prover, "prove", counted)
    return tried


def test_layers_that_repeat_in_a_block_are_refused_once(proofs):
    plan = planned([Stage(3)], torch.randn(2, 5, 12))
    assert not plan.splits
    assert {f"blocks.0.layers.layer{number}.into.weight" for number in range(3)} <= plan.unsplit.keys()
    layers = [{name.split(".")[1] for name in tried.splits} for tried in proofs]
    assert layers.count({"layer0"}) > 1
    assert layers.count({"layer1"}) == layers.count({"layer2"}) == 0


class Layer(nn.Module):
    """Two products. `way` says if hidden channels depend on one another between them."""

    def __init__(self, way):
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        return x + self.down(hidden if self.way == "each" else hidden.cumsum(-1))


@pytest.mark.parametrize(("ways", "split"), [(["each"] * 4, "0123"), (["each", "each", "all"], "01")])
def test_layers_that_repeat_in_a_block_are_proven_at_once(proofs, ways, split):
    stage = Stage(0)
    stage.layers.update({f"layer{number}": Layer(way) for number, way in enumerate(ways)})
    plan = planned([stage], torch.randn(2, 5, 8))
    names = [f"blocks.0.layers.layer{number}.{name}" for number in split for name in ("up", "down")]
    assert plan.splits.keys() == {f"{name}.weight" for name in names} | {
        f"{name}.bias" for name in names if name.endswith("up")
    }
    layers = [{name.split(".")[1] for name in tried.splits} for tried in proofs]
    if "all" in ways:
        assert {"layer0"} in layers  # alone, as the three together were refused
    else:
        assert min(map(len, layers)) == len(ways)
