"""Fingerprints: a few sums of a tensor, enough to compare two runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.ranks.shards import local
from lightning_3d.ranks.talk import has_peers
from lightning_3d.sandbox.interceptor import without_class
from lightning_3d.sandbox.trees import leaves

Print = list[float]
CHUNK = 4 * 65521
"""Elements that are digested at once. A multiple of the period of their weights."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element: to multiply bytes, as integers of eight, takes ten times as long."""
_STRIDES = (1, 3, 7)
_PIECE, _PIECE_ON_DEVICE = 3 * 7 * 2**12, 3 * 7 * 2**15
"""Elements converted to double precision at a time: a full gradient would take twice its memory again.

On a CPU larger pieces would leave the cache, and get fresh pages from the system each time (five times as long)."""


def fingerprint(value: Any) -> list[Print]:
    """Size and three sums of each tensor in `value`.

    In a dry run the sums take their memory, but have no values: there is nothing to compare.
    """
    prints = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found = sums(leaf)
            if has_peers():
                size, total, third, _ = found.tolist()
                prints.append([float(leaf.numel()), total, size, third])
    return prints


def sums(tensor: Tensor) -> Tensor:
    """The sum of magnitudes, then those of all elements, of every third and of every seventh.

    Without peers nothing is compared, and the first piece has the memory of all: a dry run has millions of pieces.
    """
    tensor = without_class(tensor).detach()
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    found: list[Tensor] = []
    flat = plain.flatten()
    length = _PIECE if flat.is_cpu else _PIECE_ON_DEVICE
    for piece in flat.split(length) if has_peers() else [flat[:length]]:
        piece = piece.to(torch.float64, copy=True)
        found += [piece[::stride].sum() for stride in _STRIDES]
        found.append(piece.abs_().sum())
    return torch.stack(found).view(-1, len(_STRIDES) + 1).sum(0).roll(1)


def differ(one: list[Print], other: list[Print], rounding: float = 1e-4) -> bool:
    """Return True if two fingerprints are of different tensors (NaN equals NaN)."""
    if len(one) != len(other):
        return True
    for left, right in zip(one, other, strict=True):
        scale = rounding * (abs(left[2]) + 1e-6)
        if any(not (abs(a - b) <= scale or (a != a and b != b) or a == b) for a, b in zip(left, right, strict=True)):
            return True
    return False


def grad_print(grad: Tensor) -> Print:
    """The sum of a gradient's magnitudes, its size, then sums that add up over stages that contribute to it.

    Computed from the shard of this rank: with tensor parallelism, shards are not compared with the full gradient.
    """
    shard = local(grad)
    values = sums(shard)
    if not has_peers():
        return []
    size, *others = values.tolist()
    return [size, float(shard.numel()), *others]


def unlike(uncut: Mapping[str, Print], stages: Sequence[Mapping[str, Print]], rounding: float) -> str | None:
    """The name of a parameter whose gradients on the stages do not add up to that of the uncut module."""
    if not has_peers():
        return None
    typical = max((size / max(count, 1.0) for size, count, *_ in uncut.values()), default=0.0)
    names = dict.fromkeys([*uncut, *(name for stage in stages for name in stage)])
    return next((name for name in names if _unlike(name, uncut, stages, rounding, typical)), None)


def _unlike(
    name: str, uncut: Mapping[str, Print], stages: Sequence[Mapping[str, Print]], rounding: float, typical: float
) -> bool:
    parts = [stage[name] for stage in stages if name in stage]
    wanted = uncut.get(name) or [0.0] * len(parts[0])
    count = max([wanted[1], *(part[1] for part in parts)])
    # Gradients that are zero but for rounding (the bias of a key) are compared on the scale of the others.
    bound = rounding * max(wanted[0], 1e-3 * typical * count)
    sums = [sum(part[at] for part in parts) for at in range(len(wanted))]
    compared = range(2, len(wanted)) if len(parts) != 1 else (0, *range(2, len(wanted)))
    return any(_differs(sums[at], wanted[at], bound) for at in compared)


def _differs(one: float, other: float, bound: float) -> bool:
    both_bad = one != one and other != other
    return not (both_bad or one == other or abs(one - other) <= bound)


def is_absent(tensor: Tensor | None) -> bool:
    """Return True if there is nothing to compare. The bits of a sparse buffer (a graph) are in several tensors."""
    return tensor is None or tensor.is_meta or tensor.layout != torch.strided


@torch.no_grad()
def digest(tensor: Tensor | None) -> int:
    """A number that depends on every bit of this rank's shard of a tensor, and on its place."""
    if tensor is None or is_absent(tensor):
        return 0
    held = local(tensor.detach()).contiguous().reshape(-1).view(_INTEGERS[tensor.itemsize])
    weights = torch.arange(min(held.numel(), CHUNK), dtype=torch.int32, device=held.device) % 65521 * 2 + 1  # odd
    total = torch.zeros((), dtype=torch.long, device=held.device)
    for chunk in held.split(CHUNK):
        total += (chunk * weights[: chunk.numel()]).sum()
    return int(total)
