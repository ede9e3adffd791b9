"""Runs ahead of training, divided among the tensor and pipeline peers, which would all make the same ones.

Peers have equal modules and equal samples until the module is cut (`data.same_samples` compares the samples).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.ranks import talk

T = TypeVar("T")


class PeerRuns:
    """The runs of one observation. Every peer exchanges results once, and calls `close` at the end or after an error.

    Example:
        >>> large, small = runs.divide([run_large, run_small], costs=[3, 1])
        >>> runs.close()

    Args:
        groups: this rank's tensor and pipeline groups.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = [group for group in map(Group, groups) if not group.silent]
        self._open, self._number, self._count = True, 0, 1
        for group in self._groups:
            self._number += self._count * group.rank
            self._count *= group.size

    def divide(self, runs: Sequence[Callable[[], T]], costs: Sequence[float]) -> list[T]:
        """The results of all `runs`, the first of which is made by the first peer. After one exchange all run here."""
        found: Mapping[int, T] = {}
        if self._open:
            owners = _owners(costs, self._count)
            found = self._exchanged({at: run() for at, run in enumerate(runs) if owners[at] == self._number})
        return [found[at] if at in found else run() for at, run in enumerate(runs)]

    def close(self) -> None:
        """Let peers that wait for results of this one know that there are none."""
        if self._open:
            self._exchanged({})

    def _exchanged(self, mine: Mapping[int, T]) -> Mapping[int, T]:
        for group in self._groups:
            mine = {at: result for answer in talk.gather(mine, group.ranks) for at, result in answer.items()}
        self._open = False  # not before: a result may be one that cannot be sent
        return mine


def _owners(costs: Sequence[float], count: int) -> list[int]:
    """The peer that makes each run: the first gets the first run, and the next expensive one the peer with least."""
    owners, loads = [0] * len(costs), [0.0] * count
    for at in sorted(range(len(costs)), key=lambda at: (at > 0, -costs[at])):
        owners[at] = min(range(count), key=lambda peer: loads[peer])
        loads[owners[at]] += costs[at]
    return owners
