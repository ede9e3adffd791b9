import torch
from torch import nn

from lightning_3d.module.anatomy import Anatomy


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.small = nn.Sequential(nn.Linear(4, 1))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_chains_are_outermost_and_largest_first():
    anatomy = Anatomy.of(_Net())
    assert [chain.name for chain in anatomy.chains] == ["blocks", "small"]
    assert anatomy.chains[0].blocks == ("blocks.0", "blocks.1", "blocks.2")


def test_tied_parameters_are_counted_once():
    anatomy = Anatomy.of(_Net())
    assert anatomy.tied == (("embed.weight", "head.weight"),)
    assert anatomy.parameters == 32 + 3 * 20 + 5


def test_meta_modules_are_read_without_memory():
    with torch.device("meta"):
        module = _Net()
    assert Anatomy.of(module).parameters == 97
