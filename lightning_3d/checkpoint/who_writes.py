"""The distribution of writes: each box of each tensor once, spread evenly. Equal on every rank, without messages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.checkpoint.placement import Piece, Placement
from lightning_3d.checkpoint.safetensors_files import DTYPES


@dataclass(frozen=True)
class TensorEntry:
    """One rank's part of one tensor."""

    dtype: str
    placement: Placement
    replicated: bool = True
    """True where ranks with the same box have the same values. Otherwise the values of the first rank are saved."""


Listing = Mapping[str, TensorEntry]
"""The tensors of one rank, by name."""


def share_out(listings: Sequence[Listing]) -> list[dict[str, tuple[Piece, ...]]]:
    """For each rank the boxes that it writes. A box of several ranks goes to the one with least to write."""
    holders: dict[tuple[str, Piece], list[tuple[int, Piece]]] = defaultdict(list)
    for rank, listing in enumerate(listings):
        for name, entry in listing.items():
            for piece in entry.placement.pieces:
                place = Piece(offset=piece.offset, size=piece.size, local=piece.offset)
                holders[name, place].append((rank, piece))
    load = [0] * len(listings)
    tasks: list[dict[str, list[Piece]]] = [defaultdict(list) for _ in listings]
    # what only one rank can write comes first, then the rest fills up, the largest first
    for (name, place), choices in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0][1].elements)):
        entry = listings[choices[0][0]][name]
        rank, piece = min(choices, key=lambda choice: load[choice[0]]) if entry.replicated else choices[0]
        load[rank] += place.elements * DTYPES[entry.dtype].itemsize
        tasks[rank][name].append(piece)
    return [{name: tuple(pieces) for name, pieces in sorted(task.items())} for task in tasks]
