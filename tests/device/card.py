"""A device of torch's own kind whose memory is the host's: `torch.device("card")`, for processes that `register` it.

A tensor on it has a storage of that device over host memory. Each operation runs the CPU's kernel on the same memory,
and refuses host tensors among its arguments as CUDA does. New memory holds NaN. Reads back to the host are counted, or
refused. `streams` has what runs later, `groups` the messages. Random numbers come from the host's generator, and the
backward runs in the thread that autograd has for a device.

Torch's registration of a backend in Python knows one device of a kind, so each process has one card, as where a
launcher shows a process its own device only.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tests.device import autocast, order, replaced, streams, waits
from tests.device.streams import NAME

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
_kept: list[Any] = []
"""Libraries of kernels: they end with their objects."""


def register() -> None:
    """Let this process have the card. Torch can neither undo it nor have a second device of its own kind."""
    if _kept:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from tests.device import groups

    module = Module()
    _setup_privateuseone_for_python_backend(NAME, module)
    _kept.extend([module, *_libraries(), autocast.register()])
    replaced.register()
    groups.register()


def _libraries() -> list[torch.library.Library]:
    """A kernel for each operation that the CPU has one for, and one for others.

    Torch does not find the latter while a dispatch mode is on.
    """
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(_kernel, "PrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in [*torch._C._dispatch_get_registrations_for_dispatch_key("CPU"), "aten::_copy_from"]:
        package, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if package == "aten" and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1"):
            op = getattr(getattr(_aten, packet), overload or "default")
            aten.m.impl(name, "PrivateUse1", partial(_kernel, op), False)
    aten.m.impl("_to_copy", "PrivateUse1", _to_copy, False)  # torch's own asks C++ for pinned memory
    return [others, aten]


class Module:
    """`torch.card`, with what `torch.cuda` has."""

    Stream, Event = streams.Stream, streams.Event
    current_stream, stream, synchronize = map(staticmethod, (streams.current, streams.using, streams.synchronize))

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(device).index in (None, 0)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The host's generator is the card's."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """The bytes of one storage, from its beginning to its end."""

    allocated = peak = 0

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host, self.capacity, self.size = host, host.nbytes(), 0
        self.resize(self.capacity)

    def resize(self, size: int) -> None:
        assert size <= self.capacity, f"a storage of {self.capacity} bytes cannot grow to {size}"
        if size and not self.size:  # CUDA takes it anew
            self.uses = order.Uses(streams.current().clock.begin())
        Memory.allocated += size - self.size
        Memory.peak, self.size = max(Memory.peak, Memory.allocated), size

    def __del__(self) -> None:
        Memory.allocated -= self.size


def reset_peak() -> None:
    Memory.peak = Memory.allocated


def spoil(host: Tensor) -> None:
    """Write what nobody can take for a result."""
    if host.is_floating_point() or host.is_complex():
        host.fill_(float("nan"))


def on_card(host: Tensor) -> Tensor:
    """A tensor of the card on the memory of `host`, which nobody else uses."""
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), memory.nbytes())
    storage.memory = Memory(memory)
    return _set(torch._C._acc.create_empty_tensor(tuple(host.shape), host.dtype), storage, host)


def _set(tensor: Tensor, storage: Any, like: Tensor) -> Tensor:
    place = like.storage_offset(), list(like.shape), list(like.stride())
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, *place)


def on_host(tensor: Tensor) -> Tensor:
    """A tensor of the host on the memory of one of the card. It keeps the memory alive."""
    storage: Any = tensor.untyped_storage()
    memory = getattr(storage, "memory", None)
    if memory is None:  # torch writes files from a storage of its own on the same memory
        host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    elif memory.capacity:
        host = memory.host
    else:
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # an operation may make it larger
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_ours(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def use(value: Any, clock: order.Clock, writes: bool, what: str) -> None:
    """Check that the stream of `clock` may use what `value` has of the card, and note it."""
    for tensor in value if isinstance(value, list | tuple) else [value]:
        memory = getattr(tensor.untyped_storage(), "memory", None) if is_ours(tensor) else None
        if memory is not None and memory.size:
            memory.uses.add(clock, writes, what)


# ---- kernels ---------------------------------------------------------------------------------------------------------

_READS = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2",
    "_unique", "unique_consecutive", "bincount", "repeat_interleave", "histc",
}  # fmt: skip
"""Operations that read a number or a size, for which the host waits."""
_PLACED_ELSEWHERE = {"index", "_index_put_impl_", "index_put", "index_put_"}
"""Operations whose indices may be on the host."""


@cache
def _changes_places(op: Any) -> bool:
    """True for a view, and for what gives a tensor other memory."""
    returns = op._schema.returns
    views = [each.alias_info is not None and not each.alias_info.is_write for each in returns]
    return bool(views and all(views)) or op._schema.name in ("aten::set_", "aten::record_stream")


@cache
def _only_writes(op: Any) -> bool:
    """True where all results are arguments that were written to."""
    return all(each.alias_info is not None and each.alias_info.is_write for each in op._schema.returns)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    name, stream = op._schema.name.removeprefix("aten::"), streams.current()
    if _changes_places(op):
        return op.redispatch(_CPU, *args, **kwargs)
    if name in ("_copy_from", "copy_"):
        return _copy(*(args if name == "_copy_from" else (args[1], args[0], *args[2:])), **kwargs)
    call = _Call(op, name)
    host_args, host_kwargs = call.convert(args), {key: call.convert(value) for key, value in kwargs.items()}
    wanted = (str(each.type) == "Tensor" for each in op._schema.arguments)  # a number may come in the place of one
    host_args = [
        torch.tensor(a) if w and isinstance(a, int | float) else a for a, w in zip(host_args, wanted, strict=False)
    ]
    if call.stray is not None and (call.ours or "out" in kwargs):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} has one on {NAME}:0 and one of shape"
            f" {tuple(call.stray.shape)} on cpu"
        )
    if name in _READS or (name in _PLACED_ELSEWHERE and _by_mask(args)):
        waits.note(name)
        stream.finish()
    _use(op, name, args, kwargs, stream.clock.begin())
    if stream.is_late:
        if _only_writes(op) and all(host.numel() for host, _ in call.ours.values()):  # an empty one grows
            stream.put(lambda: op(*host_args, **host_kwargs))
            return _written(op, args, kwargs)
        stream.finish()  # a result's shape depends on what is under way
    result = call.result(op(*host_args, **host_kwargs))
    if name.startswith(("empty", "new_empty")):
        spoil(on_host(result))
    return result


def _use(op: Any, name: str, args: Any, kwargs: Any, clock: order.Clock) -> None:
    written = _written_to(op)
    for key, value in [*enumerate(args), *kwargs.items()]:
        use(value, clock, key in written, name)


@cache
def _written_to(op: Any) -> set[int | str]:
    """Positions and names of the arguments that an operation writes to."""
    each = enumerate(op._schema.arguments)
    writes = [(at, one.name) for at, one in each if one.alias_info is not None and one.alias_info.is_write]
    return {key for pair in writes for key in pair}


def _by_mask(args: Any) -> bool:
    masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (len(args) == 2 or args[2].numel() != 1)


class _Call:
    """The arguments and results of one operation, here and on the host."""

    def __init__(self, op: Any, name: str) -> None:
        self.op, self.name = op, name
        self.ours: dict[int, tuple[Tensor, Tensor]] = {}
        """The id of each argument on the host: it, and the argument."""
        self.stray: Tensor | None = None

    def convert(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._host(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.convert, value))
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def _host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == NAME:
            host = on_host(tensor)
            self.ours[id(host)] = host, tensor
            return host
        if tensor.dim() and self.name not in _PLACED_ELSEWHERE:
            self.stray = tensor
        return tensor

    def result(self, value: Any) -> Any:
        for host, tensor in self.ours.values():
            if host.shape != tensor.shape or host.stride() != tensor.stride():
                self._resized(host, tensor)
        return self._card(value)

    def _card(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._card, value))
        if not isinstance(value, Tensor):
            return value
        known = self.ours.get(id(value))
        return on_card(value) if known is None else known[1]

    def _resized(self, host: Tensor, tensor: Tensor) -> None:
        """Give `tensor` the place and the shape that an operation gave to its memory on the host."""
        same = host.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and host.numel()
        _set(tensor, tensor.untyped_storage() if same else on_card(host).untyped_storage(), host)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    here, there = (on_host(each) if is_ours(each) else each for each in (source, target))
    stream = streams.current()
    clock = stream.clock.begin()
    use(source, clock, False, "copy_")
    use(target, clock, True, "copy_")
    if source.device != target.device and not non_blocking:
        waits.note(f"copy from {source.device} to {target.device}")
        stream.finish()
    elif stream.is_late or (streams.DELAYS and not is_ours(target)):
        taken = here if stream.is_late else here.clone()  # the first stream has it now, the host later
        stream.put(lambda: there.copy_(taken))
        return target
    elif not is_ours(source):
        stream.catch_up()
        if source.is_pinned():
            order.send(source, clock)
    there.copy_(here)
    return target


def _to_copy(
    tensor: Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> Tensor:
    copy = torch.empty_like(on_host(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if device is None or device.type == NAME:
        copy = on_card(copy)
    elif non_blocking:
        copy.untyped_storage().pinned = True  # as CUDA's
    return _copy(tensor, copy, non_blocking)


def _written(op: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operation returns because it wrote to them."""
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    by_alias = {
        frozenset(argument.alias_info.before_set): given[argument.name]
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.name in given
    }
    results = [by_alias[frozenset(each.alias_info.before_set)] for each in op._schema.returns]
    return (results[0] if len(results) == 1 else tuple(results)) if results else None
