"""Parameters without memory, whose values are computed when they are used.

A large module is built under `deferring`. Afterwards most of its parameters are `Deferred`: they have all but memory.
`realize` gives a parameter its memory and its value, the same bits that it would have had. So a rank can compute one
parameter, keep its shard, and go on with the next. `computed_on_use` computes a few at a time for a run of the module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.module.torch_private import is_memory_shared, no_functions, no_subclasses, tree_leaves
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.build_recorder import Recorded, Recorder, memory_of
from lightning_3d.sandbox.interceptor import assigns_data
from lightning_3d.sandbox.recorded_value import (
    Box,
    Geometry,
    Operation,
    Step,
    Use,
    all_of,
    computed,
    moved,
    read_part,
    reads,
)
from lightning_3d.sandbox.without_values import WithoutValues

PERIOD = 65521
"""Numbers that are drawn for a matrix, which repeats them. A prime, so that no two rows or experts are equal."""


def stand_in(matrix: Tensor, recorded: Recorded) -> Step:
    """Random numbers for the memory of `matrix`: the same where the recorded value is the same, also on other ranks."""
    count = recorded.nbytes // matrix.element_size()
    like = {"dtype": matrix.dtype, "device": matrix.device}
    made = Step.of(Operation(torch.ops.aten.empty_strided.default, ((count,), (1,)), like, None, None), None)
    memory = Use(made, Geometry(matrix.dtype, (count,), (1,), 0))
    scale = max(matrix.shape[1:]) ** -0.5
    return Step.of(Operation(_draw, (memory, scale, recorded.step.digest), {}, None, None), made)


def _draw(out: Tensor, scale: float, seed: bytes) -> None:
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    numbers = torch.randn(PERIOD, generator=generator).mul_(scale).to(out.device, out.dtype)
    whole = len(out) - len(out) % PERIOD
    out[:whole].view(-1, PERIOD).copy_(numbers)
    out[whole:].copy_(numbers[: len(out) - whole])


SMALL = 2**16
"""Bytes of a parameter that is not worth a record."""
RECORDED = "lightning_3d_recorded"
"""Attribute of a deferred parameter: what its value is computed from."""
Interval = tuple[int, int]
"""First index, and the one after the last."""


_NEW_TENSORS = {
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
}  # fmt: skip


class Deferred(WithoutValues, nn.Parameter):
    """A parameter whose memory is freed. The first function that needs its value makes it an `nn.Parameter` again."""

    lightning_3d_recorded: Recorded
    plain: ClassVar[type] = nn.Parameter

    @staticmethod
    def unrecorded(parameter: Tensor) -> Recorded | None:
        """A record for a `plain` parameter whose operations were not recorded. None where its value matters."""
        return None

    @classmethod
    def use_values(cls, func: Any, args: Any, kwargs: Any) -> None:
        if func not in _NEW_TENSORS and not _changes_nothing(func, args, kwargs):
            realize(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Deferred))

    def __deepcopy__(self, memo: Any) -> Any:
        realize([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        realize([self])
        return self.__reduce_ex__(protocol)


KINDS: dict[type, type[Deferred]] = {nn.Parameter: Deferred}
"""Class of a parameter -> its class while it is deferred. A dry run adds that of its parameters."""


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for the calls of `module.to(device)` where the parameter is there already."""
    if assigns_data(func):
        return args[0] is args[1]
    if func is not Tensor.to or not isinstance(args[0], Deferred):
        return False
    with no_subclasses():
        like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return like.to(*args[1:], **kwargs) is like


@dataclass
class Built:
    """The parameters of modules that were built under `deferring`."""

    deferred: list[nn.Parameter] = field(default_factory=list)
    in_full: list[tuple[nn.Parameter, str]] = field(default_factory=list)
    """Parameters that need memory from the start, each with the reason."""


@contextmanager
def deferring(around: Callable[[Recorder], AbstractContextManager[None]] | None = None) -> Iterator[Built]:
    """Build modules inside. At the end the large parameters that they register are `Deferred`.

    Values and random streams are those of a module that is built without it.
    """
    built, recorder = Built(), Recorder(records=True)
    registered: dict[int, nn.Parameter] = {}

    def register(module: nn.Module, name: str, parameter: Any) -> None:
        if type(parameter) in KINDS and not parameter.is_meta and parameter.nbytes >= SMALL:
            registered[id(parameter)] = parameter
            recorder.free_at_need(parameter)

    def register_all(module: nn.Module, name: str, child: Any) -> None:
        for inner, parameter in child.named_parameters() if child is not None else ():  # a deep copy registers nothing
            register(child, inner, parameter)

    parameters = register_module_parameter_registration_hook(register)
    modules = register_module_module_registration_hook(register_all)
    try:
        with parameters, modules, recorder, nullcontext() if around is None else around(recorder):
            yield built
    except BaseException:
        for memory, recorded in recorder.known.items():
            recorded.fill(memory)
        raise
    _defer(list(registered.values()), recorder, built)
    return_freed_memory()


def _defer(parameters: list[nn.Parameter], recorder: Recorder, built: Built) -> None:
    memories = [memory_of(parameter) for parameter in parameters]
    users = Counter(memories)
    free: set[torch.UntypedStorage] = set()
    recorder.here.clear()
    for parameter, memory in zip(parameters, memories, strict=True):
        if memory is None:
            continue
        recorded = recorder.known.get(memory) or KINDS[type(parameter)].unrecorded(parameter)
        if recorded is None:
            why = "its memory was filled outside of the context"
        elif users[memory] > 1 or is_memory_shared(memory):
            why = "another tensor uses its memory"
        else:
            why = recorded.in_full or ""
        if recorded is None or why:
            if recorded is not None:
                recorded.fill(memory)
            built.in_full.append((parameter, why))
        else:
            defer(parameter, recorded)
            built.deferred.append(parameter)
            free.add(memory)
    for memory, recorded in list(recorder.known.items()):
        if memory not in free:  # a buffer, or what the user has besides the module
            recorded.fill(memory)


def defer(parameter: nn.Parameter, recorded: Recorded) -> None:
    """Free the memory of `parameter`, whose value is `recorded`."""
    parameter.untyped_storage().resize_(0)
    KINDS[type(parameter)].hide(parameter)
    parameter.lightning_3d_recorded = recorded  # type: ignore[attr-defined]


def leave_on_host(parameter: nn.Parameter, device: torch.device) -> None:
    """Keep the value of `parameter` where it is, until it is realized on `device`."""
    value = parameter.data
    move = Operation(_moved, (value, device), {}, None, None)
    parameter.data = torch.empty_like(value, device=device)
    nbytes = parameter.untyped_storage().nbytes()
    defer(parameter, Recorded(Step(move, None, 0, b"equal on all ranks", 0), nbytes))


def read_later(parameter: nn.Parameter, read: Callable[[Tensor, Any], None], source: Any, device: torch.device) -> None:
    """Let `parameter` get its value on `device` by `read(parameter, source)`, each time that the value is used."""
    if isinstance(parameter, Deferred):
        _plain(parameter)
    parameter.data = torch.empty_like(parameter.data, device=device)
    made, memory = _made(parameter.data)
    step = Step.of(Operation(read, (memory, source), {}, None, None), made)
    defer(parameter, Recorded(step, parameter.data.untyped_storage().nbytes()))


def _made(tensor: Tensor) -> tuple[Step, Use]:
    options = {"dtype": tensor.dtype, "device": tensor.device}
    allocation = Operation(torch.ops.aten.empty_strided.default, (tensor.shape, tensor.stride()), options, None, None)
    made = Step.of(allocation, None)
    return made, Use(made, Geometry.of(tensor))


def move_later(parameter: Deferred, device: torch.device) -> None:
    """Let `parameter` get its value on `device`."""
    recorded, geometry = _plain(parameter), Geometry.of(parameter.data)
    parameter.data = torch.empty_like(parameter.data, device=device)
    made, use = _made(parameter.data)
    operation = Operation(moved, (use, recorded.step, geometry), {}, None, None)
    step = Step(operation, made, 0, recorded.step.digest, 0)
    defer(parameter, Recorded(step, parameter.data.untyped_storage().nbytes()))


@dataclass(frozen=True)
class Cut:
    """The value of a shard: intervals of a recorded value along one dimension."""

    step: Step
    geometry: Geometry
    dim: int
    intervals: Sequence[tuple[Interval, Interval]]
    """Each in the full value and in the shard."""
    nbytes: int

    def fill(self, shard: Tensor, rows: Interval | None) -> None:
        """Give `shard` its memory and its value, or of a value that is read the `rows` that are needed."""
        shard.untyped_storage().resize_(self.nbytes)
        full: Tensor | None = None
        for there, here in self.intervals:
            mine = [*all_of(shard.shape)]
            mine[self.dim] = here
            mine[0] = _overlap(mine[0], rows or mine[0])
            box = list(mine)
            shift = there[0] - here[0]
            box[self.dim] = mine[self.dim][0] + shift, mine[self.dim][1] + shift
            out = shard[tuple(slice(*each) for each in mine)]
            if out.numel() and not read_part(self.step, self.geometry, tuple(box), out):
                full = self.geometry.on(computed(self.step)) if full is None else full
                out.copy_(full[tuple(slice(*each) for each in box)])


def _overlap(one: Interval, other: Interval) -> Interval:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def cut_later(full: Deferred, dim: int, intervals: Sequence[tuple[Interval, Interval]], shard: nn.Parameter) -> None:
    """Free the memory of `shard`. Once it is realized, it gets `intervals` of the value of `full` along `dim`.

    `full` itself has no value any more.
    """
    recorded, memory = _plain(full), local(shard).untyped_storage()
    shard.__dict__[RECORDED] = Cut(recorded.step, Geometry.of(full.data), dim, intervals, memory.nbytes())
    memory.resize_(0)
    empty(full)


def alone_in_memory(parameter: nn.Parameter) -> bool:
    """Return True where no other tensor uses the memory of `parameter`."""
    with no_functions():
        memory = memory_of(parameter)
    return memory is not None and not is_memory_shared(memory)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, copy=True)


@torch.no_grad()
def realize(parameters: Iterable[Tensor], rows: Callable[[Tensor], Interval | None] = lambda parameter: None) -> None:
    """Give the deferred ones among `parameters`, and shards of such, their memory and their values.

    Where these are read from a file, other `rows` than the needed ones get none, and no memory.
    """
    for parameter in parameters:
        if isinstance(parameter, Deferred):
            recorded = _plain(parameter)
            some = rows(parameter)
            if some is not None and _fill_rows(parameter, recorded, some):
                continue
            recorded.fill(parameter.untyped_storage())
        elif (cut := parameter.__dict__.pop(RECORDED, None)) is not None:
            cut.fill(local(parameter), rows(parameter))
            return_freed_memory()  # at once: full weights of all would be the peak of set-up


def _fill_rows(parameter: Tensor, recorded: Recorded, rows: Interval) -> bool:
    geometry, storage = Geometry.of(parameter.data), parameter.untyped_storage()
    storage.resize_(recorded.nbytes)
    box: Box = (rows, *all_of(geometry.size[1:]))
    if geometry.is_all_of(storage) and read_part(recorded.step, geometry, box, parameter.data[slice(*rows)]):
        return True
    storage.resize_(0)
    return False


def empty(parameter: nn.Parameter) -> None:
    """Free the memory of `parameter`, whose value is not needed any more, but not the object."""
    if isinstance(parameter, Deferred):
        _plain(parameter)
    parameter.data = parameter.data.new_empty(0)


def _plain(parameter: Deferred) -> Recorded:
    recorded: Recorded = parameter.__dict__.pop(RECORDED)
    parameter.show()
    return recorded


def is_deferred(module: nn.Module) -> bool:
    """Return True for a module of which some parameters are deferred."""
    return any(isinstance(parameter, Deferred) for parameter in module.parameters())


@contextmanager
def computed_on_use(module: nn.Module) -> Iterator[None]:
    """Let the code inside use `module` as if its deferred parameters were there. A few are, at any time.

    What the code writes to them is undone. A matrix of a file has random numbers instead, on every rank the same: such
    runs learn what the module does and compare one way of computing with another. Each of them would read all files.
    """
    deferred = [parameter for parameter in module.parameters() if isinstance(parameter, Deferred)]
    if not deferred:
        yield
        return
    recorder = Recorder(records=False)
    values = [_plain(parameter) for parameter in deferred]
    for parameter, recorded in zip(deferred, values, strict=True):
        drawn = parameter.dim() > 1 and parameter.is_floating_point() and reads(recorded.step)
        step = stand_in(parameter.data, recorded) if drawn else recorded.step
        recorder.known[parameter.untyped_storage()] = Recorded(step, recorded.nbytes)
    try:
        with recorder:
            yield
    finally:
        recorder.here.clear()
        for parameter, recorded in zip(deferred, values, strict=True):
            defer(parameter, recorded)
        return_freed_memory()
