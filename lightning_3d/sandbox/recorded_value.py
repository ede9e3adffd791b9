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
from torch.utils._pytree import tree_leaves, tree_map_only

Rows = Sequence[tuple[int, int]]
"""First rows, and the rows after the last."""
_ATEN = torch.ops.aten
_ALLOCATIONS = frozenset(
    [_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default]
)
_STACK = _ATEN.stack.default
_MERGES = frozenset([_STACK, _ATEN.cat.default])


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
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload,no-any-return]

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
        before = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.generator.set_state(before)

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
        """The step that made the memory."""
        step = self
        while step.before is not None:
            step = step.before
        return step


@dataclass(frozen=True)
class RowReader:
    """An operation that fills a tensor with a source outside of torch, such as a file, all rows or some."""

    read: Callable[[Tensor, Any, int, int], None]
    """Of a tensor, its source, the first row and the row after the last."""

    def __call__(self, out: Tensor, source: Any) -> None:
        self.read(out, source, 0, len(out) if out.dim() else 1)


@torch.no_grad()
def read_rows(step: Step, geometry: Geometry, rows: Rows, storage: torch.UntypedStorage) -> bool:
    """Fill only `rows` of the tensor with `geometry` in `storage`. Returns False, and does nothing, if it is not read.

    Memory of other rows is not touched: the system gives none for it.
    """
    if not geometry.size or _read_from(step) != geometry:
        return False
    for first, last in rows:
        _fill(step, geometry.on(storage), first, last)
    return True


def _read_from(step: Step) -> Geometry | None:
    """The tensor after `step` if it is read from outside, or stacked or joined of such tensors. None otherwise.

    Experts are so: each is a tensor of a file, and all of them one parameter.
    """
    operation = step.operation
    if isinstance(operation.function, RowReader):
        allocated = step.before is not None and step.before.operation.function in _ALLOCATIONS
        return operation.args[0].geometry if allocated else None
    if operation.function not in _MERGES or step.before is not None:
        return None
    uses, dim = _parts(operation)
    parts = [_read_from(use.step) for use in uses if isinstance(use, Use)]
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


def _fill(step: Step, out: Tensor, first: int, last: int) -> None:
    """Fill some rows of `out`, the tensor after a step of `_read_from`, without copies of its parts."""
    operation = step.operation
    if isinstance(operation.function, RowReader):
        operation.function.read(out, operation.args[1], first, last)
        return
    uses, dim = _parts(operation)
    if operation.function is _STACK:
        for use, part in zip(uses[first:last], out[first:last], strict=True):
            _fill(use.step, part, 0, len(part))
        return
    for use, part in zip(uses, out.split([use.geometry.size[dim] for use in uses], dim), strict=True):
        _fill(use.step, part, first, last)


@torch.no_grad()
def computed(
    step: Step, known: dict[Step, torch.UntypedStorage] | None = None, into: torch.UntypedStorage | None = None
) -> torch.UntypedStorage:
    """Memory with the value after `step`. Random streams stay as they are.

    Args:
        step: from a recording.
        known: values computed on the way, which other operations use too.
        into: memory of the same size. It is used where the first operation only allocates, or puts tensors together.
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
        if now.before is None and (merged := _read_from(now)) is not None:
            storage = torch.empty(merged.size, dtype=merged.dtype).untyped_storage() if into is None else into
            _fill(now, merged.on(storage), 0, merged.size[0])
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
