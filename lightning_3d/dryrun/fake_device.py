"""`FakeDevice`: a dispatch mode that sees each operation of a rank: what memory is live, how many FLOPs, which values.

Parameters are `FakeTensor`s (shape, dtype and device, no memory), so whatever is computed from them is fake too. What
is made of nothing but the user's batch stays real, so that masks, positions and seeds have their values; only results
that would be large are fake from the start.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# private to torch, read in 2.13
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.dryrun.fake_cache import QuickFakeMode
from lightning_3d.errors import UnsupportedError

LARGE = 1 << 20
"""Bytes from which what a step makes is not computed."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class FakeDevice(TorchDispatchMode):
    """Counts, and keeps large results from being computed."""

    kind = FakeTensor

    def __init__(self) -> None:
        super().__init__()
        self.fake = QuickFakeMode()
        self.memory = Memory()
        self.flops = 0
        self.thrifty = False
        """Whether large tensors that are made of real ones are fake: in steps, not where data is loaded."""
        self.twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Fake tensors for real ones that met fake ones."""
        self.reads: set[str] = set()
        """Where a step read a value that there is none of."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented  # DTensor and its like come back with the tensors that they consist of
        if _asking():
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0])
        faked = any(issubclass(kind, FakeTensor) for kind in types)
        if faked and func is torch.ops.aten.index.Tensor:
            args = (args[0], [_positions(index) for index in args[1]], *args[2:])
        if faked:
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
        result = self._run(func, types, args, kwargs, faked)
        if (
            isinstance(result, FakeTensor) and result.fake_device.type == "meta"
        ):  # absent here: as it would be otherwise
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        self.memory.add(result)
        if func._overloadpacket in flop_registry:
            self.flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, faked: bool) -> Any:
        if faked:
            try:
                return self.fake.dispatch(func, types, args, kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UnsupportedError(
                    f"{_reader() or 'the step'}: the shape of what {func} gives depends on values, and a dry run has"
                    " shapes only. Nothing is wrong with the job itself, but its memory cannot be known beforehand."
                ) from error
        if not self.thrifty or func.is_view or _writes(func):
            return func(*args, **kwargs)
        if "meta" in str(kwargs.get("device", "")) or any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        try:
            with self.fake:
                guess = func(*args, **kwargs)
        except Exception:  # its shape depends on values (`nonzero`): they are there
            return func(*args, **kwargs)
        if sum(tensor.numel() * tensor.element_size() for tensor in _tensors(guess)) < LARGE:
            return func(*args, **kwargs)
        return guess

    def _all_fake(self, value: Any) -> Any:
        """`value` with fake tensors in place of real ones. torch's own way keeps views, which takes long."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, Tensor):
            if value.is_meta:
                return value
            if value not in self.twins:
                with self.fake:
                    self.twins[value] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            return self.twins[value]
        if isinstance(value, dict):
            return {key: self._all_fake(item) for key, item in value.items()}
        return type(value)(map(self._all_fake, value)) if type(value) in (list, tuple) else value

    def _number(self, tensor: Tensor) -> Any:
        """The value, or 1 (false, for a condition) where there is none."""
        if not isinstance(tensor, FakeTensor):
            return torch.ops.aten._local_scalar_dense.default(tensor)
        reader = _reader() if self.thrifty else None
        if reader is not None:
            self.reads.add(reader)
        return False if tensor.dtype is torch.bool else torch.ones((), dtype=tensor.dtype).tolist()

    def made(self, tensor: Tensor) -> Tensor:
        """A fake tensor like `tensor`, on the CPU."""
        with self.fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Large tensors that are made inside are fake."""
        before, self.thrifty = self.thrifty, True
        try:
            yield
        finally:
            self.thrifty = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside is no work of this rank, nor its memory."""
        flops, self.memory.counting = self.flops, False
        try:
            yield
        finally:
            self.flops, self.memory.counting = flops, True


class Memory:
    """Bytes of the storages that are alive, and the most there have been."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.counting = True
        self._sizes: dict[int, int] = {}
        """By the identity of the storage, which torch keeps for as long as the memory is used."""

    def add(self, value: Any) -> None:
        """Count the storages of the tensors in `value` that are not counted yet."""
        if not self.counting:
            return
        for tensor in _tensors(value):
            if isinstance(tensor, FakeTensor) or not tensor.is_meta:
                storage = tensor.untyped_storage()
                if id(storage) not in self._sizes:
                    self._sizes[id(storage)] = 0
                    self.resize(storage)
                    weakref.finalize(storage, self._forget, id(storage))

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now: FSDP2 frees and takes the memory of whole parameters in this way."""
        if id(storage) in self._sizes:
            size = storage.nbytes()
            self.live += size - self._sizes[id(storage)]
            self._sizes[id(storage)] = size
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def restart(self) -> int:
        """The peak until now; from here on a new one."""
        peak, self.peak = self.peak, self.live
        return peak


def held(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    return sum({id(storage): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}.values())


def _asking() -> bool:
    """Whether DTensor asks, with a fake mode of its own, only for the shape of a result."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _reader() -> str | None:
    """The line that reads a value: the innermost that neither is torch's nor watches calls; None where it is none of
    the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__
        or frame.f_code.co_name == "__torch_function__"
        or _package(frame) == "torch"
    ):
        frame = frame.f_back
    ours = _package(frame) in ("lightning", "lightning_3d", "torchmetrics")
    return None if ours else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _positions(index: Any) -> Any:
    """A real mask as positions: how many there are says the shape of what it selects."""
    real = isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype is torch.bool
    return index.nonzero(as_tuple=True)[0] if real and index.dim() == 1 else index
