"""With recompute, training is bit for bit what it is without, and keeps fewer bytes: those that the planner says."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d import Strategy3D
from lightning_3d.activations.kept_results import is_kept
from lightning_3d.activations.recomputed_block import BlockBytes
from lightning_3d.errors import ConfigurationError, UnsupportedError
from lightning_3d.tools.planner.profile_module import profile_module
from tests.activations.models import Odd, OddOnes, Tokens, Wide
from tests.activations.watching import counts, fastest_step, kept, peaks
from tests.parity import assert_parity, layouts, long, make_trainer, train
from tests.workers import run

PLAIN, TOKENS, ODD, WIDE = (f"tests.activations.models:{name}" for name in ("Plain", "Tokens", "OddOnes", "Wide"))


def results(name, world, strategy, **trainer):
    return run(train, name, world, strategy, {}, {"max_epochs": 2, **trainer}, world=world)


def assert_identical(got, wanted):
    """Losses, gradients and weights, buffers too, are equal to the last bit."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        for one, other in zip(mine["gradients"], theirs["gradients"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert mine["weights"].keys() == theirs["weights"].keys()
        assert all(torch.equal(mine["weights"][key], theirs["weights"][key]) for key in mine["weights"])


LAYOUTS = {
    "one": (1, {}),
    **layouts("zero0", "zero2", "zero3", "tensor"),
    "sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    **layouts("pipeline"),
}


RELATIVES = [
    ("one", "full"), ("tensor", "selective"), ("zero3", "full"),
    ("sequence", "selective"), ("tensor", "full"), ("zero2", "full"), ("zero3", "selective"), ("zero0", "selective"),
    ("zero2", "selective"), ("pipeline", "full"), ("zero0", "full"), ("sequence", "full"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(*pair, marks=pytest.mark.long if pair in RELATIVES else ())
        for pair in itertools.product(LAYOUTS, ["full", "selective"])
    ],
)
def test_dropout_is_drawn_alike(layout, mode):
    world, strategy = LAYOUTS[layout]
    assert_identical(results(TOKENS, world, {**strategy, "recompute": mode}), results(TOKENS, world, strategy))


def test_attention_with_dropout_is_drawn_again():
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default  # of a GPU: a CPU has none with dropout
    assert [is_kept(kernel, (0, 0, 0, *rate), {}) for rate in ((), (0.0,), (0.1,))] == [True, True, False]


@pytest.mark.parametrize("mode", [long("full"), "selective"])
def test_buffers_noise_and_writes_in_place(mode):
    """The block reads a buffer that it changes, draws from Python, and writes to results of products."""
    for world, strategy in ((1, {}), (2, {"zero_stage": 3}), (2, {"pipeline_parallel_size": 2, "num_microbatches": 1})):
        assert_identical(results(ODD, world, {**strategy, "recompute": mode}), results(ODD, world, strategy))


@pytest.mark.parametrize("mode", [long("full"), "selective"])
def test_autocast_and_accumulation(mode):
    flags = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    strategy = {"zero_stage": 3}
    assert_identical(
        results(TOKENS, 2, {**strategy, "recompute": mode}, **flags), results(TOKENS, 2, strategy, **flags)
    )


SCHEDULES = {
    "gpipe": 1, "interleaved_1f1b": 2, "loopedbfs": 2, "interleaved_zero_bubble": 2, "zbv_zero_bubble": 2, "dualpipev": 2,
}  # fmt: skip


OFTEN = [("interleaved_zero_bubble", "full")]


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        pytest.param(*pair, marks=() if pair in OFTEN else pytest.mark.long)
        for pair in itertools.product(SCHEDULES, ["full", "selective"])
    ],
)
def test_schedules(schedule, mode):
    per_rank = {} if schedule in ("gpipe", "zbv_zero_bubble", "dualpipev") else {"stages_per_rank": SCHEDULES[schedule]}
    strategy = {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 4, **per_rank}
    assert_identical(results(TOKENS, 2, {**strategy, "recompute": mode}), results(TOKENS, 2, strategy))


@pytest.mark.parametrize("mode", [long("full"), "selective"])
def test_three_dimensions_train_like_one_device(mode):
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "recompute": mode}
    assert_parity(PLAIN, 4, strategy, attributes={"batch_size": 12})


def test_what_is_computed_again():
    """Forwards, products and collectives of a step: full repeats them, selective repeats the forward only."""
    tensor = {"tensor_parallel_size": 2}
    plain, full, selective = (
        run(counts, TOKENS, 2, {**tensor, **more}, world=2)[0]
        for more in ({}, {"recompute": "full"}, {"recompute": "selective"})
    )
    assert full["dropouts"] > plain["dropouts"]
    assert full["products"] > plain["products"]
    assert full["sent"] > plain["sent"]
    assert selective["dropouts"] == full["dropouts"]
    assert selective["products"] == plain["products"]
    assert selective["sent"] == plain["sent"]


def test_nothing_is_gathered_again_where_it_is_computed_again():
    names = (TOKENS, f"{__name__}:Checkpointed")
    sharded, again = (run(counts, name, 2, {"zero_stage": 3}, world=2)[0] for name in names)
    assert again["products"] > sharded["products"]
    assert again["sent"] == sharded["sent"]


def test_memory():
    """Of a step of eight blocks. Measured by the allocator's own record: 17.3, 12.4 and 2.9 MB."""
    (plain, _), (selective, _), (full, _) = (
        run(peaks, WIDE, 1, strategy, world=1)[0]
        for strategy in ({}, {"recompute": "selective"}, {"recompute": "full"})
    )
    assert selective[1] < 0.75 * plain[1]
    assert full[1] < 0.2 * plain[1]


def test_a_call_that_is_longer_than_the_measured_one_is_computed_again():
    assert [BlockBytes(elements=10).covers([torch.empty(size)]) for size in (10, 11)] == [True, False]


@pytest.mark.parametrize("budget", [4.5e6, 6e6, 10e6])
def test_a_budget_is_kept_and_used(budget):
    strategy = {"recompute": "auto", "recompute_budget": budget}
    found, on = run(peaks, WIDE, 1, strategy, world=1)[0]
    assert max(found) <= 1.05 * budget
    assert found[-1] >= budget - 2.3e6  # one more block would not fit
    assert any(on)
    assert not all(on)


def test_ranks_decide_alike():
    for layout in ({"tensor_parallel_size": 2}, {"zero_stage": 3}):
        strategy = {"recompute": "auto", "recompute_budget": 6e6, **layout}
        (first, on), (second, same) = run(peaks, WIDE, 2, strategy, world=2)
        assert max(*first[1:], *second[1:]) <= 1.05 * 6e6
        assert on == same
        assert not all(on)


@pytest.mark.long
def test_a_budget_is_kept_on_every_stage():
    """Of a pipeline, whose first stage keeps more microbatches than the second."""
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 4}
    strategy = {**layout, "recompute": "auto", "recompute_budget": 3e6}
    plain = run(peaks, WIDE, 2, layout, world=2)
    found = run(peaks, WIDE, 2, strategy, world=2)
    assert max(plain[0][0]) > 1.5 * 3e6
    for peak, on in found:
        assert max(peak[1:]) <= 1.05 * 3e6
        assert not all(on)


def test_a_budget_computes_less_again_than_full():
    """As many products as the blocks that are kept need; so a step is not slower."""
    full, auto = (
        run(counts, WIDE, 1, {"recompute": "full"}, world=1)[0],
        run(counts, WIDE, 1, {"recompute": "auto", "recompute_budget": 6e6}, world=1)[0],
    )
    plain = run(counts, WIDE, 1, {}, world=1)[0]
    assert plain["products"] < auto["products"] < full["products"]


@pytest.mark.long
def test_a_budget_is_no_slower_than_full():
    """The fastest of ten steps of each. The first two of each measure."""
    for world, layout in ((1, {}), (2, {"zero_stage": 3})):
        ratios = []
        for _ in range(3):  # another job on the machine slows one of the two
            full, auto = (
                max(run(fastest_step, WIDE, world, {**layout, "recompute": mode, **budget}, world=world))
                for mode, budget in (("full", {}), ("auto", {"recompute_budget": 6e6}))
            )
            ratios.append(auto / full)
        assert min(ratios) < 1.0, ratios


@pytest.mark.parametrize(
    ("world", "layout"),
    [long(1, {}), long(2, {"zero_stage": 3}), (2, {"pipeline_parallel_size": 2, "num_microbatches": 4})],
)
def test_a_budget_changes_no_number(world, layout):
    strategy = {"recompute": "auto", "recompute_budget": 0.3e6}
    assert_identical(results(TOKENS, world, {**layout, **strategy}), results(TOKENS, world, layout))


class Checkpointed(Tokens):
    reentrant = False

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if torch.is_grad_enabled() else block(x)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("kind", ["Checkpointed", long("Reentrant")])
def test_the_users_own_checkpoints(kind):
    name = f"tests.activations.test_recompute:{kind}"
    for world, layout in (
        (1, {}),
        (2, {"zero_stage": 3}) if kind == "Checkpointed" else (2, {"tensor_parallel_size": 2}),
    ):
        assert_identical(results(name, world, {**layout, "recompute": "full"}), results(name, world, layout))


class LateWriter(Odd):
    """Changes its buffer from the second call on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        self.training_now = self.training
        result = x + torch.tanh(self.first(x)) * (1 + self.centre)
        if self.calls > 1:
            self.centre.lerp_(x.detach().mean(0), 0.1)
        return result


class Late(OddOnes):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(LateWriter())


def late():
    with pytest.raises(UnsupportedError) as error:
        make_trainer(1, {"recompute": "full"}, quiet=True, max_epochs=1, limit_val_batches=0).fit(Late())
    return str(error.value)


def test_a_buffer_that_changes_later_is_refused():
    (text,) = run(late, world=1)
    assert "blocks.0 changes its buffer 'centre' (LateWriter)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recompute": "some"}, "is not one of"),
        ({"recompute": "auto"}, "recompute_budget"),
        ({"recompute": "full", "recompute_budget": "2GB"}, "only that reads it"),
        ({"recompute": "auto", "recompute_budget": "much"}, "no amount of memory"),
        ({"recompute": "auto", "recompute_budget": "0GB"}, "no amount of memory"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        Strategy3D(**arguments)


def test_amounts():
    for amount, size in (("20GB", 20e9), ("1.5 gb", 1.5e9), ("300MB", 300e6), (1e6, 1e6), (2000, 2000)):
        assert Strategy3D(recompute="auto", recompute_budget=amount).settings.choices.recompute.budget == size


class Planned(Wide):
    """Takes a batch of one tensor too, as the planner makes it."""

    def loss(self, batch):
        return super().loss(batch if isinstance(batch, list) else [batch])


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [(None, {}), ("full", {}), (None, {"tensor_parallel_size": 2}), long("full", {"tensor_parallel_size": 2})],
)
def test_kept_bytes(recompute, layout):
    world, samples = layout.get("tensor_parallel_size", 1), Wide.batch_size
    name = "tests.activations.test_recompute"
    profile = profile_module(f"{name}.Planned", [], precision="32", tokens=None, inputs=f"{samples}x65:int64")
    block = profile.block_activations(tensor=world, sequence_parallel=False, recompute=recompute or "none")
    planned = samples * (profile.layers * block + profile.last_bytes)
    for found in run(kept, f"{name}:Planned", world, {**layout, "recompute": recompute}, world=world):
        assert found == pytest.approx(planned, rel=0.1)
