import re

from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.opening import draw, opening
from lightning_3d.pipeline.split import plan_split
from lightning_3d.tensor.infer import plan_tensor
from tests.modules import GPT


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


def test_one_optimizer_step_is_told():
    layout = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4)
    text = opening(layout, plan_split(GPT(), num_stages=2), plan_tensor(GPT(), 2), accumulate=3)
    assert text.startswith("Strategy3D on 8 ranks: data 2 x tensor 2 x pipeline 2, ZeRO 1\n")
    assert "2 data ranks x the loader's batch x 3 batches accumulated" in text
    assert text.endswith("the pipeline cuts a batch into 4 microbatches (1f1b)")
    assert "parameters divided" in text
