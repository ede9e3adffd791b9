"""Which units a module has, in which order they run, and how they are cut; all on one process."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.errors import PipelineSplitError
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.split import apply_split, plan_split, restore
from tests.pipeline.loop import cut, opened
from tests.workers import run
from tests.zoo.batchless import GPT, Encoder, Residual, build


def test_units_are_in_order_of_declaration():
    assert plan_split(Encoder(), None, 2).stages[0][0] == "embedding"
    names = [unit.name for unit in plan_split(Residual(2), None, 2).units]
    assert names == ["project", "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1", "out"]


def test_stages_are_balanced_with_the_head_weighed_in():
    split = plan_split(GPT(layers=4, tied=False, vocab=1000), None, 2)
    assert split.stages[1] == ("lm_head",)
    split = plan_split(GPT(layers=4, tied=False), None, 2)
    assert [name for name in split.stages[0] if ".h." in name] == ["transformer.h.0", "transformer.h.1"]
    assert "stage 1:" in split.describe()


def test_what_several_stages_use_is_held_by_all_of_them():
    (tie,) = plan_split(GPT(), None, 2).ties
    assert tie.names == ("transformer.wte.weight", "lm_head.weight")
    assert tie.stages == (0, 1)
    (tie,) = plan_split(Encoder(), None, 3).ties
    assert (tie.names, tie.stages) == (("position",), (0, 1, 2))


def test_one_rank_with_nearly_all_of_the_work_is_warned_of():
    uneven = nn.Sequential(nn.Linear(4, 4), nn.Linear(100, 100))
    assert "The pipeline ranks do 0%, 100% of the work" in plan_split(uneven, num_stages=2).warning(2, "1f1b")
    assert plan_split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), num_stages=2).warning(2, "1f1b") is None


def test_one_unit_leaves_stages_empty():
    module = nn.Module()
    module.layer = nn.Linear(2, 2)
    split = plan_split(module, None, 3)
    assert split.stages == ((), (), ("layer",))
    assert split.has_one_stage


def test_names_groups_and_ties_stay():
    module = GPT(layers=4)
    before = copy.deepcopy(module)
    split = plan_split(module, None, 3)
    absent = apply_split(module, split, [1])
    assert list(dict(module.named_parameters())) == list(dict(before.named_parameters()))
    assert list(module.state_dict()) == list(before.state_dict())
    assert module.lm_head.weight is module.transformer.wte.weight
    assert module.lm_head.weight.is_meta
    assert set(absent.values()) == {0, 2}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == len(list(before.parameters()))
    module.eval()
    assert not any(inner.training for inner in module.modules())


def restored():
    module = GPT(layers=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float(dist.get_rank()))
    split = plan_split(module, None, 2)
    before = dict(module.named_parameters(remove_duplicate=False))
    absent = apply_split(module, split, [dist.get_rank()])
    with UndoStack() as undo:
        opened(module, split, dist.group.WORLD, undo)
    restore(module, absent, dist.group.WORLD, (0, 1), before)
    assert all(module.get_parameter(name) is parameter for name, parameter in before.items())
    assert module.lm_head.weight is module.transformer.wte.weight
    assert "forward" not in module.transformer.h[0].__dict__
    assert not module.transformer.h[0]._forward_pre_hooks
    return {name: float(value.mean()) for name, value in module.named_parameters()}


def test_undo_makes_every_rank_whole():
    split = plan_split(GPT(layers=2), None, 2)
    stage = {unit: index for index, units in enumerate(split.stages) for unit in units}
    for rank, values in enumerate(run(restored, world=2, group=True)):
        for name, value in values.items():
            owner = next(index for unit, index in stage.items() if name.startswith(unit + "."))
            assert value == (rank if name == "transformer.wte.weight" else owner)


def carried(name):
    module, batches = build(name)
    pipeline = cut(module, num_microbatches=2)
    pipeline.training_step(batches[0], 0)
    (trace,) = pipeline.traces.values()
    return len(trace.parts[0].after)


@pytest.mark.parametrize(
    ("name", "tensors"), [("Residual", 1), ("Llama", 1), ("MLP", 1), ("ViT", 1), ("BERT", 1), ("UNet", 3)]
)
def test_only_what_is_needed_crosses_a_cut(name, tensors):
    assert run(carried, name, world=2, group=True) == [tensors, tensors]


def test_a_unit_that_is_never_called_is_no_stage():
    class Idle(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.early = nn.Linear(4, 4)
            self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
            self.frozen = nn.Linear(99, 99)

    blocks = Idle(3)
    calls = ("blocks.0", "blocks.1", "blocks.2")
    split = plan_split(blocks, num_stages=2, uncut=SimpleNamespace(calls=calls, read=()))
    assert split.stages == (("early", "blocks.0"), ("blocks.1", "blocks.2", "frozen"))
    alone = Idle(1)
    split = plan_split(alone, num_stages=2, uncut=SimpleNamespace(calls=("blocks.0",), read=()))
    assert split.has_one_stage
    with pytest.raises(PipelineSplitError, match=r"only 3 blocks to place \(blocks.0, "):
        plan_split(blocks, num_stages=4, uncut=SimpleNamespace(calls=calls, read=()))
