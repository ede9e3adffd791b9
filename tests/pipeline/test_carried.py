"""A state that a step carries from batch to batch: all rows of a batch see it as it was before the batch."""

import math
from functools import partial

import pytest
import torch

from lightning_3d.pipeline.carried_state import alike_on_parts, find_carried
from lightning_3d.pipeline.loss_mean import MEAN, StepResult
from lightning_3d.pipeline.step_runs import Place
from tests.parity import check, fit, in_turn, long, refused_by_both
from tests.pipeline.test_loss_scope import scope_of
from tests.workers import WorkerError, run
from tests.zoo.oddities import Stream
from tests.zoo.registry import members

FOUR = {"num_microbatches": 4}
WHOLE = (
    "Queue", "Prototypes", "CodebookLast", "QueueAttribute", "Bank", "Centre", "Recurrence", "MaximumAttribute", "Maximum",
)  # fmt: skip
"""Their loss is computed on the full batch."""
PARTS = ("Counting", "Logged", "Table", "Averaged", "Counted")
"""What they keep does not reach the loss, or every microbatch begins with the same."""


def of(name, seeded=False, steps=5, stream=False):
    torch.manual_seed(1)
    module = members("carried")[name].build()
    batches = Stream(module.batches(steps)) if stream else module.batches(steps)
    if seeded:
        module.seeded = True
    return module, batches


@pytest.mark.parametrize("name", [*in_turn(WHOLE, 2), *in_turn(PARTS, 3), "Following", "Filled"])
def test_trains_as_on_one_device(name):
    """Losses and weights; also queues, centres, codes and prototypes at the end, which are in the `state_dict`."""
    check(partial(of, name), 2, FOUR)


@pytest.mark.parametrize(
    ("name", "scope"), [("QueueNorms", "batch"), *in_turn([(name, "microbatch") for name in (*PARTS, "Spectral")], 3)]
)
def test_what_does_not_reach_the_loss_leaves_it_to_microbatches(name, scope):
    assert run(scope_of, partial(of, name, steps=1), world=2)[0][0] == {scope}


@pytest.mark.parametrize("scope", ["auto", "batch"])
def test_batch_norm_beside_a_loss_of_the_full_batch_is_said(scope):
    _, said = run(scope_of, partial(of, "QueueNorms", steps=1), {"loss_scope": scope}, world=2)[0]
    assert any("batch norm inside of blocks normalizes over" in text for text in said)


def test_a_state_with_microbatches_by_hand_is_said():
    _, said = run(scope_of, partial(of, "Queue", steps=1), {"loss_scope": "microbatch"}, world=2)[0]
    assert "the loss depends on what the step keeps from batch to batch ('queue')" in said[0]


@pytest.mark.parametrize(("count", "said"), [(4, ["each changes 'count', 'blocks.1.calls' once"]), (1, [])])
def test_a_count_that_decides_nothing_yet_is_said(count, said):
    _, warned = run(scope_of, partial(of, "Redrawn", steps=1), {"num_microbatches": count}, world=2)[0]
    assert len(warned) == len(said) and all(text in message for text, message in zip(said, warned, strict=True))


REFUSED = [
    ("CodebookInside", "auto", r"'blocks.1' computes with what it keeps from batch to batch \('blocks.1.codes', "),
    ("CodebookInside", "batch", r"'blocks.1' computes with what it keeps from batch to batch \('blocks.1.codes', "),
    ("ObjectState", "auto", r"outside of blocks \('Scale.value'\).* Keep it with register_buffer"),
    ("Hidden", "auto", r"keeps something of a batch for the next one \('hidden'\), and with that it fails on a microb"),
    ("NamespaceState", "auto", r"outside of blocks \('SimpleNamespace.scale'\)"),
    ("CodebookBetween", "auto", "use num_microbatches=1, which runs the full batch at once"),
    ("ClassState", "auto", r"outside of blocks \('Fading.calls'\)"),
    ("FileState", "auto", r"outside of blocks \('tests.zoo.carried._LARGEST'\)"),
    ("LateBuffer", "auto", r"in a buffer that it registers \('centre'\).* Register it in __init__"),
    ("QueueParameter", "auto", "puts another parameter in the place of 'queue'.* Make it a buffer"),
    ("Windows", "auto", "gives 'blocks.0' other samples .*: .8, 6. for the batch, and .8, 6., .8, 6., .8, 6. for parts of it"),
    ("Windows", "batch", "gives 'blocks.0' other samples .*: .8, 6. for the batch, and .8, 6. for parts of it"),
    ("Points", "auto", "gives 'blocks.0' other samples"),
    ("FirstRows", "auto", "gives 'blocks.0' other samples .*: .4, 6. for the batch, and .2, 6., .4, 6., .2, 6. for parts of it"),
    ("EarlyMean", "auto", r"computed after 'blocks.1'. Begin .* pipeline_split=\[..., 'blocks.1'\], or use num_microbatches=1"),
]  # fmt: skip


def not_to_train(name, **options):
    module, batches = of(name, **options)
    module.on_train_batch_start = lambda *_: pytest.fail("training begins")
    return module, batches


@pytest.mark.parametrize("stream", [True, long(False)])
@pytest.mark.parametrize(
    ("name", "scope", "text"),
    [
        *in_turn(REFUSED, 2),
        ("FewWindows", "auto", "gives 'blocks.0' other samples .*: .4, 6"),
        ("Starts", "auto", "fails on one of the 4"),
    ],
)
def test_what_a_pipeline_cannot_compute_is_refused_on_every_rank(name, scope, text, stream):
    with refused_by_both("Error: .*" + text):
        strategy = {"pipeline_parallel_size": 2, **FOUR, "loss_scope": scope}
        run(fit, partial(not_to_train, name, stream=stream), strategy, world=2)


@pytest.mark.parametrize(
    "name",
    [
        *in_turn(["CodebookInside", "CodebookBetween", "Hidden", "Windows", "Points", "FirstRows", "EarlyMean"], 2),
        "Redrawn",
        "RedrawnInPlace",
    ],
)
def test_the_remedy_of_one_microbatch_works(name):
    """The others are `Centre` (a buffer for an object's state), `Queue` (for a parameter) and a cut below."""
    check(partial(of, name, name in ("Windows", "Points")), 2, {"num_microbatches": 1})


def test_a_buffer_that_a_block_draws_anew_in_place_is_said():
    with pytest.raises(WorkerError, match=r"Code changed a tensor in place .* Use num_microbatches=1"):
        run(fit, partial(of, "RedrawnInPlace"), {"pipeline_parallel_size": 2, **FOUR}, world=2)


@pytest.mark.parametrize("name", ["EarlyMean", long("NoiseBefore")])
def test_the_other_remedies_work(name):
    """A cut before the value, and numbers that are drawn before the batch is cut."""
    check(partial(of, name), 2, {**FOUR, "pipeline_split": ["blocks.1"]})


def test_means_of_one_shape_are_averaged_and_no_rows_or_counts():
    def result(mean, first, rows):
        arrays = {
            "mean": [((8,), mean)],
            "first": [((2,), first)],
            "rows": [((rows,), 1.0)],
            "counts": [((5,), math.nan)],
        }
        return StepResult(0.0, torch.zeros(0), arrays=arrays)

    runs = [result(1.75, 1.0, 8), result(1.0, 1.0, 2), result(2.0, 3.0, 6)]
    assert alike_on_parts(runs, [2, 6]) == ("mean",)
    assert alike_on_parts([*runs[:2], None], [2, 6]) == ()


class Noisy:
    """Runs of a step that keeps something. Each is off by another rounding, for the first part by none."""

    rounding, args, noise = 0.05, ("batch",), 0.0

    def __call__(self, rows, seed, marked, fresh=False):
        self.noise += 2e-3
        return StepResult(
            1.0, torch.full((4,), 1.0 + (seed > 2) * self.noise), written={Place("sum", "attribute"): rows}
        )

    def in_sequence(self, parts, put_back):
        return [self(rows, seed, False) for seed, rows in parts]


def test_rounding_that_the_first_part_does_not_show_is_no_state():
    runs, parts = Noisy(), ["a", "b", "c"]
    alone = [runs(rows, seed, False) for seed, rows in enumerate(["batch", *parts], 1)]
    assert find_carried(runs, MEAN, parts, [1, 2, 1], alone, compared=True) is MEAN
