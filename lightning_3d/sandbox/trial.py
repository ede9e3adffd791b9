"""Trials: runs of the user's code ahead of training, whose effects are undone."""

import copy
import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import WritesError
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.module.torch_private import own_buffers, restored_hooks, uncompiled, version_of
from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks import random_streams
from lightning_3d.ranks.random_streams import Generator, is_generator, restored_states, state_of
from lightning_3d.ranks.users_group_private import alone
from lightning_3d.sandbox.interceptor import LIBRARIES, is_users
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import Copies, is_plain, isolated_buffers, on_copies, own
from lightning_3d.sandbox.writes import writes_undone


@contextmanager
def trial(module: Any, *, gradients: bool, logs: bool = True) -> Iterator[Record]:
    """Run the user's code and undo every effect; yields the record of what it logs.

    Restored are random streams, weights and which of them train, buffers, gradients and hooks of modules. So are plain
    attributes and random generators of modules and of the user's own objects. The user's messages reach no other rank.

    Args:
        gradients: True for a forward with a graph; else the code runs under `no_grad`.
        logs: record what is logged, printed and given to metrics. False where the code inside records by itself:
            metrics are cloned when a recorder is first used, and a clone must not have the methods of another one.
    """
    record = Record()
    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(undone_effects(module))
        data = getattr(trainer_of(module), "datamodule", None)  # the step's hooks of a batch are the datamodule's too
        stack.enter_context(_undone_attributes([] if data is None else [data], Copies(_MANY)))
        stack.enter_context(restored_hooks(module))
        stack.enter_context(optimizers_on_demand(module))
        stack.enter_context(uncompiled(module))  # the next one intercepts operations
        stack.enter_context(writes_undone(module))
        for each in module.parameters():
            stack.callback(each.requires_grad_, each.requires_grad)
        if logs:
            stack.enter_context(LogRecorder(module).recording(record, own_metrics=True))
        if gradients:
            stack.enter_context(saved_gradients(list(module.parameters())))
        stack.enter_context(torch.set_grad_enabled(gradients))
        yield record


def kept_outside(what: str) -> WritesError:
    """The error where `what` a trial gives is not what the one before gave: the run would start with other values."""
    return WritesError(
        f"{what} in another run on that batch. It keeps state where a run ahead of training cannot put it back (an"
        " iterator, a generator, a callback, an object of a library), or draws from a random generator there. Training"
        " would start from what that run left, with other numbers than on one device. Keep the state as a number or"
        " tensor in an attribute of the module or datamodule, read a second stream of samples by a CombinedLoader, or"
        " draw from torch's default generator."
    )


@contextmanager
def saved_gradients(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let backwards inside begin with no `.grad`; put back the gradients from before."""
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in zip(tensors, before, strict=True):
            tensor.grad = grad


@contextmanager
def undone_effects(module: nn.Module, without: tuple[str, ...] = (), copies: Copies | None = None) -> Iterator[None]:
    """Put back random streams, buffers and plain attributes that code of `module` changes, also of the user's objects.

    Tensors too: a later stage would take a result that a block leaves on itself for the result of its own step. Modules
    whose names begin with one of `without` do not run. `copies` by default leaves out large tensors.
    """
    parts = [part for name, part in module.named_modules() if not name.startswith(without)]
    owners = module.named_modules(remove_duplicate=False)  # a buffer that is None may be filled
    buffers = ((f"{name}.{leaf}".lstrip("."), it) for name, each in owners for leaf, it in own_buffers(each).items())
    names = [name for name, it in buffers if not ((it is not None and it.is_meta) or name.startswith(without))]
    with ExitStack() as stack:
        stack.enter_context(random_streams.restored_streams())
        stack.enter_context(_undone_attributes(parts, copies or Copies()))
        stack.enter_context(isolated_buffers(module, names))
        stack.callback(_forget_new_buffers, [(each, set(own_buffers(each))) for each in parts])
        yield


@contextmanager
def _undone_attributes(owners: Sequence[Any], copies: Copies) -> Iterator[None]:
    """Put back what code changes in `owners`, in the user's objects that they hold, in their classes and files."""
    found = list(holders(owners))
    with restored_globals(found) as stack:
        for holder in found:
            stack.enter_context(on_copies(holder, copies))
        yield


def _forget_new_buffers(known: Sequence[tuple[nn.Module, set[str]]]) -> None:
    """Remove buffers that a step has registered: code that does so at its first call would not do it again."""
    for owner, names in known:
        for name in own_buffers(owner).keys() - names:
            delattr(owner, name)


_SHARED = (list, dict, set, deque, Counter, defaultdict)
_LONG = 10_000
"""Entries of a container of a class or a file beyond which it is data, which is not put back."""


def restored_globals(modules: Iterable[Any], tensors: Iterable[Tensor] = ()) -> ExitStack:
    """Put back `tensors`, random generators, and numbers, tensors and containers of the user's classes and files.

    What stands for an effect stays: names and objects that were registered, a flag that became True, and what was made
    beside one. The flag of a function or a dict is put back with the number beside it.
    """
    modules = list(modules)
    spaces = [(space, dict(vars(space))) for space in shared_spaces(modules)]
    kept = [value for space, _ in spaces for value in kept_by(space).values()]
    copies = [(value, copy.copy(value)) for value in kept if type(value) in _SHARED and len(value) <= _LONG]
    tensors = [*tensors, *(each for each in kept if isinstance(each, Tensor))]
    tensors = [each for each in tensors if not (each.is_meta or each.is_inference())]
    written = [(each, version_of(each), Copies().of(each)) for each in tensors]

    def undo() -> None:
        for value, before in copies:
            _refill(value, before)
        with torch.no_grad():
            for value, version, before in written:
                if version_of(value) != version:
                    value.copy_(before)
        for space, known in spaces:
            now = {name: value for name, value in own(space).items() if value is not known.get(name)}
            flags = {name for name, value in now.items() if value is True}
            numbers = {name for name in now.keys() - flags if isinstance(now[name], int | float | Tensor)}
            earlier = {name for name in numbers if isinstance(known.get(name), int | float)}
            back = earlier if flags else numbers
            if earlier and isinstance(space, _Variables):
                back = back | flags  # else a number of the first call would not be made again
            for name in back:
                setattr(space, name, known[name]) if name in known else delattr(space, name)

    stack = ExitStack()
    stack.callback(undo)
    stack.enter_context(restored_states(own_states(modules)))
    return stack


def shared_spaces(modules: Iterable[nn.Module]) -> list[Any]:
    """The user's classes of modules, the files of these classes, and the variables of functions that all these have."""
    modules = list(modules)
    kinds = {base for each in modules for base in type(each).__mro__ if is_users(base) and not _is_standard(base)}
    files = [sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    waiting = [item for each in (*modules, *kinds, *files) for item in own(each).values()]
    found: dict[int, _Variables] = {}
    while waiting:
        code = waiting.pop()
        if type(code) is FunctionType and id(code) not in found and is_users(code):
            found[id(code)] = _Variables(code)
            waiting += vars(found[id(code)]).values()
    return [*kinds, *files, *found.values()]


class _Variables:
    """The variables that a function has from the code around it, its defaults and attributes, as those of an object."""

    __slots__ = ("function",)
    function: Any

    def __init__(self, function: FunctionType) -> None:
        object.__setattr__(self, "function", function)

    @property
    def __name__(self) -> str:
        return str(self.function.__qualname__)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        code, values = self.function.__code__, self.function.__defaults__ or ()
        named = zip(code.co_varnames[code.co_argcount - len(values) :], values, strict=False)
        filled = {name: cell.cell_contents for name, cell in self._cells().items() if cell != CellType()}
        return {**dict(named), **(self.function.__kwdefaults__ or {}), **vars(self.function), **filled}

    def _cells(self) -> dict[str, CellType]:
        return dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))

    def _place(self, name: str) -> tuple[Any, str]:
        """The object that has `name`, and its attribute."""
        cell = self._cells().get(name)
        return (self.function, name) if cell is None else (cell, "cell_contents")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(*self._place(name), value)

    def __delattr__(self, name: str) -> None:
        delattr(*self._place(name))


def kept_by(space: Any) -> dict[str, Any]:
    """Numbers, tensors and containers of a class or a file. Containers of another class may do more when copied."""
    return {
        name: value
        for name, value in _of_space(space).items()
        if type(value) in _SHARED or isinstance(value, int | float | Tensor)
    }


def _of_space(space: Any) -> dict[str, Any]:
    """Values of a class or a file, but for proxies: flask's raise where code asks for the class behind them."""
    return {
        name: value
        for name, value in own(space).items()
        if not any("__class__" in vars(kind) for kind in type(value).__mro__[:-1])
    }


def _refill(container: Any, before: Any) -> None:
    """Give a container the entries of `before`, in their order. Objects in a dict, such as groups of ranks, stay."""
    if isinstance(container, dict):
        now = dict(container)
        changed = {key for key, item in now.items() if before.get(key, before) is not item and _is_result(item)}
        if changed & before.keys():
            changed |= {key for key in before if now.get(key) is True}  # the flag of a number that is made once
        if changed or before.keys() - now.keys():
            kept = {key: item if key in changed else now.get(key, item) for key, item in before.items()}
            news = {key: item for key, item in now.items() if key not in kept and key not in changed}
            container.clear()
            dict.update(container, {**kept, **news})  # that of a Counter adds
        return
    known = {id(item) for item in before}
    if [*map(id, container)] != [*map(id, before)] and all(_is_result(x) for x in container if id(x) not in known):
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _is_result(value: Any) -> bool:
    return is_plain(value) and not isinstance(value, str) and value is not True


_MANY = 100
"""Entries of a container beyond which it is data, in which no objects are looked for."""


def holders(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The modules, and the objects of the user's classes that are reached from their attributes."""
    visited = set[int]()
    waiting: list[Any] = list(modules)
    while waiting:
        holder = waiting.pop()
        if id(holder) not in visited:
            visited.add(id(holder))
            yield holder
            waiting += [item for value in own(holder).values() for item in entries_of(value) if _is_users_object(item)]


def put_back(owner: Any) -> Callable[[], None]:
    """A function that gives `owner`, its class and the user's objects in it the attributes and states of now.

    Containers and tensors get their values back, and stay the same objects.
    """
    found = list(holders([owner]))
    attributes = [(each, own(each)) for each in found]
    values = [item for _, before in attributes for item in before.values()]
    copies = [(each, copy.copy(each)) for value in values for each in _containers_in(value)]
    tensors = [each for each in values if isinstance(each, Tensor)]
    rest = restored_globals(found, [*tensors, *(owner.buffers() if isinstance(owner, nn.Module) else ())])

    def undo() -> None:
        rest.close()
        for each, before in attributes:
            for name in own(each).keys() - before.keys():
                del vars(each)[name]
            vars(each).update(before)
        for container, entries in copies:
            container.clear()
            container.extend(entries) if isinstance(container, list | deque) else container.update(entries)

    return undo


def _containers_in(value: Any) -> Iterator[Any]:
    if type(value) in _SHARED and len(value) <= _LONG:
        yield value
        inner = value.values() if isinstance(value, dict) else value
        for item in inner if len(value) <= _MANY else ():
            yield from _containers_in(item)


def own_states(found: Iterable[Any]) -> dict[Generator, Any]:
    """The states of random generators of `found` (modules, the user's objects), their classes, and files of these."""
    spaces = shared_spaces(found := list(found))
    spaces += [sys.modules[name] for name in _files_named_in(spaces) if name in sys.modules]
    values = [item for holder in found for value in own(holder).values() for item in entries_of(value)]
    values += [value for space in spaces for value in _of_space(space).values()]
    return {item: state_of(item) for item in values if is_generator(item)}


def _files_named_in(spaces: Iterable[Any]) -> set[str]:
    """The users' files whose code these classes and files use."""
    kinds = (ModuleType, FunctionType, type)
    code = [value for space in spaces for value in _of_space(space).values() if isinstance(value, kinds)]
    names = {str(each.__name__ if isinstance(each, ModuleType) else each.__module__) for each in code}
    return {name for name in names if name.partition(".")[0] not in {*LIBRARIES, *sys.stdlib_module_names}}


def entries_of(value: Any) -> Iterator[Any]:
    """The entries of a container, and of containers in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if inner is None:
        yield value
        return
    first = [item for _, item in zip(range(_MANY + 1), inner, strict=False)]  # some tuples (e3nn's) refuse `len`
    for item in first if len(first) <= _MANY else ():
        yield from entries_of(item)


def _is_users_object(value: Any) -> bool:
    """Queues, optimizers and loggers are none. `LogRecorder` takes care of metrics."""
    kind = type(value)
    if isinstance(value, SimpleNamespace | Namespace):
        return True
    return (
        hasattr(value, "__dict__")
        and not _is_standard(kind)
        and is_users(kind)
        and not isinstance(value, nn.Module | type)
    )


def _is_standard(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


HELD = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")


@contextmanager
def optimizers_on_demand(module: LightningModule) -> Iterator[None]:
    """Call `configure_optimizers` when the Trainer's optimizers or schedulers are first read; forget them afterwards.

    Many steps log a learning rate. Nothing is done where the module has an optimizer as an attribute: schedulers that
    are built on it twice would change its learning rate twice.
    """
    trainer = trainer_of(module)
    own_one = any(isinstance(value, Optimizer) for value in vars(module).values())
    known = [] if trainer is None else trainer.optimizers
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or own_one or isinstance(known, _OnDemand) or known:
        yield
        return
    holder: Any = trainer.strategy
    before = {name: vars(holder)[name] for name in HELD}

    def make(name: str) -> Sequence[Any]:
        vars(holder).update(before)
        Strategy.setup_optimizers(holder, trainer)
        return list(vars(holder)[name])

    with replaced_entries((vars(holder), name, _OnDemand(partial(make, name))) for name in HELD):
        yield


class _OnDemand(list[Any]):  # Lightning checks for a list
    """A list that is filled when it is first read."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._make: Callable[[], Sequence[Any]] | None = make

    def _fill(self) -> None:
        if self._make is not None:
            make, self._make = self._make, None
            self.extend(make())

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._fill()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._fill()
        return super().__getitem__(index)
