"""Counts of the operations that run: floating-point operations, kernels, copies of weights in other types.

`ShownOperations` compares those of a block in its steps.
"""

import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_3d.module import torch_private
from lightning_3d.module.graph_private import (
    LAYOUT_KINDS,
    function_module,
    is_compiled_node,
    kind_of,
    nodes_made,
    nodes_since,
)


class OperationCount(torch_private.TorchDispatchMode):
    """Counts while it is entered, and changes nothing.

    torch's own counter hooks the gradients of each module's arguments. A step that differentiates inside of itself
    fails with these hooks, and hooks of the user run in another order. What `torch.cond` and the like call is not
    counted.

    Args:
        weights: storages whose copies in other types are noted. Autocast makes such copies.
        keeps: True for an operation, with its arguments, whose results are counted in `kept`, in bytes.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch compiles inside. Else `torch.cond` misses what its branches use of the code around."""
        return True

    def __init__(self, weights: Container[int] = (), keeps: Callable[[Any, Any, Any], bool] | None = None) -> None:
        super().__init__()
        self.flops = self.attention_flops = self.kernels = self.kept = 0
        self.weights, self.keeps = weights, keeps
        self.casts: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch_private.HigherOrderOperator):
            return result
        if func is torch_private.CAST and torch_private.memory_key(args[0]) in self.weights:
            self.casts[torch_private.memory_key(result)] = result
        elif _computes(func):
            self.kernels += 1
        if self.keeps is not None and self.keeps(func, args, kwargs):
            results = result if isinstance(result, tuple) else (result,)
            self.kept += sum(one.nbytes for one in results if isinstance(one, Tensor))
        rule = _RULES.get(torch_private.overloads(func))
        if rule is not None:
            flops = int(rule(*args, **kwargs, out_val=result))
            self.flops += flops
            if rule is _attention:
                self.attention_flops += flops
        return result


def _computes(func: Any) -> bool:
    results = torch_private.schema(func).returns
    view = bool(results) and all(one.alias_info is not None and not one.alias_info.is_write for one in results)
    return func.namespace != "prim" and func is not torch_private.RESHAPED and not view


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products of (queries x keys x head size) for each head of the queries, which may share keys."""
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (size + value.shape[3])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Five products: the scores again, and two for each of the two products."""
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * size + 2 * value.shape[3])


def _grouped(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Products of experts: each row with the matrix of its expert, or the gradients of these matrices."""
    return 2 * rows.numel() * weights.shape[-1]


_RULES: dict[Any, Any] = {**flop_registry, torch_private.GROUPED: _grouped}
# torch has no rules for the CPU's kernel, and those of torch 2.11 refuse heads that share keys
for _kernel, _its_backward in torch_private.ATTENTION:
    _RULES |= {_kernel: _attention, _its_backward: _attention_backward}


class ShownOperations:
    """The operations of autograd in the calls of one block, of which a rank computes a part.

    No proof covers code that begins in a later step (`if self.steps > 1000: x = x / x.norm()`). Calls are compared by
    their numbers of nodes and, where a number is new, by the kinds of nodes. A warning begins with `name`, and has the
    new operations, a sentence `why` one device may have other numbers, and a `remedy`. Nodes that no result depends on
    (of a value that code keeps) count `beside` a result. Placeholders make some too.
    """

    def __init__(self, block: nn.Module, name: str, why: str, remedy: str, *, beside: bool) -> None:
        self.block, self.text, self.beside = block, (name, why, remedy), beside
        self.numbers = set[tuple[bool, int]]()
        self.shown: dict[tuple[bool, int, int], set[str]] = {}
        """By mode, and by the number of nodes ahead of the block, to which a weight that begins to train adds one. Also
        by that of compiled ones: code of which torch has compiled enough versions runs uncompiled."""
        self.most: dict[tuple[bool, int, int, int], int] = {}
        """Nodes beside results, also by the number of nodes of results: longer loops have more of both."""

    def are_new(self, start: int) -> bool:
        """True where no call had as many nodes as that which has made those from `start` on."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return (self.block.training, nodes_made() - start) not in self.numbers

    def note(self, start: int, results: Sequence[Tensor]) -> None:
        """Warn once of each operation that is new in the call with these results."""
        number, training = nodes_made() - start, self.block.training
        self.numbers.add((training, number))
        nodes, before = nodes_since(start, results)
        beside, compiled = self.beside * (number - len(nodes)), sum(map(is_compiled_node, nodes))
        kinds = {kind_of(node) for node in nodes if not function_module(node).startswith("lightning_3d")}
        known = self.shown.setdefault(key := (training, len(before), compiled), kinds)
        most = self.most.setdefault(sizes := (*key, len(nodes)), beside)
        self.shown[key], self.most[sizes] = known | kinds, max(most, beside)
        if new := sorted(kinds - known - LAYOUT_KINDS) + [f"{beside} beside its result"] * (beside > most):
            name, why, remedy = self.text
            warnings.warn(
                f"{name} by operations that its first steps did not show ({', '.join(new)}). {why}. Where code begins"
                f" in a later step, compare with one device, or {remedy}.",
                stacklevel=3,
            )
