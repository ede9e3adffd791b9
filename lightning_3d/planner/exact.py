"""To the byte: what a data-parallel rank holds between steps and sends in one, for a module's own parameter shapes.

The closed forms divide evenly; FSDP2 deals out rows. Every parameter is cut along its first dimension into pieces of
`ceil(rows / N)` rows, of which the last ranks may get fewer or none, and travels padded to `N` such pieces.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import nn

from lightning_3d.comm.ring import SMALL_BYTES
from lightning_3d.layout import ZeroStage
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.planner.states import StateBytes


class Piece(NamedTuple):
    """One parameter: its shape, and whether it is trained (a frozen one has no gradient and no optimizer state)."""

    shape: tuple[int, ...]
    trained: bool = True

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModuleShapes:
    """A module's parameters, tied ones once."""

    blocks: tuple[Piece, ...]
    """In blocks, which ZeRO 3 frees after their forward and gathers again for their backward."""
    root: tuple[Piece, ...]
    """In the rest, gathered once per step: embeddings, head, and blocks that share a parameter with the rest."""
    scalars: tuple[Piece, ...] = ()
    """Parameters without a dimension to shard, which are replicated."""

    @property
    def every(self) -> tuple[Piece, ...]:
        return (*self.blocks, *self.root, *self.scalars)


Local = Callable[[str, nn.Parameter], tuple[int, ...] | None]
"""Name and parameter -> the shape that a rank holds of it, None where it holds nothing."""


def _everything(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(parameter.shape)


def module_shapes(module: nn.Module, local: Local = _everything) -> ModuleShapes:
    """The shapes of `module`, which may be on the meta device, as far as a rank holds it."""
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    inside: set[int] = set()
    for block in (module.get_submodule(name) for chain in Anatomy.of(module).chains for name in chain.blocks):
        own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        if all(owners[key] == count for key, count in own.items()):
            inside |= set(own)
    held = [(local(name, p), p) for name, p in module.named_parameters()]
    pieces = [(Piece(shape, p.requires_grad), id(p) in inside) for shape, p in held if shape is not None]
    return ModuleShapes(
        blocks=tuple(piece for piece, blocked in pieces if piece.shape and blocked),
        root=tuple(piece for piece, blocked in pieces if piece.shape and not blocked),
        scalars=tuple(piece for piece, _ in pieces if not piece.shape),
    )


def rows_of(rows: int, rank: int, ranks: int) -> int:
    """Of `rows` rows, how many `rank` of `ranks` holds."""
    piece = -(-rows // ranks)
    return max(0, min(piece, rows - rank * piece))


def rank_elements(pieces: Iterable[Piece], *, rank: int, ranks: int) -> int:
    """Elements of `pieces` that `rank` holds where they are sharded over `ranks`."""
    return sum(rows_of(piece.shape[0], rank, ranks) * prod(piece.shape[1:]) if piece.shape else 1 for piece in pieces)


def states_at_rest(
    shapes: ModuleShapes, per_parameter: StateBytes, *, stage: ZeroStage, rank: int, ranks: int
) -> StateBytes:
    """Bytes that `rank` holds between two steps. From stage 1 on everything is sharded then: the stages differ in what
    they gather during a step."""
    where = {"rank": rank, "ranks": ranks} if stage else {"rank": 0, "ranks": 1}
    trained = rank_elements(_trained(shapes.every), **where)
    return StateBytes(
        weights=per_parameter.weights * rank_elements(shapes.every, **where),
        gradients=per_parameter.gradients * trained,
        optimizer=per_parameter.optimizer * trained,
    )


def bytes_sent(
    shapes: ModuleShapes, *, stage: ZeroStage, ranks: int, element_bytes: int = 4, accumulate: int = 1
) -> int:
    """Bytes that each rank sends on rings of the data axis for one optimizer step of `accumulate` backwards.

    Stage 0 reduces once per step. Stage 1 gathers and reduces once per step, stage 2 once per backward; stage 3 gathers
    each block twice for that.
    """
    if ranks == 1:
        return 0
    if stage == 0:
        return element_bytes * sum(_all_reduced(size, ranks) for size in _buckets(shapes, element_bytes))
    blocks, root = _one_way(shapes.blocks, ranks), _one_way(shapes.root, ranks)
    reduces = _one_way(_trained((*shapes.blocks, *shapes.root)), ranks)
    gathers = blocks * (2 if stage == 3 else 1) + root
    times = 1 if stage == 1 else accumulate
    return element_bytes * ((gathers + reduces) * times + _all_reduced(len(list(_trained(shapes.scalars))), ranks))


def _buckets(shapes: ModuleShapes, element_bytes: int) -> Iterator[int]:
    """Elements of what is all-reduced at once: large gradients alone, the others together (beyond 4 MB of those it
    depends on the order in which gradients arrive how many elements the last of each padded piece has)."""
    sizes = [piece.elements for piece in _trained(shapes.every)]
    yield from (size for size in sizes if size * element_bytes >= SMALL_BYTES)
    if small := sum(size for size in sizes if size * element_bytes < SMALL_BYTES):
        yield small


def _trained(pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (piece for piece in pieces if piece.trained)


def _one_way(pieces: Iterable[Piece], ranks: int) -> int:
    """Elements a rank sends to reduce-scatter, or to all-gather, every one of `pieces`."""
    return (ranks - 1) * sum(-(-piece.shape[0] // ranks) * prod(piece.shape[1:]) for piece in pieces)


def _all_reduced(elements: int, ranks: int) -> int:
    """Elements a rank sends to all-reduce one buffer; a rest that does not divide travels as one more per rank."""
    body, rest = divmod(elements, ranks)
    return 2 * (ranks - 1) * (body + (1 if rest else 0))
