"""Backward of one microbatch on one stage, whole or in two halves (first for the inputs, later for the weights)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import CheckpointFunction

from lightning_3d.module.graph_private import function_of, is_additive
from lightning_3d.pipeline.traced_tensor import not_a_view
from lightning_3d.sandbox.interceptor import is_users
from lightning_3d.sandbox.trial import saved_gradients


def full_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Gradients of all leaves below `outputs` that need one."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], leaves: Sequence[Tensor], *, again: bool
) -> list[Tensor | None]:
    """Those of `leaves`, added to no `.grad`. `again` is True where another backward of the same graph follows."""
    if not recomputes_reentrantly(outputs):
        return list(torch.autograd.grad(outputs, leaves, grads, allow_unused=True, retain_graph=again))
    with saved_gradients(leaves):
        torch.autograd.backward(outputs, grads, retain_graph=again)  # such a checkpoint allows no other
        return [leaf.grad for leaf in leaves]


def recomputes_reentrantly(outputs: Sequence[Tensor]) -> bool:
    """Return True if a reentrant checkpoint took part, whose backward runs a backward of its own."""
    nodes = _children_first([output.grad_fn for output in outputs])
    return any(node.name() == f"{CheckpointFunction.__name__}Backward" for node in nodes)


def users_functions(outputs: Sequence[Tensor]) -> list[Any]:
    """The nodes that functions of the user compute; none where a reentrant checkpoint took part."""
    nodes = [] if recomputes_reentrantly(outputs) else _children_first([output.grad_fn for output in outputs])
    return [node for node in nodes if (kind := function_of(node)) is not None and is_users(kind)]


def names_of_mixing(nodes: Sequence[Any]) -> list[str]:
    """Names of functions whose gradient of an element depends on those of others (a norm of all), behind a backward."""
    with suppress(Exception):  # of any kind: it is the user's code, which may keep something for one backward
        return list(dict.fromkeys(type(x).__name__.removesuffix("Backward") for x in nodes if not is_additive(x)))
    return []


@dataclass
class WeightHalf:
    """The remaining half of a backward, once the inputs have their gradients."""

    groups: list[dict[str, Any]]
    """The places where weights join the paths from inputs to outputs, with the gradients there."""
    outputs: list[Tensor]
    """Outputs that no input reaches."""
    grads: list[Tensor | None]

    def run(self, parameters: list[Tensor]) -> None:
        if self.outputs:
            torch.autograd.backward(self.outputs, self.grads, retain_graph=bool(self.groups))
        if self.groups:
            stage_backward_weight(iter(parameters), self.groups)  # type: ignore[arg-type]


def input_half(
    outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor], parameters: list[Tensor]
) -> WeightHalf:
    """Gradients of the inputs only; those of the weights are left for later.

    `torch.distributed.pipelining` cuts the graph (read in torch 2.13). It would lose gradients of a weight through an
    output that depends on no input. The full backward of such outputs therefore runs later.
    """
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    wanted = {id(tensor) for tensor in inputs if tensor.requires_grad}
    reached = [(output, grad) for output, grad in pairs if not wanted.isdisjoint(leaves_below([output]))]
    alone = [pair for pair in pairs if not any(pair[0] is output for output, _ in reached)]
    half = WeightHalf([], [output for output, _ in alone], [grad for _, grad in alone])
    if reached:
        given = [torch.ones_like(output) if grad is None else grad for output, grad in reached]
        edges = [not_a_view(output) for output, _ in reached]  # torch detaches them in place
        half.groups = stage_backward_input(edges, given, inputs, iter(parameters))[1]  # type: ignore[arg-type]
    return half


def halves_agree(
    outputs: list[Tensor],
    grads: list[Tensor | None],
    inputs: list[Tensor],
    parameters: list[Tensor],
    wanted: Sequence[Tensor | None],
) -> bool:
    """Return True if a backward in two halves gives `wanted`, the gradients of inputs and of `parameters`.

    Torch's halves may add up wrongly, and not in every run, where a weight joins the path from inputs to outputs at
    two places. The graph is searched for that. They also call some hooks on gradients twice. A run of both halves
    shows that; `.grad` is put back afterwards.
    """
    if not _joins_once(outputs, {id(tensor) for tensor in inputs if tensor.requires_grad}):
        return False
    leaves = [*(tensor for tensor in inputs if tensor.requires_grad), *parameters]
    with saved_gradients(leaves):
        try:
            input_half(outputs, grads, inputs, parameters).run(parameters)
        except RuntimeError:  # a recomputation that allows one backward only, say
            return False
        return all(_same(tensor.grad, grad) for tensor, grad in zip(leaves, wanted, strict=True))


def _joins_once(outputs: list[Tensor], inputs: set[int]) -> bool:
    """Return True if each leaf joins the path from `inputs` (ids of leaves) to `outputs` at one place only."""
    way: dict[Any, bool] = {}
    leaves: dict[Any, frozenset[int]] = {}
    places: dict[int, Any] = {}
    for node in _children_first([output.grad_fn for output in outputs]):
        children = [child for child, _ in node.next_functions if child is not None]
        variable = getattr(node, "variable", None)
        way[node] = id(variable) in inputs or any(way[child] for child in children)
        own = frozenset() if variable is None else frozenset({id(variable)})
        leaves[node] = own.union(*(leaves[child] for child in children if not way[child]))
        if way[node] and any(places.setdefault(leaf, node) is not node for leaf in leaves[node]):
            return False
    return True


def _children_first(roots: list[Any]) -> list[Any]:
    order: dict[Any, None] = {}
    waiting = [(root, False) for root in roots if root is not None]
    while waiting:
        node, entered = waiting.pop()
        if node in order:
            continue
        if entered:
            order[node] = None
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child, _ in node.next_functions if child is not None]
    return list(order)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        given = one if one is not None else other
        return given is None or not bool(given.any())
    low = one.dtype in (torch.bfloat16, torch.float16)
    return bool((one - other).norm() <= (0.05 if low else 1e-3) * other.norm() + 1e-9) or bool(other.isnan().any())


def leaves_below(outputs: Sequence[Tensor]) -> set[int]:
    """The tensors (by id) that a backward from `outputs` reaches: parameters, and received tensors."""
    nodes = _children_first([output.grad_fn for output in outputs])
    variables = [getattr(node, "variable", None) for node in nodes]
    return {id(tensor) for tensor in (*outputs, *variables) if tensor is not None}
