"""What compression left over, from the ranks that had it to those of another layout.

What a data rank lost is added to its next gradient, and those are averaged. So what counts of a parameter is the mean
of what the data ranks lost, and with it what the average itself lost when it was sent. Any layout that starts with the
same sum goes on as the run would have.

[Note: stretches] The data axis is a line that ranks divide evenly. A rank takes, of each that was there, the share that
lay on its own stretch. So the mean stays what it was, a rank reads about what it will hold, and where there are as many
data ranks as before each goes on with its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.collect import parameter_names
from lightning_3d.checkpoint.placement import Piece, Placement, Splits, box, overlaps
from lightning_3d.checkpoint.stored import materialize
from lightning_3d.comm import Compression
from lightning_3d.comm.compression import AVERAGE
from lightning_3d.comm.powersgd import RIGHT, PowerSGD
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Coordinate
from lightning_3d.zero.data_axis import DataAxis


@dataclass(frozen=True)
class Part:
    """Of what a compression remembers one key, whichever data rank it is on: a parameter, or a tensor rank's part."""

    names: tuple[str, ...]
    """Of the parameter, several where it is tied."""
    placement: Placement

    def plain(self) -> list[Any]:
        """As a checkpoint has it; `_placement` reads it."""
        pieces = [[list(piece.offset), list(piece.size), list(piece.local)] for piece in self.placement.pieces]
        return [self.names[0], list(self.placement.shape), list(self.placement.local_shape), pieces]


@dataclass(frozen=True)
class Sending:
    """How a rank sends gradients."""

    compressions: tuple[tuple[Compression, Mapping[str, Part]], ...]
    data_rank: int
    data_ranks: int
    codec: str | None
    scale: float
    """By which gradients are too large when they are sent, and what is left over of them too."""

    def plain(self) -> dict[str, Any]:
        """As a checkpoint has it, to know of what the memory of the compressions is."""
        parts = [
            {key: part.plain() for key, part in parts.items() if key in compression.memory}
            for compression, parts in self.compressions
        ]
        return {"codec": self.codec, "scale": self.scale, "parts": parts}

    def was(self, own: Mapping[str, Any]) -> bool:
        """Whether the rank that saved `own` sent the same; before checkpoints told, it is taken for granted."""
        before = own.get("sending", {"codec": self.codec, "scale": self.scale})
        alike = len(own["communication"]["compressions"]) == len(self.compressions)
        return alike and (before["codec"], before["scale"]) == (self.codec, self.scale)


def sending(
    communication: DataAxis, module: nn.Module, splits: Splits, coordinate: Coordinate, scale: float
) -> Sending:
    """How the rank at `coordinate` sends the gradients of `module`."""
    names = parameter_names(module)

    def part(parameter: nn.Parameter) -> Part:
        placement, split = Placement.whole(parameter.shape), splits.get(parameter)
        if split is not None:
            placement = placement.split(split.dim, split.boxes(coordinate.tensor))
        return Part(names[parameter], placement)

    return Sending(
        tuple(
            (compression, {key: part(parameter) for key, parameter in keyed.items()})
            for compression, keyed in communication.compressed
        ),
        coordinate.data,
        communication.axes.whole.size(),
        communication.config.grad_compression,
        scale,
    )


@dataclass(frozen=True)
class Saved:
    """What one data rank of a checkpoint remembered of a part; tensors may still be on disk."""

    memory: Mapping[str, Any]
    key: str

    def read(self, kind: str = "") -> Tensor | None:
        value: Tensor | None = materialize(self.memory.get(self.key + kind))
        return value


Holders = Mapping[Placement, Mapping[int, Saved]]
"""For each part of a parameter that a checkpoint tells of, the data ranks that remembered something of it."""


@dataclass(frozen=True)
class Leftovers:
    """What all ranks of a checkpoint had left over."""

    parameters: Mapping[str, Holders]
    ranks: int
    """How many data ranks there were."""
    scale: float

    @classmethod
    def find(cls, states: Sequence[Mapping[str, Any]]) -> "Leftovers | None":
        """In what `own_state` gave on all ranks; None where it did not tell of which parameters leftovers are."""
        if any("sending" not in state for state in states):
            return None
        found: dict[str, dict[Placement, dict[int, Saved]]] = {}
        for state in states:
            memories, parts = state["communication"]["compressions"], state["sending"]["parts"]
            for memory, keyed in zip(memories, parts, strict=True):
                for key, (name, *where) in keyed.items():
                    # tensor ranks and stages that have the same part have lost the same of it: the first one's counts
                    ranks = found.setdefault(name, {}).setdefault(_placement(*where), {})
                    ranks.setdefault(state["data"][0], Saved(memory, key))
        return cls(found, len({state["data"][0] for state in states}), states[0]["sending"]["scale"])

    def hand_out(self, to: Sending) -> None:
        """Give a rank that sends like that what it is to go on with, a part at a time."""
        shares = _shares(to.data_rank, to.data_ranks, self.ranks)
        for compression, parts in to.compressions:
            compression.memory = {}
            for key, part in parts.items():
                holders = next((self.parameters[name] for name in part.names if name in self.parameters), {})
                if not holders:
                    continue
                compression.memory[key] = _part(part.placement, holders, shares).mul_(to.scale / self.scale)
                if isinstance(compression, PowerSGD) and part.placement in holders:
                    _, first = min(holders[part.placement].items())  # on all ranks, which must start from the same
                    if (right := first.read(RIGHT)) is not None:
                        compression.memory[key + RIGHT] = right


def _part(wanted: Placement, holders: Holders, shares: Mapping[int, float]) -> Tensor:
    part = torch.zeros(wanted.local_shape)
    for placement, ranks in holders.items():
        if common := list(overlaps(placement.pieces, wanted.pieces)):
            owed = _owed(placement, ranks, shares)
            for there, here in common:
                part[box(here.local, here.size)] = owed[box(there.local, there.size)]
    return part


def _owed(placement: Placement, ranks: Mapping[int, Saved], shares: Mapping[int, float]) -> Tensor:
    """What is owed of one part: shares of what `ranks` lost, and what the average of all did."""

    owed = torch.zeros(placement.local_shape)
    flat = owed.view(-1)
    for rank, share in shares.items():
        if rank in ranks and (lost := ranks[rank].read()) is not None:
            flat.add_(lost.reshape(-1).narrow(0, 0, len(flat)), alpha=share)  # what follows is padding
    averages = [average for rank in sorted(ranks) if (average := ranks[rank].read(AVERAGE)) is not None]
    if averages:
        flat.add_(torch.cat([average.reshape(-1) for average in averages]).narrow(0, 0, len(flat)))
    return owed


def _placement(shape: Sequence[int], local_shape: Sequence[int], pieces: Sequence[Any]) -> Placement:
    found = tuple(Piece(tuple(offset), tuple(size), tuple(local)) for offset, size, local in pieces)
    for piece in found:
        if any(at + n > held for at, n, held in zip(piece.local, piece.size, local_shape, strict=True)):
            raise CheckpointError(f"a part of {piece.size} at {piece.local} is not within {tuple(local_shape)}.")
    return Placement(tuple(shape), found, tuple(local_shape))


def _shares(rank: int, ranks: int, before: int) -> dict[int, float]:
    """Which of `before` data ranks the `rank`-th of `ranks` takes how much of (see [Note: stretches])."""
    start, stop = rank * before, (rank + 1) * before
    common = {old: min(stop, (old + 1) * ranks) - max(start, old * ranks) for old in range(before)}
    return {old: length / before for old, length in common.items() if length > 0}
