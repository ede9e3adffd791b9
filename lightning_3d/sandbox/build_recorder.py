"""Records how parameters get their values, and frees those values until they are used.

Inside of a `Recorder` each operation of torch runs as it would without one, and draws the same random numbers. The
memory of parameters is bounded: a value that was not used for a while is freed, and computed again when it is used.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.module.torch_private import TorchDispatchMode, no_functions, schema, tree_leaves, tree_map_only
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule
from lightning_3d.sandbox.recorded_value import MERGES, Geometry, Operation, Step, Use, computed, read_from

ROOM = 32 * 2**20
"""Bytes of parameters that stay in memory while others are used. A larger one is there alone."""
CONSTANT = 4096
"""Most elements of a tensor from outside that a record copies."""
DEEP = 100
"""Longest way through temporary results that is computed again."""
_ATEN = torch.ops.aten
_OVERWRITES = frozenset(
    [_ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.copy_.default]
)
"""Operations after which nothing is left of the value before, where they write all of it."""
_READS = frozenset({"tolist", "__deepcopy__", "__reduce_ex__", "__repr__", "__format__"})
_EXPORTS = frozenset(
    {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_"}
)
"""Methods that no dispatch mode sees, by name. Through the second kind code outside of torch reads and writes."""


@dataclass(eq=False)
class Recorded:
    """The known facts of some memory."""

    step: Step
    nbytes: int
    in_full: str | None = None
    """Why its value cannot be computed again, and so is never freed."""

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Give `storage` the recorded value, if it was freed."""
        if not storage.nbytes() and self.nbytes:
            storage.resize_(self.nbytes)
            value = computed(self.step, into=storage)
            if value is not storage:
                storage.copy_(value)


class Recorder(TorchDispatchMode):
    """Keep few of the `parameters` in memory while entered. Unless it `records`, writes to them are lost in the end."""

    def __init__(self, *, records: bool) -> None:
        super().__init__()
        self.records = records
        self.known: WeakKeyDictionary[torch.UntypedStorage, Recorded] = WeakKeyDictionary()
        self.here: OrderedDict[torch.UntypedStorage, None] = OrderedDict()
        """Memory of parameters that is not freed, that used last at the end."""
        self._freed = 0
        self._reads = Interceptor(_Reads(self))

    def __enter__(self) -> "Recorder":
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def free_at_need(self, parameter: Tensor) -> None:
        """Let the memory of `parameter` be freed while it is not used."""
        with no_functions():
            storage = memory_of(parameter)
        if storage is not None and storage in self.known:
            self.here[storage] = None

    def read_later(self, tensor: Tensor, read: Callable[[Tensor, Any], None], source: Any) -> None:
        """Free the memory of a new `tensor`. `read(tensor, source)` fills it when it is used."""
        with no_functions():
            memory = memory_of(tensor)
            if memory is not None and memory in self.known:
                recorded = self.known[memory]
                use = Use(recorded.step, Geometry.of(tensor))
                recorded.step = Step.of(Operation(read, (use, source), {}, None, None), recorded.step)
                memory.resize_(0)
            else:  # this thread is not recorded
                read(tensor, source)

    def use(self, tensors: Iterable[Tensor], exported: bool = False) -> list[torch.UntypedStorage]:
        """Fill the memory of `tensors`, and return it."""
        found = [storage for storage in map(memory_of, tensors) if storage is not None]
        for storage in found:
            recorded = self.known.get(storage)
            if recorded is None:
                continue
            if exported:
                self._keep(storage, "code outside of torch reads or writes its memory")
            if not storage.nbytes():
                recorded.fill(storage)
                self.here[storage] = None
            elif storage in self.here:
                self.here.move_to_end(storage)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with no_functions():
            if self.records and (merged := self._merged(func, args, kwargs)) is not None:
                return merged
            if self.records and self._copies_later(func, args):
                return args[0]
            used = self.use(_tensors((args, kwargs)))
            changing = map(memory_of, _written(func, args, kwargs))
            written = [memory for memory in changing if memory is not None and memory in self.known]
            if not self.records:
                result = func(*args, **kwargs)
                for memory in written:
                    self._keep(memory, "it is written to")
            else:
                result = self._record(func, args, kwargs, used, written)
            self._make_room(used)
            return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, used: list[torch.UntypedStorage], written: list[torch.UntypedStorage]
    ) -> Any:
        if func.namespace != "aten":  # a message, or code of another library: to run it again may do anything
            for memory in used:
                if memory in self.known:
                    self._keep(memory, f"{func} uses it")
            return func(*args, **kwargs)
        generator = _generator(func, args, kwargs)
        state = None if generator is None else generator.get_state()
        before = {memory: self._kept_before(func, memory, args) for memory in written}
        frozen = self._frozen(args, kwargs, before) if written else None  # now: the operation changes its arguments
        result = func(*args, **kwargs)
        made = [
            (number, memory)
            for number, memory in enumerate(map(memory_of, _tensors(result)))
            if memory is not None
            and memory not in used
            and memory not in self.known
            and memory.nbytes()
            and memory.device.type != "meta"
        ]
        if not written and not made:
            return result
        frozen = frozen or self._frozen(args, kwargs, {})
        if frozen is None or len(set(written)) > 1:
            for memory in written:
                self._keep(memory, f"{func} gives it a value that was made elsewhere")
            return result
        operation = Operation(func, *frozen, generator, state)
        for memory in written:
            self.known[memory].step = step = Step.of(operation, before[memory])
            if step.depth > DEEP:
                self._keep(memory, "its value comes from a long chain of results")
        for number, memory in made:
            step = Step.of(operation, None, number)
            if step.depth <= DEEP:
                self.known[memory] = Recorded(step, memory.nbytes())
        return result

    def _merged(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The result, without memory, where `func` puts tensors together that are read later. None otherwise."""
        frozen = self._frozen(args, kwargs, {}) if func in MERGES else None
        if frozen is None:
            return None
        step = Step.of(Operation(func, *frozen, None, None), None)
        geometry = read_from(step)
        if geometry is None:
            return None
        result = torch.empty(geometry.size, dtype=geometry.dtype)
        memory = result.untyped_storage()
        self.known[memory] = Recorded(step, memory.nbytes())
        memory.resize_(0)
        return result

    def _copies_later(self, func: Any, args: Any) -> bool:
        """Record that `func` copies a tensor that is read later, and return True; False where it does anything else.

        `load_state_dict` copies so. Run now, it would read each file in full, and again for each shard.
        """
        if func is not _ATEN.copy_.default:
            return False
        to, source = map(memory_of, args[:2])
        there, here = (None if memory is None else self.known.get(memory) for memory in (to, source))
        if to is None or source is None or there is None or here is None or to.device != source.device:
            return False
        if there.in_full or here.in_full:
            return False
        geometry = Geometry.of(args[0])
        alike = Geometry.of(args[1]) == geometry == read_from(here.step)
        if not alike or geometry.offset or math.prod(geometry.size) * geometry.dtype.itemsize != there.nbytes:
            return False
        there.step = here.step
        to.resize_(0)
        self.here.pop(to, None)
        return True

    def _keep(self, memory: torch.UntypedStorage, why: str) -> None:
        recorded = self.known[memory]
        recorded.in_full = recorded.in_full or why

    def _kept_before(self, func: Any, memory: torch.UntypedStorage, args: Any) -> Step:
        """The last value of `memory` that its next value depends on."""
        step = self.known[memory].step
        others = [memory_of(tensor) for tensor in _tensors(args[1:])]
        if func in _OVERWRITES and memory not in others and Geometry.of(args[0]).is_all_of(memory):
            return step.first
        return step

    def _frozen(self, args: Any, kwargs: Any, before: dict[Any, Step]) -> tuple[Any, Any] | None:
        """The arguments with a `Use` for each tensor. None where one has an unknown value."""

        def recorded(tensor: Tensor) -> Any:
            memory = memory_of(tensor)
            found = None if memory is None else self.known.get(memory)
            if found is not None and found.in_full is None:
                return Use(before.get(memory, found.step), Geometry.of(tensor))
            if tensor.is_meta:
                return tensor.detach()
            return tensor.detach().clone() if tensor.numel() <= CONSTANT else None

        uses = [recorded(tensor) for tensor in _tensors((args, kwargs))]
        if any(use is None for use in uses):
            return None
        following = iter(uses)
        return tree_map_only(Tensor, lambda _: next(following), (args, kwargs))

    def _make_room(self, used: list[torch.UntypedStorage]) -> None:
        taken = sum(memory.nbytes() for memory in self.here)
        for memory in list(self.here):
            if taken <= ROOM:
                break
            if memory not in used and self.known[memory].in_full is None:
                taken -= memory.nbytes()
                self._freed += memory.nbytes()
                memory.resize_(0)
                del self.here[memory]
        if self._freed > ROOM // 2:
            self._freed = 0
            return_freed_memory()


class _Reads(Rule):
    """Fill memory for methods that read it in other ways than by operations."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def before(self, call: Call) -> Call:
        if call.name in _READS or call.name in _EXPORTS:
            with no_functions():
                self.recorder.use(call.tensors(), exported=call.name in _EXPORTS)
        return call


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of `tensor`. None where it has none of its own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a batched tensor of vmap
        return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that `func` changes, by its schema."""
    found = []
    for position, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _generator(func: Any, args: Any, kwargs: Any) -> torch.Generator | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
    if given is not None:
        return given
    tensors = _tensors((args, kwargs))
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
