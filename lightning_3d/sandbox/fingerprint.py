"""Fingerprints: a few sums of a tensor, enough to see that two runs gave the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.ranks.groups import has_peers
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.trees import leaves

Print = list[float]
_STRIDES = (1, 3, 7)
_PIECE = 3 * 7 * 2**15
"""Elements that are in double precision at a time: a whole gradient would take twice its memory once more."""


def fingerprint(value: Any) -> list[Print]:
    """Of each tensor in `value`: its size and three sums.

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
    """The sum of magnitudes, then those of all elements, of every third and of every seventh."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    found = []
    for piece in plain.flatten().split(_PIECE):
        piece = piece.double()
        found.append(torch.stack([piece.abs().sum(), *(piece[::stride].sum() for stride in _STRIDES)]))
    return torch.stack(found).sum(0)


def differ(one: list[Print], other: list[Print], rounding: float = 1e-4) -> bool:
    """Whether two fingerprints are of different tensors (NaN equals NaN)."""
    if len(one) != len(other):
        return True
    for left, right in zip(one, other, strict=True):
        scale = rounding * (abs(left[2]) + 1e-6)
        if any(not (abs(a - b) <= scale or (a != a and b != b) or a == b) for a, b in zip(left, right, strict=True)):
            return True
    return False


def grad_print(grad: Tensor) -> Print:
    """The sum of a gradient's magnitudes, its size, then sums that add up where several stages give a part of it.

    Of what this rank holds: where tensor ranks share a gradient, theirs is not compared with the whole one's.
    """
    held = local(grad)
    found = sums(held)
    if not has_peers():
        return []
    size, *others = found.tolist()
    return [size, float(held.numel()), *others]


def unlike(whole: Mapping[str, Print], stages: Sequence[Mapping[str, Print]], rounding: float) -> str | None:
    """The name of a parameter whose gradient the stages together do not give as the whole module does."""
    if not has_peers():
        return None
    typical = max((size / max(count, 1.0) for size, count, *_ in whole.values()), default=0.0)
    names = dict.fromkeys([*whole, *(name for stage in stages for name in stage)])
    return next((name for name in names if _unlike(name, whole, stages, rounding, typical)), None)


def _unlike(
    name: str, whole: Mapping[str, Print], stages: Sequence[Mapping[str, Print]], rounding: float, typical: float
) -> bool:
    parts = [stage[name] for stage in stages if name in stage]
    wanted = whole.get(name) or [0.0] * len(parts[0])
    count = max([wanted[1], *(part[1] for part in parts)])
    # Exact zeros (the bias of a key, say) are rounding errors of either run: they only count beside other gradients.
    bound = rounding * max(wanted[0], 1e-3 * typical * count)
    sums = [sum(part[at] for part in parts) for at in range(len(wanted))]
    compared = range(2, len(wanted)) if len(parts) != 1 else (0, *range(2, len(wanted)))
    return any(_apart(sums[at], wanted[at], bound) for at in compared)


def _apart(one: float, other: float, bound: float) -> bool:
    both_bad = one != one and other != other
    return not (both_bad or one == other or abs(one - other) <= bound)
