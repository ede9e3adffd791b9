import re

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_3d.layout import Layout
from lightning_3d.parallel.state_counts import expected_states
from lightning_3d.pipeline.split import plan_split
from lightning_3d.sandbox.first_batch import promised_samples
from lightning_3d.strategy.banner import draw, memory_line, opening, step_line
from lightning_3d.tensor.plan_module import plan_tensor
from tests.same.test_optimizers import OnSphere, OnSpheres
from tests.zoo.language import GPT
from tests.zoo.vectors import MLP


def test_every_rank_is_drawn_once_beside_its_blocks():
    layout = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    split = plan_split(GPT(), num_stages=2)
    assert [re.split("  +", line.strip()) for line in draw(layout)] == [
        ["data 0", "data 1"], ["stage 0", "[0 1]", "[2 3]"], ["stage 1", "[4 5]", "[6 7]"],
    ]  # fmt: skip
    drawn = list(draw(layout, split))
    assert drawn[1].endswith("  " + split.describe().splitlines()[0].removeprefix("stage 0: "))


def test_large_layouts_are_shortened():
    drawn = "\n".join(draw(Layout(data_parallel_size=16, tensor_parallel_size=8)))
    assert " ".join(drawn.splitlines()[1].split()) == "ranks [0 1 ... 7] [8 9 ... 15] ... [120 121 ... 127]"


def test_virtual_stages_are_told_by_the_rank_that_holds_them():
    layout = Layout(pipeline_parallel_size=2, stages_per_rank=2, schedule="interleaved_1f1b")
    split = plan_split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), num_stages=4)
    first, second = draw(layout, split)
    assert "0 (25% of the work), 2 (25% of the work)" in first
    assert "1 (25% of the work), 3 (25% of the work)" in second


def test_the_layout_and_the_memory_of_the_fullest_rank_are_told():
    layout = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    module = GPT()
    split, tensor = plan_split(module, num_stages=2), plan_tensor(module, 2)
    text = opening(module, layout, split, tensor)
    assert text.startswith("Strategy3D on 8 ranks: data 2 x tensor 2 x pipeline 2, ZeRO 1\n")
    assert "parameters split" in text
    said = memory_line(expected_states(module, layout, split, tensor), [torch.optim.Adam(module.parameters())], 2.0)
    assert re.search(r"memory of a rank: \S+ [KM]B on stage \d \(.* weights \+ .* gradients \+ .* Adam\)", said)


SHARDS = {(0, 1): (4, 4, 4), (1, 1): (6, 2, 2), (1, 2): (6, 4, 2), (2, 2): (6, 2, 2), (3, 2): (2, 2, 2)}


@pytest.mark.parametrize(("stage", "batches", "states"), [(*key, states) for key, states in SHARDS.items()])
def test_expected_memory_is_that_of_the_module_s_own_parameters(stage, batches, states):
    module = MLP()
    next(module.parameters()).requires_grad_(False)
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    (held,) = expected_states(module, Layout(data_parallel_size=2, zero_stage=stage), None, None, microbatches=batches)
    weights, gradients, moments = states
    assert (held.weights, held.gradients, held.optimizer) == (weights * total, gradients * trained, moments * trained)


def test_parameters_of_a_class_of_their_own_are_whole_on_every_rank():
    module, layout = OnSpheres(), Layout(data_parallel_size=2, zero_stage=3)
    parts = [each.numel() if isinstance(each, OnSphere) else each.numel() / 2 for each in module.parameters()]
    assert expected_states(module, layout, None, None)[0].weights == 4 * sum(parts)


def test_stages_hold_what_they_share_twice_and_the_rest_once():
    module = GPT()
    split, layout = plan_split(module, num_stages=2), Layout(pipeline_parallel_size=2, zero_stage=0)
    tied = sum(module.get_parameter(tie.name).numel() for tie in split.ties)
    total = sum(parameter.numel() for parameter in module.parameters())
    assert tied > 0
    assert sum(held.weights for held in expected_states(module, layout, split, None)) == 4 * (total + tied)


def test_offloaded_states_are_not_on_the_device():
    layout = Layout(data_parallel_size=2, zero_stage=3, offload="all")
    module = MLP()
    said = memory_line(expected_states(module, layout, None, None), [torch.optim.Adam(module.parameters())], 2.0)
    assert "0 B (all of it is offloaded)" in said


@pytest.mark.parametrize(
    ("sizes", "accumulate", "batch", "said"),
    [
        ({}, 1, 16, "1 data rank x batch 16 = 16 samples"),
        ({"data_parallel_size": 2}, 3, 16, "2 data ranks x batch 16 x 3 batches accumulated = 96 samples"),
        ({"data_parallel_size": 2}, 1, None, "2 data ranks x the loader's batch"),
        (
            {"pipeline_parallel_size": 2}, 1, 12,
            "1 data rank x batch 12 = 12 samples; the pipeline cuts a batch into 6 microbatches (1f1b, idle 14% of the time)",
        ),
        (
            {"pipeline_parallel_size": 2, "num_microbatches": 4}, 1, None,
            "1 data rank x the loader's batch; the pipeline cuts a batch into 4 microbatches (1f1b, idle 20% of the time)",
        ),
        (
            {"pipeline_parallel_size": 2}, 1, None,
            "1 data rank x the loader's batch; the pipeline cuts a batch into microbatches (1f1b)",
        ),
    ],
)  # fmt: skip
def test_one_optimizer_step_is_told(sizes, accumulate, batch, said):
    assert step_line(Layout(**sizes), accumulate, batch) == f"one optimizer step: {said}"


def test_the_batch_size_of_a_loader_is_read_where_it_has_one():
    data = TensorDataset(torch.zeros(8))
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    for loader, size in ((DataLoader(data, 2), 2), (DataLoader(data, batch_sampler=sampler), 4), ([1, 2], None)):
        assert promised_samples(loader) == size
