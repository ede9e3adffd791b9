"""`strategy="3d"` and `layout="auto"`: what is chosen, that all ranks choose it, and that it trains the same."""

import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lightning_3d.tools.auto_layout as auto
from lightning_3d import Layout, Strategy3D
from lightning_3d.errors import ConfigurationError, LayoutError, PlannerError
from lightning_3d.tools.auto_layout import fake_tensors
from lightning_3d.tools.planner.choose import Fixed
from tests.parity import QUIET, assert_parity, build, long, reference
from tests.workers import on_ranks, run
from tests.zoo import MODULES
from tests.zoo.base import Base
from tests.zoo.language import GPT

HERE = "tests.test_auto:"


class Sines(Base):
    """A chain of blocks that could be cut."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def tensors(self):
        x = torch.linspace(-1, 1, self.samples * 8).view(self.samples, 8)
        return x, x.sin()

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Manual(Sines):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.log("loss", self.step_by_hand(self.optimizers(), batch), sync_dist=True)


class Peeking(Sines):
    """Looks at a value in its step, which a tensor without memory does not have."""

    def loss(self, batch):
        loss = super().loss(batch)
        assert loss.item() >= 0
        return loss


class Summed(nn.Module):
    """Positions meet in a cumulative sum."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Linear(width, width)

    def forward(self, x):
        return x + self.net(x).cumsum(1).tanh()


class Summing(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Summed(16) for _ in range(3))


class Single(Sines):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)


def choose(name, world, memory, arguments):
    """Train with devices of `memory` bytes; what was chosen, said, learnt."""
    said, real = [], auto.cluster_here
    before, auto.rank_zero_info = auto.rank_zero_info, said.append

    def small(*args, **sizes):
        cluster = real(*args, **sizes)
        return replace(cluster, accelerator=replace(cluster.accelerator, memory_gb=memory / 1e9))

    auto.cluster_here = real if memory is None else small
    try:
        torch.manual_seed(7)
        module = build(name)
        strategy = Strategy3D(layout="auto", quiet=True, **arguments)
        flags = {"devices": world, "strategy": strategy, "max_epochs": 1, "limit_val_batches": 0}
        Trainer(**QUIET, **flags).fit(module)
    except ConfigurationError as error:
        return type(error).__name__, str(error)
    finally:
        auto.cluster_here, auto.rank_zero_info = real, before
    return strategy.layout, said[0], module.seen


@pytest.mark.parametrize(("name", "world"), [("GPT", 1), ("GPT", 2), long("Llama", 4)])
def test_the_name_3d_trains_as_one_device_does(name, world):
    assert_parity(name, world, {"layout": "auto"})


def test_the_name_3d_is_the_planner_s_choice():
    strategy = Trainer(**{**QUIET, "strategy": "3d", "devices": 1}).strategy
    assert strategy.sizes.auto is not None
    assert Strategy3D().sizes.auto is None


def test_three_lines_say_what_was_chosen_and_why():
    for layout, said, _ in run(choose, "GPT", 2, None, {}, world=2):
        assert layout == Layout(data_parallel_size=2)
        what, memory, why = said.splitlines()
        assert what.startswith("layout: data 2 x tensor 1 x pipeline 1, ZeRO 1 for GPT (")
        assert memory.startswith("memory: states and activations need ")
        assert why == "why: it fits, and nothing simpler or clearly faster does."


@pytest.mark.parametrize("name", ["GPT", long("Llama")])
def test_devices_with_little_memory_get_a_layout_that_needs_less_and_trains_the_same(name):
    plain = run(choose, name, 4, None, {}, world=4)[0]
    amount, unit = re.search(r"need ([\d.]+) (KB|MB)", plain[1]).groups()
    needed = float(amount) * {"KB": 1e3, "MB": 1e6}[unit]
    results = run(choose, name, 4, 0.6 * needed, {}, world=4)
    layouts = {result[0] for result in results}
    assert len(layouts) == 1
    (chosen,) = layouts
    assert chosen.tensor_parallel_size * chosen.pipeline_parallel_size > 1 or chosen.zero_stage > 1
    for result in results:
        assert result[1] == results[0][1]
        torch.testing.assert_close(result[2], reference(name, {}, {})["losses"], rtol=1e-4, atol=1e-5)


def test_a_given_number_of_context_ranks_is_kept():
    for layout, _, losses in run(choose, "GPT", 4, None, {"context_parallel_size": 2}, world=4):
        assert layout == Layout(data_parallel_size=2, context_parallel_size=2)
        torch.testing.assert_close(losses, reference("GPT", {}, {})["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT", f"{HERE}Summing"])
def test_context_ranks_are_chosen_where_nothing_else_fits(name):
    given = {"zero_stage": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    said = run(choose, name, 2, None, given, world=2)[0][1]
    amount, unit = re.search(r"need ([\d.]+) (KB|MB)", said).groups()
    memory = float(amount) * {"KB": 1e3, "MB": 1e6}[unit]
    for layout, why, losses in run(choose, name, 2, memory, given, world=2):
        assert layout.context_parallel_size == (2 if name == "GPT" else 1)
        assert ("context_parallel_size=2 divides nothing of Summing" in why) == (name != "GPT")
        torch.testing.assert_close(losses, reference(name, {}, {})["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_data_ranks_share_experts_where_that_fits():
    name, given = "tests.experts.trained:Qwen3", {"zero_stage": 1, "pipeline_parallel_size": 1}
    for layout, said, losses in run(choose, name, 2, 300_000, {**given, "tensor_parallel_size": 1}, world=2):
        assert layout.expert_parallel_size == 2
        assert "the simplest, data 2 x tensor 1 x pipeline 1, ZeRO 1, would need" in said
        torch.testing.assert_close(losses, reference(name, {}, {})["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Manual", "manual optimization is left to data parallelism"),
        ("Single", "it has no blocks that a pipeline could cut between"),
        ("Peeking", "the step cannot be run ahead"),
    ],
)
def test_what_cannot_be_done_is_not_chosen_and_said(name, reason):
    states = 16 * sum(parameter.numel() for parameter in build(HERE + name).parameters())
    for layout, said, _ in run(choose, HERE + name, 2, 0.8 * states, {}, world=2):
        assert reason in said.splitlines()[2]
        assert len(said.splitlines()) == 3
        if name != "Peeking":
            assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (1, 1)
            assert layout.zero_stage > (1 if name == "Manual" else 0)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        long({"tensor_parallel_size": 2}, (2, 2, 1, 1)),
        ({"pipeline_parallel_size": 2, "zero_stage": 0}, (2, 1, 2, 0)),
        long({"data_parallel_size": 1, "pipeline_parallel_size": 1}, (1, 4, 1, 1)),
    ],
)
def test_what_is_given_is_kept(given, sizes):
    for layout, said, losses in run(choose, "GPT", 4, None, given, world=4):
        assert (
            layout.data_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.zero_stage,
        ) == sizes  # fmt: skip
        assert "is fixed" in said.splitlines()[2]
        torch.testing.assert_close(losses, reference("GPT", {}, {})["losses"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "memory", "error", "message"),
    [
        ({"data_parallel_size": 3}, None, LayoutError, "data_parallel_size=3: no layout of 2 ranks has that"),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2}, None, LayoutError,
            "data_parallel_size=2, tensor_parallel_size=2: no layout of 2 ranks",
        ),
        ({}, 1000, PlannerError, "weights, gradients and optimizer states alone need"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_on_every_rank(given, memory, error, message):
    for kind, text in run(choose, "GPT", 2, memory, given, world=2):
        assert kind == error.__name__
        assert message in text


def test_unknown_choices_are_refused_when_built():
    with pytest.raises(ConfigurationError, match="layout='best' is not one of 'given', 'auto'"):
        Strategy3D(layout="best")
    with pytest.raises(LayoutError, match="tensor_parallel_size=0"):
        Strategy3D(layout="auto", tensor_parallel_size=0)


@pytest.mark.parametrize("world", [1, 2, 6, 12])
def test_the_first_guess_multiplies_to_the_world(world):
    for size in (1, 2, 3):
        for given in ("data", "tensor", "pipeline"):
            if world % size == 0:
                guess = auto.first_guess(Layout(), Fixed(**{given: size}), world)
                assert guess.world_size == world
                assert getattr(guess, f"{given}_parallel_size") == size


@on_ranks(2, group=False)
def test_a_choice_holds_for_evaluation_and_is_made_anew_for_another_fit():
    said = []
    auto.rank_zero_info, before = said.append, auto.rank_zero_info
    try:
        module, strategy = MODULES["GPT"](), Strategy3D(layout="auto", quiet=True)
        trainer = Trainer(**{**QUIET, "devices": 2, "strategy": strategy, "max_epochs": 1})
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
    finally:
        auto.rank_zero_info = before
    assert (len(said), isinstance(module, LightningModule), len(module.seen)) == (2, True, 10)


def test_measuring_leaves_the_module_as_it_was():
    module = MODULES["GPT"]()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters(remove_duplicate=False)}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module.norm.seen_width = 16
    with fake_tensors(module, mode):
        module.norm.last, module.norm.seen_width = torch.ones(1), 17
        assert module.head.weight is module.embed.weight
        assert all(isinstance(p, FakeTensor) for p in module.parameters())
    assert module.norm.seen_width == 16
    assert not hasattr(module.norm, "last")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def _resume(folder, kind):
    flags = {**QUIET, "devices": 2, "limit_val_batches": 0}
    choose = {"layout": "auto", "quiet": True, "checkpoint_format": kind}
    torch.manual_seed(7)
    first, path = build("GPT"), f"{folder}/{kind}.ckpt"
    trainer = Trainer(**flags, strategy=Strategy3D(**choose), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(path)
    second = build("GPT")
    Trainer(**flags, strategy=Strategy3D(**choose), max_epochs=2).fit(second, ckpt_path=path, weights_only=False)
    return first.seen + second.seen


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_goes_on_from_a_checkpoint_under_a_chosen_layout(tmp_path, kind):
    for losses in run(_resume, str(tmp_path), kind, world=2):
        torch.testing.assert_close(losses, reference("GPT", {}, {"max_epochs": 2})["losses"], rtol=1e-4, atol=1e-5)
