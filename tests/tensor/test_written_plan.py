"""Plans given by hand or declared by the module."""

import pytest
import torch

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.written_plan import WrittenSplit, declared_plan
from tests.zoo import blocks


def plan(tensor_plan, module=None, size=2):
    module = module or blocks.nano_gpt()
    calls = record_calls(module, lambda: module(torch.randn(2, 8, 16)))
    return plan_tensor(module, size, tensor_plan=tensor_plan, calls=calls)


def test_right_plan_is_used():
    made = plan({"blocks.*.attn.c_attn": "column:3", "blocks.*.attn.c_proj": "row"})
    assert made.splits["blocks.1.attn.c_attn.weight"].sections == (16, 16, 16)
    assert made.splits["blocks.1.mlp.0.weight"].dim == 0  # the rest is inferred


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"blocks.*.attn.c_attn": "column:2", "blocks.*.attn.c_proj": "row"}, r"blocks\.0 .* off by [0-9.]+"),
        ({"*.attn.c_attn": "row", "*.attn.c_proj": "column"}, r"blocks\.0 does not compute the same.*off by [0-9.]+"),
        ({"blocks.0.attn.c_atn": "column"}, r"'blocks\.0\.attn\.c_atn'.*did you mean .*blocks\.0\.attn\.c_attn"),
        ({"*.attn.c_attn": "column:5"}, "48 columns"),
        *(({"*": text}, "must be") for text in ("columns", "column:x", "whole:2", "")),
    ],
)
def test_a_wrong_plan_is_refused(written, said):
    with pytest.raises(TensorPlanError, match=said):
        plan(written)


@pytest.mark.filterwarnings("ignore:These stay unsplit")
def test_whole_is_kept_whole():
    made = plan({"*.attn": "whole"})
    assert not any("attn" in name for name in made.splits)
    assert "the tensor plan says so" in made.unsplit["blocks.0.attn.c_attn.weight"]


def test_a_column_with_no_row_is_refused():
    with pytest.raises(TensorPlanError, match=r"does not compute the same.*off by [0-9.]+"):
        plan({"net.0": "row"}, Wrapped())


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))

    def forward(self, x):
        return self.net(x)


def test_a_declared_plan_is_read():
    ways = declared_plan(blocks.llama())
    assert ways["model.layers.1.self_attn.q_proj.weight"] == WrittenSplit("column")
    assert ways["model.layers.0.mlp.down_proj.weight"] == WrittenSplit("row")
