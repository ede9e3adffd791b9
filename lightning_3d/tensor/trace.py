"""One run of a block, cut open at its matrix products.

Each product of an activation with a parameter ("site") gets its activation as a new leaf of autograd. What autograd
then reaches from
a site's input is what was computed since the products before it: so the graph says which products feed which, and
what else
takes part (norms, position tables, inputs of the block), whatever the modules are called.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_3d.sandbox.interceptor import Call as TensorCall
from lightning_3d.sandbox.interceptor import Interceptor, Rule
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import names_of

PRODUCTS: frozenset[Any] = frozenset({
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm, torch.einsum, torch.mv,
    torch.bilinear,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
    *(getattr(space, name) for space in (torch, F) for name in ("_grouped_mm", "grouped_mm") if hasattr(space, name)),
})  # fmt: skip


@dataclass
class Call:
    """One product."""

    parameters: tuple[str, ...]
    """Parameters in it, matrices first."""
    module: str
    """The module whose forward was running."""
    before: Tensor
    """The activation as it was computed."""
    leaf: Tensor
    """The activation as the product saw it: a leaf."""
    again: Callable[[Tensor], Tensor]
    """The product, on another activation."""


@dataclass
class Trace:
    """What one run showed."""

    calls: list[Call] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=dict)
    """Tensors that each module returned."""
    called: set[str] = field(default_factory=set)
    """Modules whose forward ran."""


class _Cutter(Rule):
    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.trace, self.stack = names, Trace(), [""]

    def before(self, call: TensorCall) -> TensorCall:
        func, args, kwargs = call.func, call.args, call.kwargs
        if func not in PRODUCTS:
            return call
        operands = [x for x in call.tensors() if x.is_floating_point()]
        weights = [x for x in operands if self._parameters_of(x)]
        others = [x for x in operands if not self._parameters_of(x) and x.dim() > 1]
        if len(others) != 1 or not any(weight.dim() > 1 for weight in weights):
            return call
        before = others[0]
        leaf = before.detach().clone().requires_grad_()

        def again(value: Tensor) -> Tensor:
            swap = lambda x: value if x is before else x  # noqa: E731
            return func(*tree_map(swap, args), **tree_map(swap, kwargs))

        matrices = [name for w in weights if w.dim() > 1 for name in self._parameters_of(w)]
        vectors = [name for w in weights if w.dim() == 1 for name in self._parameters_of(w)]
        self.trace.calls.append(Call((*matrices, *vectors), self.stack[-1], before, leaf, again))
        return call._replace(func=again, args=(leaf,), kwargs={})

    def _parameters_of(self, tensor: Tensor) -> list[str]:
        """The parameters that `tensor` is made of; none where anything else takes part."""
        found = leaves(tensor)
        return [self.names[id(leaf)] for leaf in found] if all(id(leaf) in self.names for leaf in found) else []


def trace(module: nn.Module, sample: Sample) -> Trace:
    """Run `module` (a scratch copy) once, cut open."""
    cutter = _Cutter(dict(names_of(module)))
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, n=name: _enter(cutter, n)))
        handles.append(child.register_forward_hook(lambda _, __, out, n=name: _leave(cutter, n, out), always_call=True))
    try:
        with torch.enable_grad(), Interceptor(SilenceRandom(), cutter):
            cutter.trace.inputs = sample.tensors()
            cutter.trace.outputs = tensors_in(module(*sample.args, **sample.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return cutter.trace


def leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves of autograd that `tensor` was computed from."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: dict[int, Tensor] = {}
    seen, todo = {tensor.grad_fn}, [tensor.grad_fn]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.append(node)
            if hasattr(node, "variable"):
                found[id(node.variable)] = node.variable
    return list(found.values())


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a module's result."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _enter(cutter: _Cutter, name: str) -> None:
    cutter.stack.append(name)
    cutter.trace.called.add(name)


def _leave(cutter: _Cutter, name: str, result: Any) -> None:
    cutter.stack.pop()
    cutter.trace.results.setdefault(name, []).extend(tensors_in(result))
