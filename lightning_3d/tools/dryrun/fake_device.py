"""`FakeDevice`: a dispatch mode that counts live memory and FLOPs of a rank, and notes which values its step reads.

Parameters are `FakeTensor`s (shape, dtype and device, no memory), so results computed from them are fake too. Results
computed from the user's batch alone stay real, so that masks, positions and seeds have values. Large ones are fake.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lightning_3d.errors import UnsupportedError, module_of, outside
from lightning_3d.module import torch_private
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.sandbox.build_recorder import Recorded
from lightning_3d.sandbox.deferred import Deferred
from lightning_3d.sandbox.recorded_value import Operation, Step
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.sandbox.without_values import ShapesOnly, value_of
from lightning_3d.tools.dryrun.user_collectives import UserCall, user_call

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class FakeDevice(torch_private.TorchDispatchMode):
    """Counts operations, and gives fake results in place of large ones."""

    kind = torch_private.FakeTensor

    def __init__(self) -> None:
        super().__init__()
        self.fake = ShapesOnly(allow_non_fake_inputs=True)
        self.memory = Memory()
        self.flops = 0
        self.thrifty = False
        """True inside steps: large results of real tensors are fake. Loading of data computes them."""
        self.twins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Real tensor -> its fake copy, for operations that mix real and fake tensors."""
        self.reads: set[str] = set()
        """Lines of user code where a step read the value of a fake tensor."""
        self.calls: list[UserCall] = []
        """Collectives of the user's code."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], torch_private.FakeTensor):
            return args[0].fake_device
        if not all(issubclass(kind, torch_private.FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented  # DTensor and other subclasses dispatch again with their inner tensors
        # DTensor computes only the shape of a result, with a fake mode of its own.
        if torch_private.is_faking():
            return func(*args, **kwargs)
        if func.namespace == "c10d" and self.memory.counting and (call := user_call(func, args)) is not None:
            self.calls.append(call)
        if func is torch_private.READ:
            return self._number(args[0])
        faked = any(issubclass(kind, torch_private.FakeTensor) for kind in types)
        if faked and func is torch.ops.aten.index.Tensor:
            args = (args[0], [_positions(index) for index in args[1]], *args[2:])
        if faked:
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
        result = self._run(func, types, args, kwargs, faked)
        # on another stage: plain meta
        if isinstance(result, torch_private.FakeTensor) and result.fake_device.type == "meta":
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        self.memory.add(result)
        if (kind := torch_private.overloads(func)) in flop_registry:
            self.flops += int(flop_registry[kind](*args, **kwargs, out_val=result))
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, faked: bool) -> Any:
        if faked:
            try:
                return self.fake.dispatch(func, types, args, kwargs)
            except torch_private.UNKNOWN as error:
                raise UnsupportedError(
                    f"{_reader() or 'the step'}: the shape of the result of {func} depends on values, and a dry run has"
                    " only shapes. The real job can do this, but its memory cannot be computed without running it."
                ) from error
        if not self.thrifty:
            return func(*args, **kwargs)
        return self.fake.values_of_small(func, types, args, kwargs, self._all_fake)

    def _all_fake(self, value: Any) -> Any:
        """`value` with fake tensors in place of real ones. torch's own conversion keeps views, which is slow."""
        if isinstance(value, torch_private.FakeTensor):
            return value
        if isinstance(value, Tensor):
            if value.is_meta:
                return value
            twin = self.twins.get(value)
            if twin is None or (twin.shape, twin.dtype) != (value.shape, value.dtype):  # its `.data` was assigned
                with self.fake:
                    twin = self.twins[value] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            return twin
        if isinstance(value, dict):
            return {key: self._all_fake(item) for key, item in value.items()}
        return type(value)(map(self._all_fake, value)) if type(value) in (list, tuple) else value

    def _number(self, tensor: Tensor) -> Any:
        """The value; of a fake tensor that of `value_of`."""
        if not isinstance(tensor, torch_private.FakeTensor):
            return torch_private.READ(tensor)
        reader = _reader() if self.thrifty else None
        if reader is not None:
            self.reads.add(reader)
        return value_of(tensor)

    def fake_like(self, tensor: Tensor) -> Tensor:
        with self.fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def step(self) -> Any:
        """Give fake results for large tensors inside, or in a function that this decorates."""
        return replaced_attributes(self, thrifty=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count neither FLOPs nor memory inside: another rank does this work."""
        with replaced_attributes(self, flops=self.flops), replaced_attributes(self.memory, counting=False):
            yield


class DeferredFake(Deferred, torch_private.FakeTensor):  # type: ignore[misc]
    """A fake parameter whose memory does not count until its value is used."""

    plain = torch_private.FakeTensor

    @staticmethod
    def unrecorded(parameter: Tensor) -> Recorded:
        with parameter.fake_mode:  # type: ignore[attr-defined]
            like = torch.empty(parameter.shape, dtype=parameter.dtype)
        made = Operation(torch.ops.aten.empty_like.default, (like,), {}, None, None)
        return Recorded(Step(made, None, 0, b"of shapes", 0), parameter.numel() * parameter.element_size())


class Memory:
    """Bytes of live storages, and their peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.counting = True
        self._sizes: dict[int, int] = {}
        """id(storage) -> bytes. torch keeps the storage object as long as its memory is used."""

    def add(self, value: Any) -> None:
        """Count the storages of tensors in `value` that are not counted yet."""
        if not self.counting:
            return
        for tensor in tensors_in(value):
            if isinstance(tensor, torch_private.FakeTensor) or not tensor.is_meta:
                storage = tensor.untyped_storage()
                if id(storage) not in self._sizes:
                    self._sizes[id(storage)] = 0
                    self.resize(storage)
                    weakref.finalize(storage, self._forget, id(storage))

    def add_unused(self, parameters: Sequence[Tensor]) -> None:
        """Count the memory of deferred parameters from now on, which is none yet."""
        with torch_private.no_subclasses():
            self.add(parameters)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of `storage`: FSDP2 frees and allocates gathered parameters by resizing."""
        if id(storage) in self._sizes:
            size = storage.nbytes()
            self.live += size - self._sizes[id(storage)]
            self._sizes[id(storage)] = size
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def restart(self) -> int:
        """Return the peak, and start a new one."""
        peak, self.peak = self.peak, self.live
        return peak


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    return sum({id(storage): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}.values())


def _reader() -> str | None:
    """The line of user code that reads a value: the innermost one outside of torch. None if it is not user code."""
    frame = outside(sys._getframe(1), "torch.", "lightning_3d.sandbox.interceptor.", f"{__name__}.")
    ours = module_of(frame).startswith(("lightning.", "lightning_3d.", "torchmetrics."))
    return None if ours else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _positions(index: Any) -> Any:
    """A real mask as positions, whose number gives the shape of the selection."""
    real = isinstance(index, Tensor) and not isinstance(index, torch_private.FakeTensor) and index.dtype is torch.bool
    return index.nonzero(as_tuple=True)[0] if real and index.dim() == 1 else index
