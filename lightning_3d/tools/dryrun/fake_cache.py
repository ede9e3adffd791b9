"""Fake tensors that remember what an operation gives for arguments of given shapes.

A step repeats a few hundred operations tens of thousands of times, block after block and microbatch after microbatch.
torch remembers results too, but compares some twenty properties of each argument every time. Here only the properties
in which fake tensors of a dry run differ are compared.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# private to torch, read in 2.13
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_3d.sandbox.shapes_only import ShapesOnly

_UNSUITABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """This call is left to torch."""


class _Made(NamedTuple):
    """One tensor that an operation gives."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    aliases: bool
    """True where it is another view of the first argument."""


class _Recipe(NamedTuple):
    """The results of an operation: `parts` (tensors or plain values), or its first argument if it writes to that."""

    parts: tuple[Any, ...]
    container: type | None
    in_place: bool = False


class QuickFakeMode(ShapesOnly):
    """torch's mode, with a short way for operations seen before."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.suitable: dict[Any, bool] = {}
        self.recipes: dict[Any, _Recipe | None] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            key = self._key(func, args, kwargs)
        except _Unknown:
            return super().dispatch(func, types, args, kwargs)
        if key not in self.recipes:
            result = super().dispatch(func, types, args, kwargs)
            self.recipes[key] = None if result is NotImplemented else _recipe(func, args, result)
            return result
        recipe = self.recipes[key]
        return super().dispatch(func, types, args, kwargs) if recipe is None else self._follow(recipe, args)

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Everything that the shapes of results depend on."""
        if func not in self.suitable:
            self.suitable[func] = _is_suitable(func)
        if not self.suitable[func] or not args or not isinstance(args[0], FakeTensor | list | tuple):
            raise _Unknown
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        self._describe(args, key)
        if kwargs:
            key += kwargs
            self._describe(kwargs.values(), key)
        return tuple(key)

    def _describe(self, values: Any, key: list[Any]) -> None:
        for value in values:
            if isinstance(value, FakeTensor):
                if value.constant is not None or value.fake_mode is not self or value.dtype.is_complex:
                    raise _Unknown
                key += (
                    value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset(),
                    value.requires_grad, value.layout,
                )  # fmt: skip
            elif type(value) in _PLAIN:
                key += (type(value), value)
            elif isinstance(value, list | tuple):
                key.append(len(value))
                self._describe(value, key)
            else:
                raise _Unknown

    def _follow(self, recipe: _Recipe, args: Any) -> Any:
        if recipe.in_place:
            return args[0]
        parts = [self._make(part, args) if type(part) is _Made else part for part in recipe.parts]
        return parts[0] if recipe.container is None else recipe.container(parts)

    def _make(self, made: _Made, args: Any) -> FakeTensor:
        storage = args[0].untyped_storage() if made.aliases else None
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            inner = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if storage is not None:
                inner.set_(storage, made.offset, made.shape, made.stride)  # type: ignore[call-overload]
        return FakeTensor(self, inner, made.device)


def _is_suitable(func: Any) -> bool:
    """True where shapes of arguments determine the results; what writes gives back its first argument as it is."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or _UNSUITABLE & set(func.tags):
        return False
    name = func._schema.name.removeprefix("aten::")
    if name.startswith(("lift", "resize", "set_", "_local_scalar")):
        return False
    return not func._schema.is_mutable or (name.endswith("_") and func._overloadname != "out")


def _recipe(func: Any, args: Any, result: Any) -> _Recipe | None:
    """None where torch must be asked every time."""
    if func._schema.is_mutable:
        return _Recipe((), None, in_place=True) if result is args[0] else None
    container = type(result) if isinstance(result, list | tuple) else None
    if container not in (None, list, tuple):
        return None
    first = args[0].untyped_storage()._cdata if isinstance(args[0], FakeTensor) else None
    given = args[1:] if first is not None else args
    others = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)} - {first}
    try:
        parts = tuple(_part(part, first, others) for part in (result if container else [result]))
    except _Unknown:
        return None
    return _Recipe(parts, container)


def _part(value: Any, first: int | None, others: set[int]) -> Any:
    if not isinstance(value, Tensor):
        if type(value) in _PLAIN:
            return value
        raise _Unknown
    if not isinstance(value, FakeTensor) or value.constant is not None or value.requires_grad:
        raise _Unknown
    storage = value.untyped_storage()
    aliases = storage._cdata == first
    if value.dtype.is_complex or value.layout is not torch.strided or storage._cdata in others:
        raise _Unknown
    made = _Made(value.shape, value.stride(), value.dtype, value.fake_device, int(value.storage_offset()), aliases)
    if not aliases:
        whole = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta").untyped_storage()
        if made.offset or whole.nbytes() != storage.nbytes():
            raise _Unknown
        others.add(storage._cdata)  # two results in one storage are not two tensors
    return made
