"""Whether a step's loss is a mean over samples, as cutting a batch into microbatches takes it to be.

The loss alone does not tell. A mean over tokens that are not padding weighs each microbatch by its tokens, which
changes next to nothing while the losses of all tokens are still alike; but each sample's part in the gradient is
another at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.pipeline.buffered import buffers_differ
from lightning_3d.pipeline.kept import joins_differ
from lightning_3d.pipeline.microbatch import TENSORS, Rows, split_batch
from lightning_3d.ranks import random_streams
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.snapshot import Attributes, undone
from lightning_3d.sandbox.trees import leaves, loss_of, unshared, weighted_mean

_ROUNDING = 1e-3
"""Of gradients; that of losses, which are means of many numbers, is a tenth of it and at most a thousandth."""
_PAIRS = 3
"""Pairs of microbatches that are looked at: one may have as many tokens each by chance."""
_SEEDS = (1, 2)
"""Beside 0: a random loss comes out alike with one of them often enough, with both hardly."""


class Seen(NamedTuple):
    """What a step gave on some rows."""

    loss: float
    gradient: Tensor
    """Of some parameters, in one row; of none where the loss reaches none."""


def loss_is_no_mean(
    look: Callable[[Any, int], Seen | None],
    batch: Any,
    sizes: list[int],
    rounding: float = _ROUNDING,
    rows: Rows = TENSORS,
) -> str | None:
    """What to tell a user whose loss on microbatches together is another than the mean of its losses on each.

    Neighbours are taken that padding and labels left out make most unlike: the first ones may happen to be full.

    Args:
        look: runs the step on some rows of the batch, with random streams from a seed. None where there is no loss.
        batch: all of it.
        sizes: of the microbatches.
        rounding: how far gradients may differ, relative to them.
    """
    pieces = split_batch(batch, sizes, rows)
    for at in _most_uneven(pieces, sizes):
        pair = split_batch(batch, [*sizes[:at], sizes[at] + sizes[at + 1], *sizes[at + 2 :]], rows)[at]
        found = _unlike(look, pair, pieces[at : at + 2], sizes[at : at + 2], rounding)
        if found is not None:
            return (
                f"{found}: it is no mean over samples (tokens that a mask leaves out unevenly, pairs of samples,"
                " batch norm), so microbatches do not train exactly as one device does. num_microbatches=1 runs the"
                " whole batch at once; loss_scope='batch' computes the loss on the whole batch, which helps unless it"
                " is batch norm inside the blocks."
            )
    return None


def _unlike(
    look: Callable[[Any, int], Seen | None], pair: Any, pieces: list[Any], sizes: list[int], rounding: float
) -> str | None:
    """What a pair of microbatches gives in another way together than apart."""
    (first, second), rows = sizes, sum(sizes)
    together, one, other = look(pair, 0), look(pieces[0], 0), look(pieces[1], 0)
    if together is None or one is None or other is None:
        return None
    weights = [first / rows, second / rows]
    apart = weighted_mean([one.loss, other.loss], weights)
    off = _off(together.gradient, [one.gradient, other.gradient], weights)
    if _same(together.loss, apart, rounding) and off <= rounding:
        return None
    if any(_another(together, look(pair, seed), rounding) for seed in _SEEDS):
        return None  # it is random: what the step draws chooses what it computes
    if _same(together.loss, apart, rounding):
        return (
            f"the gradient of the loss on {rows} samples differs by {off:.2g} of itself from the mean of those on"
            f" {first} and on {second} of them"
        )
    return (
        f"the loss on {rows} samples is {together.loss:.6g}, the mean of the losses on {first} and on {second} of them"
        f" {apart:.6g}"
    )


def _most_uneven(pieces: list[Any], sizes: list[int]) -> list[int]:
    """Where neighbours begin that differ most in how much of a sample is left out, the first ones where none does."""
    left_out = [[count / size for count in _left_out(piece)] for piece, size in zip(pieces, sizes, strict=True)]
    # of lists with an entry per sample, pieces of unequal sizes hold unequal numbers of tensors
    unlike = [sum(abs(a - b) for a, b in zip(*both, strict=False)) for both in pairwise(left_out)]
    return sorted(range(len(unlike)), key=lambda at: -unlike[at])[:_PAIRS]


def _left_out(piece: Any) -> list[int]:
    """Of each tensor the zeros (a mask's, padding), and the negative integers (labels to be ignored)."""
    tensors = [leaf for leaf in leaves(piece) if isinstance(leaf, Tensor) and not leaf.is_complex()]
    zeros = [int((leaf == 0).sum()) for leaf in tensors]
    return zeros + [int((leaf < 0).sum()) for leaf in tensors if not leaf.is_floating_point()]


def _another(one: Seen, other: Seen | None, rounding: float) -> bool:
    return (
        other is None
        or not _same(one.loss, other.loss, rounding)
        or _off(one.gradient, [other.gradient], [1]) > rounding
    )


def _same(one: float, other: float, rounding: float) -> bool:
    return one != one or abs(one - other) <= min(_ROUNDING, rounding / 10) * max(abs(one), abs(other), 1e-6)


def _off(together: Tensor, parts: list[Tensor], weights: list[float]) -> float:
    """How far `together` is from the mean of `parts`, relative to them; 0 where other parameters were reached."""
    scale = sum(weight * float(part.norm()) for part, weight in zip(parts, weights, strict=True))
    if not scale or {part.shape for part in parts} != {together.shape}:
        return 0.0
    return float((together - sum(part * weight for part, weight in zip(parts, weights, strict=True))).norm()) / scale


def warn_unless_mean(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    sizes: list[int],
    rows: Rows,
    context: Callable[[], AbstractContextManager[Any]],
    calls: Sequence[str],
    rounding: float,
) -> None:
    watched, buffers = _of_the_last_block(module, calls), [name for name, _ in module.named_buffers()]

    def loss(rows: Any, seed: int) -> Tensor | None:
        random_streams.restart_python(seed)
        random_streams.restart(seed)
        with (
            LogRecorder(module).recording(Record()),
            Interceptor(SilenceRandom()),  # dropout would hide a difference
            context(),
        ):
            return loss_of(getattr(module, step)(unshared(rows), *args[1:]))

    def look(rows: Any, seed: int) -> Seen | None:
        with Attributes(module).apart(), undone(module, buffers), training_only(module, watched):
            value = loss(rows, seed)
            if value is None:
                return None
            reached = watched if value.requires_grad else []
            grads = torch.autograd.grad(value, reached, allow_unused=True) if reached else ()
        found = [grad.to_dense().flatten() for grad in grads if grad is not None]
        return Seen(float(value.detach()), torch.cat(found) if found else torch.empty(0))

    def number(rows: Any, seed: int) -> float | None:
        with torch.no_grad():
            value = loss(rows, seed)
        return None if value is None else float(value)

    def number_alone(rows: Any, seed: int) -> float | None:
        with Attributes(module).apart():
            return number(rows, seed)

    try:
        text = (
            loss_is_no_mean(look, args[0], sizes, rounding, rows)
            or joins_differ(module, number, args[0], sizes)
            or buffers_differ(module, number_alone, args[0], sizes)
        )
    except RuntimeError:  # a step that differentiates cannot run without gradients; the cut is proven all the same
        return
    if text is not None:
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {text}")


def _of_the_last_block(module: LightningModule, calls: Sequence[str]) -> list[nn.Parameter]:
    """Trained parameters of the last block that has any: the way back to it is short."""
    for unit in reversed(calls):
        if found := [item for item in module.get_submodule(unit).parameters() if item.requires_grad]:
            return found
    return []


@contextmanager
def training_only(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The others need no gradients, so that little of a forward is kept."""
    chosen = {id(item) for item in parameters}
    others = [item for item in module.parameters() if item.requires_grad and id(item) not in chosen]
    for item in others:
        item.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for item in others:
            item.requires_grad_(True)
