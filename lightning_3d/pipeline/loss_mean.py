"""A test for losses that are means over samples, as cutting a batch into microbatches assumes.

The value of the loss alone does not show it. A mean over tokens that are not padding weighs each microbatch by its
tokens. That changes next to nothing while the losses of all tokens are still alike, but each sample's share of the
gradient differs at once. So gradients are compared too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_3d.module.undo import replaced_entries
from lightning_3d.pipeline.across_samples import Operations
from lightning_3d.pipeline.microbatch import NORMS, TENSORS, Path, Rows, split_batch
from lightning_3d.pipeline.row_marks import CallMarks, Given, Kind, first_not_of_rows, first_that_mixes
from lightning_3d.sandbox.record import Record, number_in
from lightning_3d.sandbox.trees import weighted_mean

ROUNDING = 1e-3
"""Of gradients; that of losses, which are means of many numbers, is a tenth of it and at most a thousandth."""


Arrays = Sequence[tuple[Sequence[int], float]]
"""Shapes and means."""


class StepResult(NamedTuple):
    """The loss and a gradient of a step on some rows."""

    loss: float
    gradient: Tensor
    """Sums of gradients of some parameters, in one row; empty where the loss depends on none."""
    marks: Sequence[CallMarks] = ()
    """Of the outputs of all calls of blocks."""
    calls: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    """What each call was given."""
    drawn: frozenset[int] = frozenset()
    """Lengths of the random tensors that the step drew; 0 for one number, and for what Python or numpy drew."""
    plain: int = 0
    """A number for what the step drew from Python's and numpy's streams; 0 for nothing."""
    written: Mapping[Any, str] = MappingProxyType({})
    """What the step wrote beside its logs: see `step_runs`."""
    arrays: Mapping[str, Arrays] = MappingProxyType({})
    """Shapes and means of the tensors with dimensions in each attribute of the module that it wrote."""
    operations: Operations = Operations()
    """Those between blocks."""
    logged: Record = Record()
    """The numbers that the step logged."""

    def is_that_of(self, other: "StepResult | None") -> bool:
        """True where another run has these numbers by the same operations, and wrote and logged the same."""
        if other is None or distance(self, other):
            return False
        mine, its = ([(call.key, number_in(call)) for call in each.logged.calls] for each in (self, other))
        return mine == its and (self.loss, *self[3:-1]) == (other.loss, *other[3:-1])


class Mixing(NamedTuple):
    """A call of a block that gives other values for a microbatch than for the full batch."""

    call: int
    """Its index in the step."""
    text: str = (
        "The output of {unit!r} for a sample depends on the other samples of the batch (their mean, a capacity that"
        " they share), on numbers of a generator that the step seeds anew, or its rows are in another order (torch.cat"
        " of two views of a batch). A pipeline computes it for each microbatch, so it would train otherwise than one"
        " device does. num_microbatches=1 runs the full batch at once. Rows of one sample stay together in"
        " torch.stack([a, b], 1).flatten(0, 1)."
    )
    """The error where no head has the call."""


Verdict = Literal["mean", "random", "unknown", "no mean"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""The one that counts if data ranks disagree is the last of theirs."""


def first_call(found: Iterable[Mixing | None]) -> Mixing | None:
    """The one whose call is first, of several for one call the first of them."""
    return min((each for each in found if each is not None), key=lambda each: each.call, default=None)


@dataclass(frozen=True)
class LossMean:
    verdict: Verdict
    """"random" where the step differs from itself, "unknown" where there is nothing to compare."""
    reason: str = ""
    """Why it is no mean, or was not compared; of a mean what the numbers of one device differ by."""
    mixing: Mixing | None = None
    """The first of its kind in the step."""
    left_out: tuple[tuple[Path, int], ...] = ()
    """Of a mean: see `across_samples.LeftOut.targets`."""
    alike: tuple[str, ...] = ()
    """See `carried_state.alike_on_parts`."""


MEAN = LossMean("mean")
UNSEEN = LossMean("unknown", "the first batch could not be looked at before training")

Run = Callable[..., StepResult | None]
"""Runs the step on some rows of the batch, with random streams from a seed, and marks what blocks return if that is
True. Python's streams have a new seed where `fresh`, else that of the other runs. None where the step has no loss."""
Runs = Sequence[Callable[[], StepResult | None]]
Divide = Callable[[Runs, Sequence[float]], Sequence[StepResult | None]]
"""Makes several runs, each of some cost, on this rank or on peers."""


def compare_parts(run: Run, batch: Any, sizes: list[int], rounding: float, rows: Rows, divide: Divide) -> LossMean:
    """Compare the loss on the full batch with the mean of the losses on its parts.

    Takes four runs, and a fifth where they differ: a random step differs from itself too. The parts are the first
    microbatch, two thirds of the others, and the rest. Equal parts may happen to have as many tokens each. Gradients
    may differ by `rounding`, relative to them.
    """
    if len(sizes) < 2:  # a stage has a stream of its own
        alone = run(batch, 1, False)
        return LossMean("mean", DRAWN if alone is not None and alone.drawn else "")
    counts, pieces = parts_of(batch, sizes, rows)
    # Seeds differ on purpose: the step has no dropout here, and the order of its blocks must not depend on the seed.
    marked = (1, 2, len(pieces) + 1)
    runs = [partial(run, part, seed, seed in marked) for seed, part in enumerate([batch, *pieces], 1)]
    # not the real sizes, which may differ between data ranks: a step may send messages to these
    together, *found = divide(runs, [len(counts), *[1] * len(counts)])
    parts = [part for part in found if part is not None]
    if together is None or len(parts) < len(counts):
        return LossMean("unknown", "the step could not be compared with itself on parts of the first batch")
    if together.loss != together.loss:
        return LossMean("unknown", "the loss on the first batch is not a number")
    if not (together.loss or together.gradient.any()):
        return LossMean("unknown", "the loss on the first batch is 0")
    difference = _difference(together, parts, counts, rounding)
    # Python's numbers for a batch are those of its parts, unless code draws some for each sample
    fresh = any(part.plain != together.plain for part in parts)
    again = None if difference is None else run(batch, len(pieces) + 2, False, fresh=fresh)
    random = difference is not None and _differ(together, again, rounding)
    fixed = again is not None and [each.shapes for each in again.given] == [each.shapes for each in together.given]
    kind: Kind = "drawn" if difference is None else "any" if not random else "fixed" if fixed else "chosen"
    sampled = _sampled(together, parts, kind)
    if sampled is not None:
        return LossMean("no mean", "blocks get other samples for the batch than for its parts", sampled)
    if random:
        return LossMean("random", _RANDOM)
    if difference is not None:
        return LossMean("no mean", difference, _mixing(together, parts, rounding))
    return LossMean("mean", DRAWN if together.drawn else "")


def parts_of(batch: Any, sizes: list[int], rows: Rows = TENSORS) -> tuple[list[int], list[Any]]:
    """The rows of three parts of a batch, or of two, and the parts: see `compare_parts`."""
    cuts = sorted({0, 1, 1 + round((len(sizes) - 1) * 2 / 3), len(sizes)})
    counts = [sum(sizes[start:end]) for start, end in pairwise(cuts)]
    return counts, split_batch(batch, counts, rows)


def find_mixing(
    run: Run, batch: Any, sizes: list[int], rounding: float, rows: Rows, divide: Divide, *, drawn: bool
) -> LossMean:
    """Compare blocks on the full batch and on its first and last microbatch, for a loss that is no mean. Three runs.

    Random numbers that are `drawn` between blocks would look like other samples.
    """
    first, *_, last = split_batch(batch, sizes, rows)
    together, *found = divide(
        [partial(run, part, seed, True) for seed, part in enumerate([batch, first, last], 1)], [2, 1, 1]
    )
    parts = [part for part in found if part is not None]
    if together is None or len(parts) < 2:
        return UNSEEN
    mixing = _sampled(together, parts[:1], "chosen") or (None if drawn else _mixing(together, parts, rounding))
    return LossMean("unknown", mixing=mixing)


def with_mixing(mean: LossMean, results: Sequence[StepResult | None], rounding: float) -> LossMean:
    """`mean` for a loss on the full batch, in whose order microbatches must have their rows, as the mean need not."""
    found = [result for result in results if result is not None]  # of the batch and of parts
    if mean.verdict not in ("unknown", "no mean") or mean.mixing is not None or len(found) < 3:
        return mean
    return replace(mean, mixing=_mixing(found[0], found[1:], rounding))


def _mixing(together: StepResult, parts: Sequence[StepResult], rounding: float) -> Mixing | None:
    """The first call that mixes. What drops the last tokens of a batch is seen in the last part alone."""
    ends = [(parts[0], False), (parts[-1], True)]
    calls = [first_that_mixes(together.marks, part.marks, rounding, last=last) for part, last in ends]
    found = [call for call in calls if call is not None]
    return Mixing(min(found)) if found else None


def _sampled(together: StepResult, parts: Sequence[StepResult], kind: Kind) -> Mixing | None:
    drawn = together.drawn.intersection(*(part.drawn for part in parts))
    found = first_not_of_rows(together.given, [part.given for part in parts], drawn, kind)
    return None if found is None else Mixing(found[0], _OTHER_SAMPLES.format(found[1]))


_RANDOM = (
    "the loss of equal samples differs from run to run. A step that mixes or pairs samples at random (mixup) does so"
    " within a microbatch. num_microbatches=1 runs the full batch at once"
)
DRAWN = (
    "training_step draws random numbers other than dropout (masks of a masked autoencoder, noise, dropped paths). Each"
    " microbatch draws its own, so losses are those of another seed than on one device"
)
_OTHER_SAMPLES = (
    "training_step gives {{unit!r}} other samples than those of its batch (windows or points that it draws, the first"
    " rows, sequences cut to the longest one): {}. A pipeline runs it on each microbatch, so it would train otherwise"
    " than one device does. Choose and cut them in the dataset, the collate_fn or on_after_batch_transfer. Where all"
    " batches give the same shapes, num_microbatches=1 helps too: it runs the full batch at once."
)


def _difference(together: StepResult, parts: list[StepResult], sizes: list[int], rounding: float) -> str | None:
    rows = sum(sizes)
    those = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} of them"
    weights = [size / rows for size in sizes]
    mean = weighted_mean([part.loss for part in parts], weights)
    off = _distance(together.gradient, [part.gradient for part in parts], weights)
    if not equal_losses(together.loss, mean, min(ROUNDING, rounding / 10)):
        return f"the loss on {rows} samples is {together.loss:.6g}, the mean of the losses on {those} is {mean:.6g}"
    if not off <= rounding:  # also where it is not a number
        return f"the gradient on {rows} samples differs by {off:.2g} of itself from the mean of those on {those}"
    return None


def distance(one: StepResult, other: StepResult) -> float:
    """The difference of two runs on the same samples, relative to them."""
    if one.gradient.shape != other.gradient.shape:
        return math.inf
    if one.loss != one.loss:
        return 0.0 if other.loss != other.loss else math.inf
    off = abs(one.loss - other.loss) / max(abs(one.loss), abs(other.loss), 1e-6)
    return max(off, _distance(one.gradient, [other.gradient], [1]))


def _differ(one: StepResult, other: StepResult | None, rounding: float) -> bool:
    if other is None or not equal_losses(one.loss, other.loss, min(ROUNDING, rounding / 10)):
        return True
    return not _distance(one.gradient, [other.gradient], [1]) <= rounding


def equal_losses(one: float, other: float, rounding: float, least: float = 1e-10) -> bool:
    """True where two losses differ by no more than `rounding`, relative to them, or `least`; also of two NaNs."""
    if one != one or other != other:
        return one != one and other != other
    return one == other or abs(one - other) <= max(least, rounding * max(abs(one), abs(other)))


def _distance(together: Tensor, parts: list[Tensor], weights: list[float]) -> float:
    """Distance of `together` from the mean of `parts`, relative to them; 0 where other parameters have gradients."""
    scale = sum(weight * float(part.norm()) for part, weight in zip(parts, weights, strict=True))
    if not scale or {part.shape for part in parts} != {together.shape}:
        return 0.0
    return float((together - sum(part * weight for part, weight in zip(parts, weights, strict=True))).norm()) / scale


def step_result(loss: Tensor | None, parameters: Sequence[nn.Parameter], **seen: Any) -> StepResult | None:
    """The loss, sums of its gradient with respect to some parameters, and what else was `seen`."""
    if loss is None:
        return None
    trained = list(parameters) if loss.requires_grad else []
    grads = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    found = [random_sums(grad.to_dense()) for grad in grads if grad is not None]
    return StepResult(float(loss.detach()), torch.cat(found) if found else torch.empty(0), **seen)


SUMS, WIDTH = 16, 256
"""Random sums of each of so many columns."""


def random_sums(tensor: Tensor) -> Tensor:
    """A few numbers whose differences are about as large as those of tensors: peers send these.

    Each is a sum of a column with random signs, which are the same wherever this runs. Sizes of differences are right
    but for a fifth or so. Small tensors are taken whole.
    """
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = plain.to(torch.promote_types(plain.dtype, torch.float32)).flatten()
    if flat.numel() > SUMS * WIDTH:
        rows = F.pad(flat, (0, -flat.numel() % WIDTH)).view(-1, WIDTH)
        signs = torch.empty(SUMS, len(rows)).bernoulli_(generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1)
        flat = ((signs.to(rows) @ rows) / SUMS**0.5).flatten()
    return flat.cpu()


def last_trained(module: nn.Module, blocks: Sequence[str]) -> str | None:
    """The last of `blocks` that trains: a backward to it is short."""
    return next((name for name in reversed(blocks) if trained_in(module, name)), None)


def trained_in(module: nn.Module, block: str | None) -> list[nn.Parameter]:
    return [] if block is None else [item for item in module.get_submodule(block).parameters() if item.requires_grad]


@contextmanager
def training_only(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters need gradients, so that little of a forward is kept."""
    chosen = {id(item) for item in parameters}
    others = [item for item in module.parameters() if item.requires_grad and id(item) not in chosen]
    for item in others:
        item.requires_grad_(False)
    try:
        yield
    finally:
        for item in others:
            item.requires_grad_(True)


@contextmanager
def norms_on_running_statistics(module: nn.Module, units: Sequence[str]) -> Iterator[bool]:
    """Let batch norms of blocks normalize by their running statistics; yields True where there are any."""
    inside = {id(each): each for unit in units for each in module.get_submodule(unit).modules()}
    norms = [each for each in inside.values() if isinstance(each, NORMS) and each.training and each.track_running_stats]
    with replaced_entries((vars(norm), "training", False) for norm in norms):
        yield bool(norms)


def rounding_of(
    module: nn.Module, hooked: Sequence[str] = (), context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> float:
    """The largest difference of two computations of the same values in `context`, relative to them. A term of the loss
    that a hook takes in a module of `hooked`, inside of a block, may be small.
    """
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    low = {parameter.dtype for parameter in module.parameters()} & {torch.bfloat16, torch.float16}
    with context():
        if not hooked and (low or torch.is_autocast_enabled(device)):
            return 0.05
        return ROUNDING / 10 if device == "cpu" else ROUNDING  # others may round products to TF32
