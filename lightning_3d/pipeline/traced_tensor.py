"""`TracedTensor`: a tensor that knows where in a step it was computed.

A stage runs the user's step from the start, but has no values for what earlier stages compute. Those tensors are
*absent*: zeros of the right shape that carry their origin. An operation whose absent inputs were received gets the
received values; an operation on absent inputs that were not received gives another absent tensor. A result computed
from a placeholder is never used. Operations have numbers (calls of units so far, index since then), alike everywhere.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import distributed_c10d as c10d
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, UnsupportedError
from lightning_3d.module.torch_private import no_subclasses
from lightning_3d.sandbox.interceptor import ASKS
from lightning_3d.sandbox.trees import leaves, map_leaves

Node = tuple[int, int]
"""Position of a tensor: calls of units before it, and its index among traced tensors since then."""
_REQUIRES_GRAD = vars(Tensor.__base__)["requires_grad"].__get__


class TracedTensor(Tensor):
    """A tensor under a `StepTape`; an ordinary one once no tape is active."""

    node: Node
    absent: bool

    def untraced(self) -> Tensor:
        """The same tensor as an ordinary one."""
        with no_subclasses():
            return as_kind(self, Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _active:
            return _active[-1].run(func, args, kwargs or {})
        with no_subclasses():
            return func(*args, **(kwargs or {}))


class StepTape:
    """Numbers the tensors of a step, supplies those that were received, keeps those to be sent on."""

    def __init__(self, received: dict[Node, Tensor] | None = None, wanted: frozenset[Node] = frozenset()) -> None:
        self.call = 0
        self.index = 0
        self.values = received or {}
        self.received = frozenset(self.values)
        self.wanted = wanted
        self.made: dict[Node, Tensor] = {node: value for node, value in self.values.items() if node in wanted}
        self.tracing = True
        """True while new tensors are traced: not on the last stage once its own units run."""
        self.computes_absent = False
        """True while an operation has tensors that other stages compute."""

    def __enter__(self) -> "StepTape":
        _active.append(self)
        Function.apply = classmethod(_apply_traced)  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if not _active:
            Function.apply = _plain_apply  # type: ignore[method-assign]

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _REQUIRES_GRAD:
            return self.requires_grad(args[0])
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TracedTensor)]
        missing = [leaf for leaf in inputs if leaf.absent and leaf.node not in self.values]
        name = getattr(func, "__name__", "")
        self.refresh(inputs)
        if ASKS.get(name) in ("number", "truth", "array", "answer"):
            self.on_read(inputs, missing, name)
        if getattr(func, "__module__", None) == c10d.__name__:
            return self._send(func, inputs, args, kwargs)
        if name in ("register_hook", "retain_grad") and inputs and args and args[0] is inputs[0]:
            return self._hook(func, inputs[0], args[1:], kwargs)
        if (_changes_input(name) or kwargs.get("inplace")) and inputs and args and args[0] is inputs[0]:
            self.computes_absent = bool(missing)
            result = self._in_place(func, args, kwargs, bool(missing))
            self.computes_absent = False  # an error that the user's own code raises next is not of shapes
            return result
        if _changes_input(name) and inputs and isinstance(args[0], Tensor):
            self.on_written(inputs, missing)
        self.computes_absent = bool(missing)
        with no_subclasses():
            result = func(*self.usable(args), **self.usable(kwargs))
        self.computes_absent = False
        if not any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            return result
        for leaf in inputs:
            self.on_use(leaf.node, self.call)
        return self.trace(result, bool(missing)) if self.tracing or missing else result

    def requires_grad(self, tensor: TracedTensor) -> bool:
        plain: Tensor = self.plain(tensor)
        return plain.requires_grad

    def _send(
        self, func: Callable[..., Any], inputs: list[TracedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Send and receive as the user's code asks: every stage does, with its data ranks."""
        for leaf in inputs:
            self.on_use(leaf.node, self.call)
        with no_subclasses():
            return func(*self.to_send(args), **self.to_send(kwargs))

    def _hook(
        self, func: Callable[..., Any], handle: TracedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Register a hook on a gradient: on the handle, which all uses share, only where the tensor was computed."""
        if func.__name__ == "retain_grad":
            raise UnsupportedError(
                "training_step asks to keep the gradient of a tensor (retain_grad). Each microbatch has a part, so"
                f" code after the step would find None. Use register_hook, or {NO_PIPELINE}."
            )
        if (handle.absent and handle.node not in self.values) or handle.node in self.received:
            return RemovableHandle(OrderedDict())
        tensor = self.usable(handle) if handle.absent else self.values.get(handle.node, handle)
        with no_subclasses():
            return func(tensor, *args, **kwargs)

    def _in_place(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], missing: bool) -> Any:
        """Let the user's handle stand for the changed tensor; a received tensor must not change."""
        handle: TracedTensor = args[0]
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, TracedTensor):
                self.on_use(leaf.node, self.call)
        target = self.usable(handle)
        if handle.node in self.received:
            target = target.clone()
        target.grad_fn  # noqa: B018  # until it is read, torch (2.13) takes a view with a written part for a leaf
        with no_subclasses():
            result = func(target, *self.usable(args[1:]), **self.usable(kwargs))
        handle.node = self._number()
        if not missing:
            self.values[handle.node] = target
            self.on_made(handle.node, target)
        return handle if isinstance(result, Tensor) else result

    def to_send(self, value: Any) -> Any:
        """`value` with the tensors that a message takes, and writes into."""
        return self.usable(value)

    def usable(self, value: Any) -> Any:
        """`value` with tensors that any operation can take."""
        return self.plain(value)

    def plain(self, value: Any) -> Any:
        """`value` with received tensors in place of absent ones."""
        return map_leaves(self._plain, value)

    def _plain(self, leaf: Any) -> Any:
        if not isinstance(leaf, TracedTensor):
            return leaf
        return self.values[leaf.node] if leaf.node in self.values else leaf.untraced()

    def trace(self, value: Any, absent: bool) -> Any:
        return map_leaves(lambda leaf: self._trace(leaf, absent), value)

    def _trace(self, leaf: Any, absent: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = self._number()
        if absent and node in self.values:  # received: real from here on, wherever the user's code uses it
            leaf, absent = self.values[node], False
        if type(leaf) not in (Tensor, nn.Parameter, TracedTensor):
            # A tensor-like object (sharded logits) becomes a tensor to be sent: any operation that it does not
            # implement gives one. `as_subclass` would bypass its own methods.
            leaf = leaf.view_as(leaf)
        if not absent:
            self.on_made(node, leaf)
        return self._handle(leaf, node, absent)

    def _handle(self, tensor: Tensor, node: Node, absent: bool) -> TracedTensor:
        traced: TracedTensor = as_kind(tensor, TracedTensor)
        traced.node, traced.absent = node, absent
        return traced

    def _number(self) -> Node:
        node = (self.call, self.index)
        self.index += 1
        return node

    def next_call(self) -> int:
        """Number of the call of a unit that begins now."""
        call, self.call, self.index = self.call, self.call + 1, 0
        return call

    def refresh(self, inputs: list[TracedTensor]) -> None:
        """Record tensors that require a gradient only since they were numbered: autograd functions set it last."""
        for leaf in inputs:
            if not leaf.absent and leaf.node not in self.values and (plain := leaf.untraced()).requires_grad:
                self.on_made(leaf.node, plain)

    def on_made(self, node: Node, value: Tensor) -> None:
        """Called for each new traced tensor."""
        if node in self.wanted:
            self.made[node] = value

    def on_use(self, node: Node, when: float) -> None:
        """Called where a traced tensor is used after `when` calls of units."""

    def on_written(self, inputs: list[TracedTensor], missing: list[TracedTensor]) -> None:
        """Called where they change an untraced tensor: one that the user keeps, or has allocated to be filled."""

    def on_read(self, inputs: list[TracedTensor], missing: list[TracedTensor], name: str) -> None:
        if missing:
            raise PipelineSplitError(
                f"The step reads the value of a tensor in Python (`{name}`) that another stage computes, before its own"
                " blocks have run. A branch on such a value cannot be cut into stages; move it behind the last block."
            )


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad


def not_a_view(tensor: Tensor) -> Tensor:
    """The same data as a new node of the graph: neither a leaf nor a view, so it may be changed in place."""
    return _Identity.apply(tensor) if tensor.requires_grad else tensor


def refuse_placeholders(value: Any) -> None:
    """Raise where the last stage ends with a value computed from a tensor that it does not have."""
    refuse_missing([leaf for leaf in leaves(value) if isinstance(leaf, TracedTensor) and leaf.absent])


def refuse_missing(tensors: list[TracedTensor]) -> None:
    if tensors:
        raise PipelineSplitError(
            "training_step returns, logs or keeps a value of an earlier stage that it did not in its rehearsal, so that"
            " it was not sent to the last one, such as a term of the loss that begins after some steps or epochs"
            " (`if self.global_step >= 100: loss = loss + ...`). Compute it in every step, and multiply it by 0"
            " where it is not to count."
        )


def as_kind(tensor: Tensor, kind: type[Tensor]) -> Any:
    """The same tensor as a `kind`; the dry run replaces this, since its tensors have a class of their own."""
    return tensor.as_subclass(kind)  # type: ignore[arg-type]


def _changes_input(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_") and name not in ("requires_grad_",)


_active: list[StepTape] = []
_plain_apply: Any = Function.__dict__["apply"]


def _any_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Arguments of autograd functions are rarely in containers, and blocks call many such functions."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, TracedTensor) for value in values):
        return True
    others = [value for value in values if not isinstance(value, Tensor | int | float | None)]
    return bool(others) and any(isinstance(leaf, TracedTensor) for leaf in leaves(others))


def _apply_traced(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply` as one operation of the step: torch does not call `__torch_function__` for it (2.13).

    A function with a callable argument recomputes: it calls units inside, and runs as it is.
    """
    plain = _plain_apply.__get__(None, cls)  # a classmethod of Python up to torch 2.13, then one of C
    if not _active or not _any_traced(args, kwargs) or any(callable(arg) for arg in args):
        return plain(*args, **kwargs)
    return _active[-1].run(plain, args, kwargs)
