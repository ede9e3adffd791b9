"""State that a step writes from its batch and reads for its loss: a queue, a centre, a codebook, a running maximum.

On one device all rows of a batch see the state from before the batch. Microbatches that run one after the other would
see what the one before them left. So the parts of the first batch also run in sequence, in two ways:

- as they are: where their losses are those of parts that run alone, no state reaches the loss;
- with attributes of the module, and with buffers around blocks, put back before each part, as a pipeline does with the
  loss on the full batch. What still differs cannot be right: a state inside of a block, or in an object.

Nothing runs unless the step writes something. A count of batches in an attribute does not count: every microbatch
begins with the same one. Running statistics of torch's norms do not reach the loss of a training step.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.loss_mean import (
    Arrays,
    LossMean,
    Mixing,
    StepResult,
    distance,
    first_call,
    norms_on_running_statistics,
)
from lightning_3d.pipeline.row_marks import first_other, first_that_mixes
from lightning_3d.pipeline.step_runs import Place, StepRuns, is_numbers
from lightning_3d.sandbox.fingerprint import Print, differ, fingerprint
from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.snapshot import plain_attributes
from lightning_3d.sandbox.trees import leaves

_FLOOR = 1e-5
"""Differences of two runs of the same code that are rounding, on a device that adds up in any order."""
_NAMED = 3


def _places(results: Sequence[StepResult | None]) -> dict[Place, bool]:
    """The places that a step writes, with True where each microbatch writes what the batch would.

    Those are a count of batches, with which every microbatch begins anew, and a block's own iteration (a norm of
    weights): both are the same whatever the rows are.
    """
    runs = [result.written for result in results if result is not None]
    places = dict.fromkeys(place for run in runs for place in run)
    ours = ("attribute", "buffer of a block")
    return {place: place.kind in ours and len({run.get(place) for run in runs}) == 1 for place in places}


def counts_of_batches(alone: Sequence[StepResult | None]) -> tuple[str, ...]:
    """Attributes of the module that each of these runs leaves alike, whatever its rows are."""
    return tuple(place.name for place, alike in _places(alone).items() if alike and place.kind == "attribute")


def alike_on_parts(alone: Sequence[StepResult | None], counts: Sequence[int]) -> tuple[str, ...]:
    """`counts_of_batches`, and attributes with tensors of one shape, whose mean is that of the parts by their rows."""
    full, *parts = [{} if result is None else result.arrays for result in alone] or [{}]
    fixed = [name for name in full if _is_mean(full[name], [part.get(name, ()) for part in parts], counts)]
    return (*counts_of_batches(alone), *fixed)


def _is_mean(full: Arrays, parts: Sequence[Arrays], counts: Sequence[int]) -> bool:
    if len(parts) != len(counts) or any([shape for shape, _ in part] != [shape for shape, _ in full] for part in parts):
        return False
    for (_, mean), *others in zip(full, *parts, strict=True):
        shares = [count * other / sum(counts) for count, (_, other) in zip(counts, others, strict=True)]
        if not abs(mean - sum(shares)) <= 1e-4 * sum(map(abs, shares)):
            return False
    return len(full) > 0


def find_carried(
    runs: StepRuns,
    mean: LossMean,
    parts: Sequence[Any],
    counts: Sequence[int],
    alone: Sequence[StepResult | None],
    *,
    compared: bool,
) -> LossMean:
    """`mean`, or what takes its place where the loss depends on a state that the step carries.

    The runs that are `alone` began from the state before the batch. Where no random numbers are drawn between blocks,
    other samples show in their outputs: these are `compared`.
    """
    written = _places(alone)
    places = [place for place, alike in written.items() if not alike]
    alike = [place for place in written if place.kind == "buffer of a block"]
    if not (places or alike) or alone[1] is None:
        return mean
    each = [*enumerate(parts, 2), (2, parts[0])]
    others = [*alone[1:], alone[1]]
    carried = runs.in_sequence(each, [False] * len(each))
    if not places:
        if not isinstance(carried, Exception) and _differ(others, carried, alike, 10 * _FLOOR):
            rank_zero_warn(_COUNTS.format(_names(alike)))
        elif not isinstance(carried, Exception):
            _warn_of_counts(alone, carried[len(parts) - 1], mean)
        return mean
    if isinstance(carried, Exception):
        twice = None if any(one is None for one in alone) else runs.in_sequence([(1, runs.args[0])] * 2, [False] * 2)
        if not isinstance(twice, list):
            return mean  # a part fails by itself too, or one device would as well
    if not isinstance(carried, Exception) and not _differ(others, carried, places, _FLOOR):
        _warn_of_parts(alone[0], carried[len(parts) - 1])
        _warn_of_counts(alone, carried[len(parts) - 1], mean)
        return mean
    again = [runs(part, seed, False) for seed, part in each[:-1]]  # on a GPU each part has a rounding of its own
    pairs = [(one, other) for one, other in zip(others, again, strict=False) if one is not None and other is not None]
    bound = max(_FLOOR, 10 * max(distance(one, other) for one, other in pairs))
    if not _differ(others, carried, places, bound) or _only_counts(runs, each, carried, alone, places, bound):
        return mean
    if mean.verdict == "mean" and {place.kind for place in places} == {"attribute"} and _joins(runs, parts, counts):
        return mean
    if new := [place for place in places if place.kind == "new buffer"]:
        raise UnsupportedError(
            f"The loss depends on what the step keeps in a buffer that it registers ({_names(new)})."
            " A pipeline shares those that are there before training. Register it in __init__."
        )
    left = runs.in_sequence(each, [True] * len(each))
    inside = _inside(_checked(left, places), places, bound) if _differ(others, left, places, bound) else None
    mixing = [inside, _with_state(runs, parts[0], places) if compared else None, mean.mixing]
    reason = f"the loss depends on what the step keeps from batch to batch ({_names(places)})"
    return LossMean("no mean", reason, first_call(mixing))


def _warn_of_parts(full: StepResult | None, last: StepResult) -> None:
    """Warn of buffers in blocks in which the parts of a batch leave another value than the batch."""
    written = {} if full is None else full.written
    places = [place for place, value in written.items() if last.written.get(place) != value]
    names = _names([place for place in places if place.kind == "buffer of a block"])
    if names:
        rank_zero_warn(
            f"A pipeline cuts batches into microbatches, and each writes {names}. Code between steps reads"
            " what the last microbatch left there. Where it is a sum over samples, let the block add to it, and set it"
            " to zero between steps. num_microbatches=1 runs the full batch at once."
        )


def _warn_of_counts(alone: Sequence[StepResult | None], last: StepResult, mean: LossMean) -> None:
    """Warn of places that each part alone leaves as the batch does, and parts in sequence otherwise."""
    full, *others = [result.written for result in alone if result is not None]
    anew = ("attribute",) if mean.verdict in ("mean", "random") else ("attribute", "buffer")  # in each microbatch
    same = [place for place, value in full.items() if all(run.get(place) == value for run in others)]
    counts = [at for at in same if at.kind not in anew and last.written.get(at, full[at]) != full[at]]
    if counts:
        rank_zero_warn(_COUNTS.format(_names(counts)))


_COUNTS = (
    "A pipeline cuts batches into microbatches, and each changes {} once (a count of calls, a power iteration as of"
    " spectral_norm). On one device a batch changes it once. Where something depends on it (a new projection after 1000"
    " calls), losses differ from there on. num_microbatches=1 runs the full batch at once."
)


def _joins(runs: StepRuns, parts: Sequence[Any], counts: Sequence[int]) -> bool:
    """True where the attributes that microbatches leave join to those of the full batch: a mean that moves, say."""
    full, *some = [runs.changes(seed, rows) for seed, rows in enumerate([runs.args[0], *parts], 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that do not join
        joined = join_changes(some, list(counts), plain_attributes(runs.module))
    if {path: kind for path, (kind, _) in joined.items()} != {path: kind for path, (kind, _) in full.items()}:
        return False
    return not any(
        differ(_numbers(joined[path][1]), _numbers(value), runs.rounding) for path, (_, value) in full.items()
    )


def _numbers(value: Any) -> list[Print]:
    every = [leaf for leaf in leaves(value) if is_numbers(leaf) or isinstance(leaf, Tensor | int | float)]
    return fingerprint([torch.as_tensor(leaf) for leaf in every])


def _only_counts(
    runs: StepRuns,
    parts: Sequence[tuple[int, Any]],
    carried: Any,
    alone: Sequence[StepResult | None],
    places: Any,
    bound: float,
) -> bool:
    """True where a count of batches alone gives the numbers of parts in sequence."""
    counts = counts_of_batches(alone)
    counted = runs.with_counts(parts, counts) if counts else None
    return isinstance(counted, list) and not _differ(counted, carried, places, bound)


def _with_state(runs: StepRuns, part: Any, places: Sequence[Place]) -> Mixing | None:
    """The first call that gives other values for a part than for the full batch, with the state of a second batch."""
    batch = runs.args[0]
    with norms_on_running_statistics(runs.module, runs.units):
        results = runs.in_sequence([(1, batch), (1, batch), (2, part)], [False, True, True])
    _, full, alone = _checked(results, places)
    call = first_that_mixes(full.marks, alone.marks, runs.rounding)
    return None if call is None else Mixing(call)


def _checked(results: list[StepResult] | Exception, places: Sequence[Place]) -> list[StepResult]:
    """`results`. Raises where a part does not run after another one."""
    if isinstance(results, Exception):
        raise UnsupportedError(
            f"training_step keeps something of a batch for the next one ({_names(places)}), and with that it fails on a"
            f" microbatch ({type(results).__name__}: {results}): a hidden state with a row for each sample, say. A"
            " pipeline gives it microbatches. num_microbatches=1 runs the full batch at once."
        )
    return results


def _differ(
    alone: Sequence[StepResult | None], sequence: list[StepResult] | Exception, places: Sequence[Place], bound: float
) -> bool:
    """True where a part in sequence differs from the same one alone by more than `bound`."""
    pairs = zip(alone, _checked(sequence, places), strict=True)
    return any(one is not None and not distance(one, other) <= bound for one, other in pairs)


def _inside(left: Sequence[StepResult], places: Sequence[Place], bound: float) -> Mixing:
    """The first call of a block that computes with a state of its own. Raises for the state of an object."""
    first, inner = left[0], [place for place in places if place.unit is not None]
    calls = [at for at, unit in enumerate(first.calls) if any(place.unit == unit for place in inner)]
    other = first_other(first.marks, left[-1].marks, bound)
    objects = [place for place in places if place.kind == "object"]
    behind = [at for at in calls if other is not None and at >= other] or ([] if objects else calls)
    if not behind:
        raise UnsupportedError(
            f"The loss depends on what the step keeps from batch to batch outside of blocks ({_names(objects)}). The"
            " ranks of a pipeline put back and share buffers, and attributes of the LightningModule itself. They do not"
            " for what other modules, objects, classes and files keep: each microbatch would see what the one before it"
            " left. Keep it with register_buffer on the module that owns it, or in an attribute of the LightningModule."
        )
    names = _names([place for place in inner if place.unit == first.calls[behind[0]]])
    return Mixing(behind[0], _STATE.format(names))


_STATE = (
    "{{unit!r}} computes with what it keeps from batch to batch ({}). A pipeline gives it one microbatch after the"
    " other, so each would see what the one before it left. On one device all samples of a batch see the state from"
    " before the batch. num_microbatches=1 runs the full batch at once."
)


def _names(places: Sequence[Place]) -> str:
    names = [repr(place.name) for place in places]
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
