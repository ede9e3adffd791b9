"""The value of a tensor as the operations that made it, which can be run again.

Each operation is recorded with its arguments and, where it draws random numbers, with the state of its generator. Run
again on the same machine, it gives the same bits.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.module.torch_private import tree_leaves, tree_map_only
from lightning_3d.ranks.random_streams import restored_states

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: along each dimension, the first index and the one after the last."""
_ATEN = torch.ops.aten
_ALLOCATIONS = frozenset(
    [_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default]
)
_STACK = _ATEN.stack.default
MERGES = frozenset([_STACK, _ATEN.cat.default])
"""Operations that put tensors together."""


@dataclass(frozen=True)
class Geometry:
    """The part of its memory that a tensor sees."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor that sees this part of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]

    def is_all_of(self, storage: torch.UntypedStorage) -> bool:
        """True where each byte of `storage` belongs to one element."""
        packed, sizes = 1, sorted(zip(self.stride, self.size, strict=True))
        for stride, size in sizes:
            if size != 1 and stride != packed:
                return False
            packed *= size
        return self.offset == 0 and packed * self.dtype.itemsize == storage.nbytes()


@dataclass(frozen=True, eq=False)
class Use:
    """An argument of a recorded operation: a tensor whose value is recorded too."""

    step: "Step"
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of a function of torch. `Use` stands for a tensor in `args` and `kwargs`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    """Draws the operation's random numbers."""
    state: Tensor | None
    """The state of `generator` before the operation."""

    def run(self, tensor_of: Callable[[Use], Tensor]) -> Any:
        """Run again on the tensors that `tensor_of` gives. The generator's state stays."""
        args, kwargs = tree_map_only(Use, tensor_of, (self.args, self.kwargs))
        if self.generator is None or self.state is None:
            return self.function(*args, **kwargs)
        with restored_states({self.generator: self.generator.get_state()}):
            self.generator.set_state(self.state)
            return self.function(*args, **kwargs)

    def digest(self) -> bytes:
        """Equal for operations that compute the same."""
        parts: list[Any] = [str(self.function), None if self.state is None else self.state.numpy().tobytes()]
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Use):
                parts += [leaf.step.digest, leaf.geometry]
            elif isinstance(leaf, Tensor):
                parts += [Geometry.of(leaf), None if leaf.is_meta else leaf.tolist()]
            elif not isinstance(leaf, torch.Generator):
                parts.append(leaf.type if isinstance(leaf, torch.device) else leaf)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class Step:
    """The value of some memory after an operation."""

    operation: Operation
    before: "Step | None"
    """The value that the operation changed. None where the operation made the memory."""
    output: int
    """Which tensor of the operation's result sees new memory."""
    digest: bytes
    """Equal on ranks where the value is the same."""
    depth: int
    """The longest way to an operation without recorded arguments."""

    @classmethod
    def of(cls, operation: Operation, before: "Step | None", output: int = 0) -> "Step":
        uses = [leaf.step for leaf in tree_leaves((operation.args, operation.kwargs)) if isinstance(leaf, Use)]
        others = [step.depth for step in uses if step is not before]
        seen = hashlib.blake2b(operation.digest(), digest_size=16)
        seen.update(before.digest if before is not None else b"%d" % output)
        depth = max([0 if before is None else before.depth, *(1 + other for other in others)])
        return cls(operation, before, output, seen.digest(), depth)

    @property
    def first(self) -> "Step":
        step = self
        while step.before is not None:
            step = step.before
        return step


@dataclass(frozen=True)
class Reader:
    """An operation that fills a tensor with a source outside of torch, such as a file, or with a box of it."""

    read: Callable[[Tensor, Any, Box], None]
    """Of a tensor with the size of the box, the source, and the box."""

    def __call__(self, out: Tensor, source: Any) -> None:
        self.read(out, source, all_of(out.shape))


def all_of(size: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, length) for length in size)


@torch.no_grad()
def read_part(step: Step, geometry: Geometry, box: Box, out: Tensor) -> bool:
    """Fill `out` with `box` of the tensor with `geometry`. Returns False, and does nothing, if that is not read."""
    if not geometry.size or read_from(step) != geometry:
        return False
    _fill(step, out, box)
    return True


def moved(out: Tensor, step: Step, geometry: Geometry) -> None:
    """An operation that copies a recorded value to another device."""
    out.copy_(geometry.on(computed(step)))


def reads(step: Step | None) -> bool:
    """Return True where the value after `step` needs a source outside of torch."""
    while step is not None:
        if isinstance(step.operation.function, Reader):
            return True
        found = tree_leaves((step.operation.args, step.operation.kwargs))
        used = [leaf.step if isinstance(leaf, Use) else leaf for leaf in found if isinstance(leaf, Use | Step)]
        if any(reads(other) for other in used if other is not step.before):
            return True
        step = step.before
    return False


def read_from(step: Step) -> Geometry | None:
    """The tensor after `step` if it is read from outside, or stacked or joined of such tensors. None otherwise.

    Experts are so: each is a tensor of a file, and all of them one parameter.
    """
    operation = step.operation
    if operation.function is moved:
        _, inner, geometry = operation.args
        return geometry if read_from(inner) == geometry else None
    if isinstance(operation.function, Reader):
        allocated = step.before is not None and step.before.operation.function in _ALLOCATIONS
        return operation.args[0].geometry if allocated else None
    if operation.function not in MERGES or step.before is not None:
        return None
    uses, dim = _parts(operation)
    parts = [read_from(use.step) for use in uses if isinstance(use, Use)]
    if len(parts) < len(uses) or not all(part == use.geometry for part, use in zip(parts, uses, strict=True)):
        return None
    first = uses[0].geometry
    if any(use.geometry.dtype != first.dtype or not use.geometry.size for use in uses):
        return None
    if operation.function is _STACK:
        return _packed(first.dtype, (len(uses), *first.size)) if dim == 0 else None
    size = list(first.size)
    size[dim] = sum(use.geometry.size[dim] for use in uses)
    return _packed(first.dtype, tuple(size)) if dim % len(size) else None


def _parts(operation: Operation) -> tuple[Sequence[Any], int]:
    """The tensors that `operation` stacks or joins, and the dimension."""
    return operation.args[0], operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)


def _packed(dtype: torch.dtype, size: tuple[int, ...]) -> Geometry:
    return Geometry(dtype, size, torch.empty(size, device="meta").stride(), 0)


def _fill(step: Step, out: Tensor, box: Box) -> None:
    """Fill `out` with `box` of the tensor after a step of `read_from`, without copies of its parts."""
    operation = step.operation
    if operation.function is moved:
        _fill(operation.args[1], out, box)
        return
    if isinstance(operation.function, Reader):
        operation.function.read(out, operation.args[1], box)
        return
    uses, dim = _parts(operation)
    if operation.function is _STACK:
        for use, part in zip(uses[slice(*box[0])], out, strict=True):
            _fill(use.step, part, box[1:])
        return
    dim, begin = dim % len(box), 0
    first, last = box[dim]
    for use in uses:
        end = begin + use.geometry.size[dim]
        low, high = max(first, begin), min(last, end)
        if low < high:
            part = out.narrow(dim, low - first, high - low)
            _fill(use.step, part, (*box[:dim], (low - begin, high - begin), *box[dim + 1 :]))
        begin = end


@torch.no_grad()
def computed(
    step: Step, known: dict[Step, torch.UntypedStorage] | None = None, into: torch.UntypedStorage | None = None
) -> torch.UntypedStorage:
    """Memory with the value after `step`. Random streams stay as they are.

    `known` are values computed on the way, which other operations use too. Memory `into` is used where the first
    operation only allocates, or puts tensors together.
    """
    known = {} if known is None else known
    steps: list[Step] = []
    last: Step | None = step
    while last is not None:
        steps.append(last)
        last = last.before
    storage: torch.UntypedStorage | None = None
    for now in reversed(steps):
        if now.before is None and into is not None and now.operation.function in _ALLOCATIONS:
            storage = into
            continue
        if now.before is None and (merged := read_from(now)) is not None:
            storage = torch.empty(merged.size, dtype=merged.dtype).untyped_storage() if into is None else into
            _fill(now, merged.on(storage), all_of(merged.size))
            continue
        own, changed = storage, now.before

        def tensor_of(use: Use, own: Any = own, changed: Step | None = changed) -> Tensor:
            if own is not None and use.step is changed:
                return use.geometry.on(own)
            if use.step not in known:
                known[use.step] = computed(use.step, known)
            return use.geometry.on(known[use.step])

        result = now.operation.run(tensor_of)
        if storage is None:
            storage = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)][now.output].untyped_storage()
    assert storage is not None
    return storage
