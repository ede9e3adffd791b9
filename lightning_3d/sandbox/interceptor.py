"""The interceptor of the user's tensor operations, and the rules that it asks.

It intercepts a call once, as the user's code makes it: what torch computes within that call is not intercepted.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import UnsupportedError, outside
from lightning_3d.module.torch_private import (
    PLAIN_DATA,
    has_memory,
    is_memory_shared,
    memory_key,
    no_functions,
    no_subclasses,
    tree_leaves,
    version_of,
)
from lightning_3d.ranks.shards import local

T = TypeVar("T")
Asked = Literal["number", "truth", "array", "text", "answer", "comparison", "hook"]
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
ASKS: Mapping[str, Asked] = {
    "item": "number", "tolist": "number", "__int__": "number", "__float__": "number",
    "__bool__": "truth", "numpy": "array", "__format__": "text", "register_hook": "hook",
    "__array__": "answer", "__index__": "answer", "__complex__": "answer", "__contains__": "answer",
    "equal": "answer", "allclose": "answer", "is_nonzero": "answer",
    **dict.fromkeys((*_COMPARISONS, *(f"__{name}__" for name in _COMPARISONS)), "comparison"),
}  # fmt: skip
"""What functions of a tensor tell the code that calls them. It may decide something by that."""


class Call(NamedTuple):
    """A tensor operation, before it runs."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: FrameType
    """The frame that makes the call."""
    targets: tuple[tuple[Tensor, int], ...]
    """Tensors that the call may change in place, each with its version."""

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", "")

    @property
    def asks(self) -> Asked | None:
        return ASKS.get(self.name)

    @property
    def place(self) -> str:
        """The file and line of the call, outside of torch."""
        frame = self.outside
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    @property
    def outside(self) -> FrameType:
        """The frame of the code, outside of torch, that makes the call."""
        return outside(self.caller, "torch.")

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in containers too."""
        values = (*self.args, *self.kwargs.values())
        if any(isinstance(value, (list, tuple, dict)) for value in values):  # few have one, and a search takes longer
            values = tuple(tree_leaves(values))
        return [leaf for leaf in values if isinstance(leaf, Tensor)]

    def written(self) -> list[Tensor]:
        """The targets that the call has changed. Asked for after it."""
        uncounted = assigns_data(self.func) or self.name.startswith("_foreach")  # torch: no versions of listed DTensors
        return [tensor for tensor, version in self.targets if uncounted or version_of(tensor) != version]


class Rule:
    """A rule about tensor operations. This one changes and notes nothing."""

    def before(self, call: Call) -> Call:
        """Return the call to run in place of `call`, or raise `UnsupportedError`."""
        return call

    def after(self, call: Call, result: Any) -> None:
        """Note the `result` of `call`, as the user made it, or raise `UnsupportedError`."""


class NoteAsked(Rule, Generic[T]):
    """Note what code asks tensors for, of these `kinds`: what `note` returns of a call and its result, but None."""

    def __init__(self, kinds: Collection[str], note: Callable[[Call, Any], T | None]) -> None:
        self.kinds, self.note = kinds, note
        self.found: list[T] = []

    def after(self, call: Call, result: Any) -> None:
        if call.asks in self.kinds and (noted := self.note(call, result)) is not None:
            self.found.append(noted)


FOR_CALLER: set[CodeType] = set()
"""Code of ours that stands for an attribute: its calls are those of the code that uses the attribute."""


class Interceptor(TorchFunctionMode):
    """Ask `rules` about each tensor operation while entered.

    An `UnsupportedError` leaves the context also where code inside makes another error of it (`load_state_dict`).
    """

    def __init__(self, *rules: Rule) -> None:
        super().__init__()
        self.rules, self.left = rules, False
        self.refused: UnsupportedError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        while caller.f_code in FOR_CALLER and caller.f_back is not None:
            caller = caller.f_back
        call = run = Call(func, args, kwargs, caller, _targets(func, args, kwargs))
        try:
            for rule in self.rules:
                run = rule.before(run)
            result = run.func(*run.args, **run.kwargs)
            for rule in self.rules:
                rule.after(call, result)
        except UnsupportedError as error:
            self.refused = error
            raise
        return result

    def outside(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, whose calls from the code inside are not intercepted."""
        return self._moved(function, left=True)

    def inside(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, whose calls are intercepted also where a function `outside` makes them."""
        return self._moved(function, left=False)

    def _moved(self, function: Callable[..., T], left: bool) -> Callable[..., T]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            if self.left == left:
                return function(*args, **kwargs)
            self._move(left)
            try:
                return function(*args, **kwargs)
            finally:
                self._move(not left)

        return run

    def _move(self, left: bool) -> None:
        self.left = left
        if left:
            super().__exit__(None, None, None)
        else:
            super().__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if "sys._getframe" in str(error) and kind.__module__ == "torch._dynamo.exc":  # by `__torch_function__` above
            raise UnsupportedError(
                "The code calls torch.cond, torch.while_loop, a function compiled with fullgraph=True, or another"
                " that torch compiles in one piece. Torch cannot while tensor operations are watched, ahead of training"
                " and in first steps. Write torch.where, or `if` and `for`, in its place, and compile with"
                " fullgraph=False. Or use zero_stage=0, or tensor_parallel_size."
            ) from error
        if self.refused is not None and error is not self.refused:
            raise self.refused from error


def assigns_data(func: Any) -> bool:
    """Return True if a call is `tensor.data = `."""
    return func in (PLAIN_DATA.__set__, Tensor.data.__set__)  # type: ignore[attr-defined]


def storage(tensor: Tensor) -> int:
    """A number for the memory that a tensor and its views share. It stays while that is freed and allocated again."""
    with no_functions():
        return memory_key(local(tensor))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors of one storage have an element in common: those of an RNN are neighbours in one buffer."""
    steps = [zip(each.shape, each.stride(), strict=True) for each in (one, other)]
    starts = [each.storage_offset() for each in (one, other)]
    ends = [1 + start + sum((size - 1) * by for size, by in each) for start, each in zip(starts, steps, strict=True)]
    if max(starts) >= min(ends):
        return False
    taken = torch.zeros(max(ends), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def shares_memory(tensor: Tensor) -> bool:
    """Return False for a plain tensor whose memory no other tensor uses, or a sparse one: no view of a parameter."""
    if not has_memory(tensor):
        return False
    with no_functions():
        strided, plain = tensor.layout is torch.strided, type(tensor) is Tensor
        return strided and not (plain and not is_memory_shared(tensor.untyped_storage()))


def is_memory(tensor: Tensor) -> bool:
    """Return True for a plain tensor with elements in memory of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and has_memory(tensor)
    return plain and tensor.numel() > 0


def _targets(func: Any, args: Any, kwargs: Any) -> tuple[tuple[Tensor, int], ...]:
    first = args[:1] if _in_place(func) else ()
    if (not first and "out" not in kwargs) or (assigns_data(func) and is_itself(args)):  # there is nothing to convert
        return ()
    leaves = tree_leaves((first, kwargs.get("out")))
    # a sparse tensor has no storage, one of inference mode counts no versions, and no parameter is either
    tensors = (x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided)
    return tuple((x, version_of(x)) for x in tensors if not x.is_inference())


def is_itself(args: Any) -> bool:
    """Return True for a tensor and another with its memory, dtype and shape."""
    if not all(isinstance(each, Tensor) and each.layout is torch.strided for each in args):
        return False
    one, other = args
    places = [(each.dtype, each.shape, each.stride(), each.storage_offset()) for each in map(local, args)]
    return storage(one) == storage(other) and places[0] == places[1]


@cache
def _in_place(func: Any) -> bool:
    """Return True if a call may change its first argument, by its name: `mul_`, `__imul__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    if name in ("requires_grad_", "detach_"):
        return False
    special = name.startswith("__i") or name == "__setitem__" or assigns_data(func)
    return special or (name.endswith("_") and not name.endswith("__"))


LIBRARIES = {"lightning", "lightning_3d", "numpy", "torch", "torchmetrics"}


def is_users(code: Any) -> bool:
    """Return True for a function or a class that none of `LIBRARIES` defines. Other libraries count as the user."""
    while isinstance(code, partial):
        code = code.func
    origin = getattr(code, "__module__", None) or type(code).__module__
    return origin.partition(".")[0] not in LIBRARIES


def without_class(tensor: Tensor) -> Tensor:
    """`tensor` without the methods of a user's class: MONAI's slices look for a file name of each row."""
    if not is_users(type(tensor)):
        return tensor
    with no_subclasses():
        return tensor.as_subclass(Tensor)
