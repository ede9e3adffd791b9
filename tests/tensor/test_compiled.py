"""Blocks that their user compiled are planned uncompiled, and run as compiled in shards."""

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.errors import UnsupportedError, explain_shard_errors
from lightning_3d.module.graph_private import nodes_made
from tests.parity import largest
from tests.tensor.parity import in_threads
from tests.zoo import blocks


def in_place(module):
    for block in module.blocks:
        block.compile(backend="eager")


def wrapped(module):
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend="eager")


def inside(module):
    for block in module.blocks:
        block.mlp = torch.compile(block.mlp, backend="eager")


@pytest.mark.long
@pytest.mark.parametrize("change", [in_place, wrapped, inside])
def test_compiled_blocks_are_split(change):
    torch.manual_seed(0)
    module = blocks.nano_gpt()
    change(module)
    batches = [(torch.randn(2, 8, 16), torch.randn(2, 8, 16)) for _ in range(2)]
    plan, difference = in_threads(module, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), batches, 2)
    assert len(plan.splits) == 12
    assert largest(difference.values()) < 1e-5


GRAPH = RuntimeError("AssertionError: torch.compile is currently being used with tensor subclass inputs. ...")
JACOBIANS = ValueError("Some `jac` fields were not populated. ...")


@pytest.mark.parametrize(("error", "says"), [(GRAPH, "Compile the blocks"), (JACOBIANS, "zero_stage=0.*reduce")])
def test_what_packages_meet_names_the_remedy(error, says):
    """GPT-2 of Hugging Face, compiled whole, and torchjd: docs/packages.md. Compiled blocks train, and ZeRO 0."""
    with pytest.raises(UnsupportedError, match=says), explain_shard_errors("tensor 2"):
        raise error


def test_a_count_of_nodes_ends_no_graph():
    counted = torch.compile(lambda x: x + nodes_made(), backend="eager", fullgraph=True)
    assert torch.equal(counted(torch.ones(2)), torch.ones(2))
