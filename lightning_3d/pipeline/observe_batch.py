"""Observes the first batch before the cut: one microbatch, and whether the loss of all is the mean over its parts.

The loss is computed on a microbatch, or on the full batch. A mean over samples is the mean over microbatches. Any other
loss (a mean over tokens that are not padding, a loss over pairs of samples) needs the full batch. That has a price: no
backward begins before the last forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import distributed as dist

from lightning_3d.data.same_samples import checksum
from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.pipeline.across_samples import find_meetings
from lightning_3d.pipeline.carried_state import alike_on_parts, counts_of_batches, find_carried
from lightning_3d.pipeline.gates import hooked_inside
from lightning_3d.pipeline.loss_mean import (
    DRAWN,
    UNSEEN,
    VERDICTS,
    LossMean,
    Mixing,
    StepResult,
    compare_parts,
    equal_losses,
    find_mixing,
    first_call,
    last_trained,
    norms_on_running_statistics,
    parts_of,
    rounding_of,
    with_mixing,
)
from lightning_3d.pipeline.microbatch import TENSORS, Path, Rows, microbatch_sizes, signature, split_batch
from lightning_3d.pipeline.observe import UncutRun, observe
from lightning_3d.pipeline.step_runs import PeerRuns, StepRuns
from lightning_3d.ranks import agreement, random_streams, talk
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.first_batch import STEPS, FirstBatch, following, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.record import Record, combine, number_in
from lightning_3d.sandbox.trees import loss_of, unshared
from lightning_3d.sandbox.trial import kept_outside, trial
from lightning_3d.sandbox.writes import RefuseWrites

LossScope = Literal["auto", "microbatch", "batch"]


@dataclass(frozen=True)
class ChosenScope:
    """A choice, and the line that the opening lines have about it."""

    value: Literal["microbatch", "batch"]
    line: str = ""
    mixing: Mixing | None = None
    """The first call of a block that a microbatch gives other values for: the head must have it."""
    left_out: tuple[tuple[Path, int], ...] = ()
    """See `across_samples.LeftOut.targets`."""
    is_mean: bool = False
    """True where the first batch showed a mean over samples."""


MICROBATCH = ChosenScope("microbatch")
ONE_STAGE = replace(
    MICROBATCH, line="  loss: of the full batch. What draws numbers has another seed than on one device."
)


def choose_scope(wanted: LossScope, uncut_run: UncutRun | None, layout: Layout) -> ChosenScope:
    """The scope that `wanted` stands for.

    The loss of a step that draws random numbers by itself (mixup) is computed on microbatches. It uses the numbers that
    were drawn for the inputs of each.
    """
    mean = uncut_run.loss_mean if uncut_run is not None else UNSEEN
    if wanted != "auto":
        return ChosenScope(wanted, mixing=mean.mixing)
    if mean.verdict == "unknown" and layout.num_microbatches == 1:
        return replace(ONE_STAGE, left_out=mean.left_out)
    if mean.verdict == "mean" or layout.num_microbatches == 1:
        line = f"  loss: of each microbatch. {mean.reason}" if mean.verdict == "mean" and mean.reason else ""
        return ChosenScope("microbatch", line, left_out=mean.left_out, is_mean=mean.verdict == "mean")
    if mean.verdict == "random":
        return ChosenScope("microbatch", f"  loss: of each microbatch, not compared with the full batch: {mean.reason}")
    why, instead = f"no mean over samples ({mean.reason})", ""
    if mean.verdict != "no mean":
        why = f"unknown ({mean.reason})"
        instead = ". Where you know that it is a mean over samples: loss_scope='microbatch'"
    line = f"  loss: {why}, so it is computed once on the full batch (loss_scope='batch'). {_cost(layout)}{instead}"
    return ChosenScope("batch", line, mean.mixing)


def _cost(layout: Layout) -> str:
    instead = "" if layout.schedule == "gpipe" else f" in place of {layout.schedule}"
    return f"All forwards run before all backwards{instead}: a stage keeps the activations of the full batch"


_MEETS = (
    "pipeline_parallel_size cuts batches into microbatches, but training_step computes a value from several samples,"
    " and other samples meet it ahead of the last block ({}, {!r}). In the first batch no block gets other numbers. A"
    " batch in which the value matters trains otherwise than on one device: each microbatch has a value of its own."
    " num_microbatches=1 runs the full batch at once."
)
_MIXES = (
    "training_step computes a value from several samples, and other samples meet it behind {{unit!r}} and ahead of the"
    " last block ({}, {!r}). A pipeline computes it for each microbatch, so it would train otherwise than one device"
    " does. num_microbatches=1 runs the full batch at once."
)
_DECIDES = (
    "pipeline_parallel_size cuts batches into microbatches, and code compares a number of its samples, or has a hook on"
    " a gradient: {}. It gets the number, or the gradient, of a microbatch. Where it does not treat each sample by"
    " itself (a mean, the norm of a gradient), this trains otherwise than one device. num_microbatches=1 runs the full"
    " batch at once."
)
_LOGS = (
    "pipeline_parallel_size cuts batches into microbatches, and training_step logs numbers that are no mean over"
    " samples: {}. Their values on microbatches are joined, so loggers, and callbacks that monitor them, get other"
    " numbers than on one device. Log a metric of torchmetrics, or what it returns. Log a count with reduce_fx='sum'."
    " Compute other numbers in on_train_batch_end from what the step returns, or use num_microbatches=1."
)
_WEIGHS = (
    "the first batch shows a mean, but a value of several samples (a count of labels, a selection, a cap) weighs or"
    " bounds it, which microbatches of later batches may not share: {}, {!r}"
)
_NO_MEAN = (
    ": it is no mean over samples (tokens that a mask leaves out unevenly, pairs of samples), so microbatches do not"
    " train exactly as one device does. loss_scope='auto' computes it on the full batch, or says why it cannot."
)
_NORMALIZES = (
    "pipeline_parallel_size cuts batches into microbatches: batch norm inside of blocks normalizes over their samples,"
    " so they do not train exactly as one device does. num_microbatches=1 runs the full batch at once."
)
PER_MICROBATCH = (
    "which every microbatch would do under a pipeline, on a stage that may not own it; a network that follows one of"
    f" another stage needs {NO_PIPELINE}"
)


def observe_one_batch(
    first_batch: FirstBatch,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    loss_scope: str,
    groups: Sequence[dist.ProcessGroup],
    on_full_batch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> UncutRun | None:
    """Observe the step that is about to run, on the first microbatch of its first batch, forward and backward.

    None where the step fails on a rank. Then the pipeline learns the order of blocks from their declaration.
    Collective; an error of one rank is raised on all.
    """
    run_of = first_batch.trainer.state.fn
    assert run_of is not None
    name, fitting = STEPS[run_of], run_of == TrainerFn.FITTING

    def observation(peers: PeerRuns) -> UncutRun:
        def given() -> tuple[Any, int]:
            with trial(module, gradients=True):
                return step_arguments(getattr(module, name), to_device(first_batch())), random_streams.draw()

        args, seed = given()
        if checksum(args) != checksum(given()[0]):
            raise kept_outside("A hook of batches (on_after_batch_transfer) gives other values")
        cut = fitting and bool(args)  # evaluation runs full batches
        rows = Rows.of(args[0], first_batch.samples, module) if cut else TENSORS
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.sizes[PIPELINE_AXIS], rows) if cut else [1]
        pieces = split_batch(args[0], sizes, rows) if args else []

        def run(rows: Any) -> None:
            others_answer = rank_local() if cut else nullcontext()  # peers may have failed elsewhere
            with trial(module, gradients=fitting), context(), others_answer:
                loss_of(getattr(module, name)(unshared(rows), *args[1:]))

        with _cut_as_rows(run, args, sizes, name):
            first = (*pieces[:1], *args[1:])
            runs = StepRuns(
                module, name, args, seed, units, context, on_full_batch,
                lambda: observe(module, units, name, first, context=context, compared=fitting, seed=seed),
                peers, last_trained(module, units), rounding_of(module, hooked_inside(module, units), context),
            )  # fmt: skip
            mean = _test_for_mean(runs, sizes, rows, loss_scope) if cut else UNSEEN
            uncut = runs.observed()
            if not cut or None in runs.results:
                for second in pieces[1:2]:  # code that counts from the start of the batch is right in the first
                    run(second)
        alike = _two_steps(pieces, args[1:], rows) if cut else ()
        return replace(
            uncut, args=first, batch=args if cut else (), loss_mean=mean, alike=alike, pieces=len(sizes), rows=rows
        )

    return _on_every_rank(observation, first_batch, module, name, groups)


def _two_steps(pieces: Sequence[Any], others: tuple[Any, ...], rows: Rows) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of a first and of a second step, on microbatches of one shape or halves of the only one."""
    count = rows.count(pieces[0]) or 0
    if len(pieces) == 1 and count // 2 >= rows.least:
        pieces = split_batch(pieces[0], [count // 2] * 2, rows)
    second = pieces[-1] if signature(pieces[-1]) == signature(pieces[0]) else pieces[0]
    first = (pieces[0], *others)
    return first, following(first, second)


def _test_for_mean(runs: StepRuns, sizes: list[int], rows: Rows, loss_scope: str) -> LossMean:
    """Test that the loss is a mean over samples, without the batch norms of blocks if it is none with them.

    Those normalize over a microbatch wherever the loss is computed, so they do not decide about the loss.
    """
    module, batch, units = runs.module, runs.args[0], runs.units
    with norms_on_running_statistics(module, units) as frozen:
        if frozen and len(sizes) > 1:
            rank_zero_warn(_NORMALIZES)
    if loss_scope == "batch":
        uncut = runs.observed()
        if len(sizes) == 1:
            return UNSEEN
        with norms_on_running_statistics(module, units):
            mean = find_mixing(runs, batch, sizes, uncut.rounding, rows, runs.divide, drawn=uncut.drawn)
            runs.refuse_random_order()
            counts = [sizes[0], sum(sizes[1:])]
            two, alone = split_batch(batch, counts, rows), [*runs.latest[:2], None]
            mean = _with_meetings(mean, alone)
            _warn_of_decisions(alone, uncut, full_loss=True)
            carried = find_carried(runs, mean, two, counts, alone, compared=not uncut.drawn)
            return replace(carried, alike=alike_on_parts(alone, counts))
    mean = compare_parts(runs, batch, sizes, runs.rounding, rows, runs.divide)
    uncut = runs.observed()
    if runs.block != (called := last_trained(module, uncut.calls)):  # a term of its own would hide another one
        runs.block = called
        mean = compare_parts(runs, batch, sizes, runs.rounding, rows, runs.divide)
    runs.refuse_random_order()
    alone = list(runs.latest)  # with the batch norms
    if no_mean := mean.verdict == "no mean":
        with norms_on_running_statistics(module, units) as frozen:
            mean = compare_parts(runs, batch, sizes, runs.rounding, rows, runs.divide) if frozen else mean
    mean = _with_meetings(mean, alone)
    counts, parts = parts_of(batch, sizes, rows)
    logging = list(runs.latest)
    carried = find_carried(runs, mean, parts, counts, alone, compared=not uncut.drawn)
    alike, others = alike_on_parts(alone, counts), dict[str, str]()
    if len(sizes) > 1 and (loss_scope == "microbatch" or carried.verdict in ("mean", "random")):
        drawn = bool(uncut.drawn) or carried.verdict != "mean"
        written = {place.name for result in alone if result is not None for place in result.written}
        with runs.later(batch):
            again = runs(parts[0], 2, True)
        later: Sequence[StepResult | None] = ()
        if again is None or not again.is_that_of(next(iter(alone[1:]), None)):  # else no step counts batches
            carried, later = _in_second_step(runs, carried, sizes, rows, written, drawn=bool(uncut.drawn))
        alike += tuple(name for name in counts_of_batches(later) if name not in written)
        others = _logged_otherwise(later, sizes[:2], runs.rounding, drawn=drawn)
        others |= _logged_otherwise(logging, counts, runs.rounding, drawn=drawn)
    if loss_scope == "microbatch" and (carried is not mean or (no_mean and mean.verdict != "mean")):
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {carried.reason}{_NO_MEAN}")
    if not uncut.drawn:
        carried = with_mixing(carried, logging, runs.rounding)
    on_microbatches = loss_scope == "microbatch" or carried.verdict in ("mean", "random")
    if on_microbatches and others:
        rank_zero_warn(_LOGS.format(", ".join(others.values())))
    _warn_of_decisions(alone, uncut, full_loss=not on_microbatches)
    return replace(carried, alike=alike)


def _in_second_step(
    runs: StepRuns, mean: LossMean, sizes: list[int], rows: Rows, written: set[str], *, drawn: bool
) -> tuple[LossMean, Sequence[StepResult | None]]:
    """`mean`, or what takes its place in a second step, and the results of that: on two microbatches and on each.

    The index of the first batch is 0, and so may be what a step counts or weighs by it.
    """
    pair, *_ = split_batch(runs.args[0], [sum(sizes[:2]), *sizes[2:]], rows)
    with runs.later(pair), norms_on_running_statistics(runs.module, runs.units):
        found = compare_parts(runs, pair, sizes[:2], runs.rounding, rows, runs.divide)
        results = list(runs.latest)
        places = {place.name for result in results if result is not None for place in result.written}
        if found.verdict == "mean" and not places <= written:  # else the first step has shown it
            parts = split_batch(pair, sizes[:2], rows)
            found = find_carried(runs, found, parts, sizes[:2], results, compared=not drawn)
    if found.verdict == "no mean" and mean.verdict in ("mean", "unknown"):
        return replace(found, reason=f"{found.reason}, in a second step"), results
    return mean, results


def _warn_of_decisions(results: Sequence[StepResult | None], uncut: UncutRun, *, full_loss: bool) -> None:
    """Name the comparisons and hooks that a microbatch has for itself; with `full_loss` not those behind the blocks."""
    full, part = [*results, None, None][:2]
    if full_loss and full and full.drawn:  # of microbatches, the opening lines say it
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, and {DRAWN}.")
    pairs = zip(full.operations.decided, part.operations.decided, strict=False) if full and part else ()
    # code that asks if a mask is full compares with another length
    compared = [(at, calls) for (at, calls, number, to), (*_, other, its) in pairs if number != other and to == its]
    behind = len(uncut.calls) if full_loss else -1
    places = dict.fromkeys(place for place, blocks in [*uncut.gradients, *compared] if blocks != behind)
    if places and results:  # of several microbatches
        rank_zero_warn(_DECIDES.format(", ".join(places)))


def _logged_otherwise(
    results: Sequence[StepResult | None], counts: list[int], rounding: float, *, drawn: bool
) -> dict[str, str]:
    """Name the numbers that a step logs otherwise where their values on parts of a batch are joined.

    Where random numbers are `drawn`, only those that all parts log alike.
    """
    full, *parts = [Record() if result is None else result.logged for result in results] or [Record()]
    joined = {call.key: number_in(call) for call in combine(parts, counts).calls} if full.calls else {}
    others = dict[str, str]()
    for call in full.calls:
        value, by_parts = number_in(call), joined.get(call.key)
        alike = {number_in(each) for part in parts for each in part.calls if each.key == call.key} == {value}
        if by_parts is not None and alike >= drawn and not equal_losses(value, by_parts, rounding, 1e-6):
            others[call.name] = f"{call.name!r} ({value:.6g} on {sum(counts)} samples, {by_parts:.6g} by their parts)"
    return others


def _with_meetings(mean: LossMean, results: Sequence[StepResult | None]) -> LossMean:
    """`mean`, unless later batches may have another loss; warns where blocks may get other values in these."""
    full, part = [*results, None, None][:2]
    if full is None or part is None:
        return mean
    before, weight, mixed = find_meetings(full.operations, part.operations, len(full.calls))
    if mixed is not None and mean.verdict in ("no mean", "unknown"):
        mixing = Mixing(max(mixed.call - 1, 0), _MIXES.format(mixed.place, mixed.name))
        return replace(mean, mixing=first_call((mean.mixing, mixing)))
    if before is not None:
        rank_zero_warn(_MEETS.format(before.place, before.name))
    if mean.verdict != "mean":
        return mean
    if weight is not None:
        return LossMean("unknown", _WEIGHS.format(weight.place, weight.name))
    return replace(mean, left_out=tuple(dict.fromkeys(full.operations.targets)))


def _on_every_rank(
    observation: Callable[[PeerRuns], UncutRun],
    first_batch: FirstBatch,
    module: LightningModule,
    step: str,
    groups: Sequence[dist.ProcessGroup],
) -> UncutRun | None:
    """The result of `observation`, if it has one on every rank. An UnsupportedError of one rank is raised on all."""

    def leave_no_trace() -> UncutRun | None:
        peers = PeerRuns(groups)
        try:
            first_batch()  # outside of a trial: it would put a stream on the module back too
            with Interceptor(RefuseWrites(module.named_parameters, PER_MICROBATCH)):
                uncut = observation(peers)
        except Exception as error:
            agreement.raise_if_alone(error)
            peers.close()
            if isinstance(error, UnsupportedError):
                raise
            rank_zero_warn(
                f"{step} could not be run on a microbatch ahead of training ({type(error).__name__}: {error}). Its"
                " blocks are taken to run in the order of declaration, and to exchange arguments only."
            )
            return None
        peers.close()
        return uncut

    uncut = agreement.together(leave_no_trace, UnsupportedError)
    mine = (uncut.calls, uncut.read, uncut.loss_mean) if uncut is not None else None
    if talk.all_equal(mine):
        return uncut
    seen = talk.gather(mine)
    found = [each for each in seen if each is not None]
    if uncut is None or len(found) < len(seen):
        return None
    calls, read, _ = found[0]  # all ranks must cut alike
    means = [mean for _, _, mean in found]
    worst = max(means, key=lambda mean: VERDICTS.index(mean.verdict))
    mixing = first_call(mean.mixing for mean in means)
    return replace(uncut, calls=calls, read=read, loss_mean=replace(worst, mixing=mixing))


@contextmanager
def _cut_as_rows(run: Callable[[Any], None], args: tuple[Any, ...], sizes: list[int], step: str) -> Iterator[None]:
    """Refuse the cut where the code inside fails on a microbatch, and `run` works on the full batch."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        if agreement.is_alone(error) or len(sizes) == 1 or not _works(run, args[0]):
            raise
        raise UnsupportedError(
            f"{step} runs on a batch, and fails on one of the {len(sizes)} microbatches that a pipeline cuts it into"
            f" along dimension 0: {sizes[0]} of {sum(sizes)} rows ({type(error).__name__}: {error}). Either the"
            " code needs more samples at once (a variance, pairs), or something in the batch is not one row for each"
            " sample and belongs to all of them: targets of all samples in one tensor, offsets, the edges of a graph."
            " num_microbatches=1 runs the full batch at once; forces (autograd.grad) need pipeline_parallel_size=1."
        ) from error


def _works(run: Callable[[Any], None], batch: Any) -> bool:
    error = agreement.error_of(lambda: run(batch))
    if isinstance(error, UnsupportedError):
        raise error
    return error is None
