"""Gates: hooks on every unit that let the running step decide about each call."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import nn

from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.torch_private import forward_hooks, forward_pre_hooks, in_transform
from lightning_3d.module.undo import UndoStack, replaced_attributes
from lightning_3d.sandbox.interceptor import is_users


class Director(Protocol):
    """Decides about calls of units while a step runs."""

    skipping: bool
    """True where the unit entered last must not compute: `leave` supplies its output."""

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with which a unit that is real here runs."""

    def leave(self, unit: str, output: Any) -> Any:
        """The output that the caller gets from a unit that ran here."""

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        """The output that the caller gets from a unit that is absent here."""


class Gates:
    """Hooks and layers on the units of a module until `undo` closes, idle while no director is set.

    Create it last, after the hooks of FSDP and of the tensor layers. Then a call is cut before any of them runs, and
    they get the arguments of the unit itself. The user's hooks on a unit are part of the code around it. They get the
    same values as that code, on every stage.
    """

    def __init__(self, module: nn.Module, units: Sequence[str], absent: Sequence[str], undo: UndoStack) -> None:
        self.director: Director | None = None
        self.depth = 0
        self.outside: tuple[Any, Any] | None = None
        """The arguments with which code around the units has called the last one."""
        self.takes = False
        """True where the user's hooks inside of units wait for their end: what they get travels with the output."""
        self.taken: list[tuple[str, Any, Any]] = []
        """Calls of such hooks in the running unit."""
        self.module = module
        first_names = {id(module.get_submodule(unit)): unit for unit in reversed(units)}
        for name in first_names.values():
            unit = module.get_submodule(name)
            before, after = self._before(name, undo), self._after(name)
            add_layer(_Gate(unit, name, name in absent, self, (before, after)), undo)
            if name not in absent:
                undo.callback(unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
                undo.callback(unit.register_forward_hook(after, with_kwargs=True).remove)
                _put_outside(unit)

    def _before(self, name: str, undo: UndoStack) -> Any:
        def before(unit: nn.Module, args: Any, kwargs: Any) -> Any:
            self.depth += 1
            if self.director is None or self.depth > 1:
                return None
            _refuse_transform(name)
            self.outside, self.taken = (args, kwargs), []
            self._pass_outside_arguments(unit, undo)
            if self.takes:
                self._take_inside(name, undo)
            return self.director.enter(name, args, kwargs)

        return before

    def _after(self, name: str) -> Any:
        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.depth -= 1
            if self.director is None or self.depth:
                return None
            if not self.takes:
                return self.director.leave(name, output)
            return self.give(self.director.leave(name, (output, self.taken)))

        return after

    def _take_inside(self, unit: str, undo: UndoStack) -> None:
        """Let the user's forward hooks inside of `unit` wait. Some are registered at the first call."""
        for name, inner in self.module.get_submodule(unit).named_modules(prefix=unit):
            hooks = forward_hooks(inner)
            for number, (key, hook) in enumerate(_of_users(hooks) if name != unit else ()):
                if not isinstance(hook, _Waiting):
                    hooks[key] = _Waiting(hook, f"{name}:{number}", self)
                    undo.callback(_put_back, hooks, key, hook)

    def give(self, left: tuple[Any, list[tuple[str, Any, Any]]]) -> Any:
        """The output of a unit that ran on some stage, after calls of the hooks that waited for it."""
        output, taken = left
        for place, args, others in taken:
            name, _, number = place.rpartition(":")
            inner = self.module.get_submodule(name)
            hook = _of_users(forward_hooks(inner))[int(number)][1]
            if (hook.hook if isinstance(hook, _Waiting) else hook)(inner, args, *others) is not None:
                raise PipelineSplitError(f"A forward hook of {name!r} changes its result, so it cannot wait.")
        return output

    def _pass_outside_arguments(self, unit: nn.Module, undo: UndoStack) -> None:
        """Let the user's forward hooks get the arguments from outside. Some are registered at the first call."""
        hooks = forward_hooks(unit)
        for key, hook in hooks.items():
            if is_users(hook):
                hooks[key] = _Outside(self._call_hook, hook)
                undo.callback(_put_back, hooks, key, hook)

    def _call_hook(self, hook: Any, unit: nn.Module, args: Any, *others: Any) -> Any:
        """Call a forward hook; `others` are the keyword arguments, if it takes them, and the output."""
        *kwargs, output = others
        if self.outside is not None:
            args, kwargs = self.outside[0], [self.outside[1]] * len(kwargs)
        return hook(unit, args, *kwargs, output)

    def __deepcopy__(self, memo: Any) -> "Gates":
        return self  # as its hooks, which are functions, do in the copy of a unit

    def directed(self, director: Director) -> AbstractContextManager[None]:
        return replaced_attributes(self, director=director, depth=0, outside=None)

    def inside_block(self) -> bool:
        return self.depth > 0 and self.director is not None


class _Gate(ForwardLayer, rank=Layer.GATE):
    """Inside of the `hooks` on a unit. It does what they do where code calls `unit.forward`, which passes them by."""

    def __init__(self, unit: nn.Module, name: str, absent: bool, gates: Gates, hooks: tuple[Any, Any]) -> None:
        super().__init__(unit)
        self.name, self.absent, self.gates, self.hooks = name, absent, gates, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        director = self.gates.director
        if not self.absent:
            if director is not None and self.gates.depth == 0:
                before, after = self.hooks
                args, kwargs = before(self.module, args, kwargs)
                return after(self.module, args, kwargs, self(*args, **kwargs))
            # it belongs to another stage of this rank when an earlier part of the step calls it
            skipped = director is not None and self.gates.depth == 1 and director.skipping
            return None if skipped else self.next(*args, **kwargs)
        if director is None:
            raise UnsupportedError(
                f"{self.name!r} belongs to another pipeline stage and was called outside of training_step,"
                f" validation_step, test_step and predict_step. Call the module inside a step, or use {NO_PIPELINE}."
            )
        _refuse_transform(self.name)
        result = director.foreign(self.name, args, kwargs)
        return self.gates.give(result) if self.gates.takes else result


class _Waiting:
    """The user's forward hook on a module inside of a unit."""

    def __init__(self, hook: Any, place: str, gates: Gates) -> None:
        self.hook, self.place, self.gates = hook, place, gates

    def __call__(self, inner: nn.Module, args: Any, *others: Any) -> Any:
        if not self.gates.takes or not self.gates.inside_block():
            return self.hook(inner, args, *others)
        self.gates.taken.append((self.place, args, others))
        return None


class _Outside(partial[Any]):
    """A hook of the user on a unit, which gets the arguments from outside."""


def _of_users(hooks: Any) -> list[tuple[int, Any]]:
    """The user's hooks among those of a module, in order, also where ours stand in their place."""
    return [(key, hook) for key, hook in hooks.items() if isinstance(hook, _Waiting | _Outside) or is_users(hook)]


def _refuse_transform(name: str) -> None:
    if in_transform():
        raise UnsupportedError(
            f"{name!r} is called in a transform of torch.func (jvp, vjp, grad, jacrev, vmap) or in forward mode, which"
            f" cannot follow values to other stages. Use {NO_PIPELINE}: data ranks train these with any zero_stage."
        )


def _put_outside(unit: nn.Module) -> None:
    """Move the user's hooks on `unit` out of the gate: before its first hook and behind its last one."""
    before, after = forward_pre_hooks(unit), forward_hooks(unit)
    for key in [key for key, hook in before.items() if is_users(hook)][::-1]:
        before.move_to_end(key, last=False)
    for key in [key for key, hook in after.items() if is_users(hook)]:
        after.move_to_end(key)


def _put_back(hooks: dict[int, Any], key: int, hook: Any) -> None:
    if key in hooks:  # the user may have removed it
        hooks[key] = hook


def hooked_inside(module: nn.Module, units: Sequence[str]) -> list[str]:
    """Modules inside of units that have a forward hook of the user or of a library."""
    return [
        name
        for unit in units
        for name, inner in module.get_submodule(unit).named_modules(prefix=unit)
        if name != unit and any(map(is_users, forward_hooks(inner).values()))
    ]


def users_hooks(module: nn.Module, units: Sequence[str]) -> bool:
    """Return True if a unit, or a module inside of one, has a forward hook of the user or of a library."""
    inside = {id(inner): inner for unit in units for inner in module.get_submodule(unit).modules()}
    return any(_of_users(forward_hooks(each)) or _of_users(forward_pre_hooks(each)) for each in inside.values())
