import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed as dist
from torch import nn, optim
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.errors import RunError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.optim.probe import states_per_parameter_byte
from lightning_3d.parallel.state_counts import expected_states
from lightning_3d.pipeline.split import plan_split
from lightning_3d.sandbox.first_batch import promised_samples
from lightning_3d.strategy.banner import draw, memory_line, opening, step_line
from lightning_3d.strategy.fit_report import Measured, write, write_failure
from lightning_3d.tensor.plan_module import plan_tensor
from tests.parity import QUIET, long, make_trainer, silent
from tests.same.test_optimizers import OnSphere, OnSpheres
from tests.workers import on_ranks, run
from tests.zoo.language import GPT, UntiedGPT
from tests.zoo.plain import MLP


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
    for name, hidden in (("", True), ("lightning_3d", False)):
        warnings.filterwarnings("ignore" if hidden else "default", module=name)
        text = opening(module, layout, split, tensor)
        assert ("warnings: a filter hides all" in text) == hidden
    assert re.match(r"Strategy3D on 8 ranks: data 2 x tensor 2 x pipeline 2, ZeRO 1\n[\s\S]*parameters split", text)
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


class Nodes(MLP):
    """Has batches of a class of its own, as graphs are."""

    def on_after_batch_transfer(self, batch, index):
        return SimpleNamespace(x=batch)

    def training_step(self, batch, index):
        return super().training_step(batch.x, index)


class Single(MLP):
    """Has one block, which one stage of a pipeline computes for the full batch."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = nn.Linear(8, 1), None


def _opened(kind=Nodes):
    from lightning_3d.strategy import fit_report

    printed = []
    with replaced_attributes(fit_report, rank_zero_info=printed.append):
        strategy = Strategy3D(pipeline_parallel_size=2)
        Trainer(**QUIET, devices=2, strategy=strategy, max_steps=1).fit(kind())
    return printed


def test_a_batch_without_rows_is_said_to_stay_whole():
    assert "the pipeline leaves a batch whole (1f1b, idle 50% of the time)" in str(run(_opened, world=2)[0])


def test_one_stage_with_all_blocks_is_said_to_draw_other_numbers():
    said = [text for text in run(_opened, Single, world=2)[0] if "has another seed than on one device" in text]
    assert len(said) == 1


def test_the_batch_size_of_a_loader_is_read_where_it_has_one():
    data = TensorDataset(torch.zeros(8))
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    for loader, size in ((DataLoader(data, 2), 2), (DataLoader(data, batch_sampler=sampler), 4), ([1, 2], None)):
        assert promised_samples(loader) == size


LAYOUTS = {"zero3": {"zero_stage": 3}, "pipeline": {"pipeline_parallel_size": 2}, "tensor": {"tensor_parallel_size": 2}}


class Look(Callback):
    def on_train_epoch_end(self, trainer, module):
        self.report = trainer.strategy.memory_report()
        steps = [each for optimizer in trainer.optimizers for state in optimizer.state.values() for each in state]
        self.steps = steps.count("step")


def _report(strategy, quiet, epochs):
    from lightning_3d.strategy import fit_report

    printed, look, module = [], Look(), UntiedGPT()
    fit_report.rank_zero_info, before = printed.append, fit_report.rank_zero_info
    try:
        chosen = Strategy3D(quiet=quiet, teardown="sharded", **strategy)
        trainer = Trainer(**{**QUIET, "callbacks": [look]}, devices=2, strategy=chosen, max_epochs=epochs)
        trainer.fit(module)
    finally:
        fit_report.rank_zero_info = before
    for ask in (chosen.memory_report, chosen.grad_norm, lambda: chosen.pipeline):
        with pytest.raises(RunError, match=r"outside of (fit|a run)"):
            ask()
    local = [each.to_local() if hasattr(each, "to_local") else each for each in module.parameters()]
    here = sum(each.numel() * 4 for each in local if not each.is_meta)
    return {"report": look.report, "steps": look.steps, "here": here, "lines": [t for t in printed if "epoch" in t]}


@pytest.mark.parametrize("layout", ["zero3", *(long(name) for name in ("pipeline", "tensor"))])
def test_counted_bytes_are_those_of_the_tensors_of_each_rank(layout):
    everywhere = run(_report, LAYOUTS[layout], False, 3, world=2)
    for rank, got in enumerate(everywhere):
        mine = got["report"].ranks[rank]
        assert mine.weights == mine.gradients == got["here"]  # fp32
        assert mine.states == 2 * got["here"] + 4 * got["steps"]  # AdamW, and its step counts
        assert mine.buffers == 0
        assert mine.rest is None
        assert mine.peak > mine.weights + mine.gradients + mine.states
        assert got["report"] == everywhere[0]["report"]
        assert len(str(got["report"]).splitlines()) == 3
        (line,) = got["lines"]
        assert re.match(
            r"memory after the first epoch, rank \d: .* weights \+ .* gradients \+ .* states after a step", line
        )
        if layout != "tensor":  # the plan leaves out that tensor ranks round
            assert mine.planned.total == pytest.approx(4 * mine.weights, rel=0.05)


def test_quiet_prints_nothing():
    assert [got["lines"] for got in run(_report, {"zero_stage": 3}, True, 1, world=2)] == [[], []]


OPTIMIZERS = {
    "SGD": lambda given: optim.SGD(given, lr=0.1),
    "momentum": lambda given: optim.SGD(given, lr=0.1, momentum=0.9),
    "Adam": lambda given: optim.Adam(given),
    "amsgrad": lambda given: optim.AdamW(given, amsgrad=True),
    "RMSprop": lambda given: optim.RMSprop(given, centered=True, momentum=0.1),
}


class OfItsOwn(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.view(16, 40))


def _states(optimizer):
    """Bytes of states that a real step leaves, but for step counts."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(value.nbytes for value in values if value.ndim)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_a_real_step(name):
    module = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 2))
    optimizer = OPTIMIZERS[name](module.parameters())
    (expected,) = expected_states(module, Layout(), None, None)
    before = torch.get_rng_state()
    counted = states_per_parameter_byte([optimizer])
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    assert counted * expected.optimizer == _states(optimizer)


def test_groups_and_optimizers_count_by_their_parameters():
    large, small = nn.Linear(100, 30, bias=False), nn.Linear(10, 100, bias=False)
    assert states_per_parameter_byte([optim.Adam(large.parameters()), optim.SGD(small.parameters())]) == 1.5
    groups = [{"params": large.parameters(), "momentum": 0.9}, {"params": small.parameters()}]
    assert states_per_parameter_byte([optim.SGD(groups, lr=0.1)]) == 0.75


def test_an_optimizer_that_cannot_be_tried_is_not_counted():
    module = nn.Linear(40, 16, bias=False)
    optimizers = [OfItsOwn(module.parameters())]
    kept = states_per_parameter_byte(optimizers)
    said = memory_line(expected_states(module, Layout(), None, None), optimizers, kept)
    assert said.endswith("(2.56 KB weights + 2.56 KB gradients), and what OfItsOwn keeps, and activations")


class Net(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = nn.Linear(100, 10, bias=False), kind

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())


@pytest.mark.parametrize(("kind", "said"), [("SGD", ""), ("momentum", " + 4 KB SGD"), ("Adam", " + 8 KB Adam")])
def test_fit_says_the_states_of_its_optimizer(kind, said, monkeypatch):
    printed = []
    monkeypatch.setattr("lightning_3d.strategy.fit_report.rank_zero_info", printed.append)
    data = DataLoader(TensorDataset(torch.zeros(4, 100)), batch_size=2)
    with silent():
        make_trainer(1, {"zero_stage": 0}, max_steps=1).fit(Net(kind), data)
    dist.destroy_process_group()  # other tests of this process start their own
    lines = [line for line in printed if "memory of a rank" in line]
    assert len(lines) == 1
    assert re.search(r"\(4 KB weights \+ 4 KB gradients(.*)\), and activations", lines[0])[1] == said


class Counted(optim.SGD):
    steps = 0

    def step(self, closure=None):
        type(self).steps += 1
        return super().step(closure)


class FromTheStart(Callback):
    def on_train_start(self, *_):
        Counted.steps = 0


class Counts(Net):
    def configure_optimizers(self):
        return Counted(self.parameters(), lr=0.1)


@on_ranks(2, group=False)
def test_no_copy_of_an_optimizer_steps_once_training_has_started():
    """A user who counts steps from `on_train_start` on counts the real ones."""
    data = DataLoader(TensorDataset(torch.zeros(8, 100)), batch_size=2)
    trainer = make_trainer(2, {"timeout": 60}, max_epochs=2, max_steps=-1, callbacks=[FromTheStart()])
    trainer.fit(Counts("SGD"), data)
    assert Counted.steps == trainer.global_step == 8


MEASURED = Measured(step_seconds=0.1, seconds=1.0, memory_bytes=10, steps=3, step_samples=8)


def report(folder):
    write(folder, MEASURED, Layout(), {}, torch.device("cpu"))


def failure(folder):
    write_failure(folder, 0, ZeroDivisionError("the step's own error"))


@pytest.mark.parametrize(("writes", "name"), [(report, "lightning_3d.json"), (failure, "lightning_3d_failed.json")])
def test_a_folder_that_takes_no_file_is_warned_of(tmp_path, writes, name):
    (tmp_path / "file").touch()
    (tmp_path / name).mkdir()
    for folder in (tmp_path, tmp_path / "file"):  # what is in the way is a folder, then a file
        with pytest.warns(UserWarning, match=f"{name} cannot be written .*The run goes on without it"):
            writes(folder)


def test_a_report_takes_the_place_of_a_failure(tmp_path):
    failure(tmp_path)
    assert json.loads((tmp_path / "lightning_3d_failed.json").read_text())["rank"] == 0
    report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["lightning_3d.json"]


def test_a_refusal_that_all_ranks_raise_is_that_of_the_first(tmp_path):
    refused = UnsupportedError("not on this rank")
    refused.rank = 3
    for rank in (3, 0):
        write_failure(tmp_path, rank, refused)
        assert json.loads((tmp_path / "lightning_3d_failed.json").read_text())["rank"] == 3
