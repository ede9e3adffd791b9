"""Backward of one microbatch on one stage, whole or in two halves (first for the inputs, later for the weights)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_3d.pipeline.traced import not_a_view


def whole_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Gradients of all leaves below `outputs` that need one."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


@dataclass
class WeightHalf:
    """What is left of a backward once the inputs have their gradients."""

    outputs: list[Tensor]
    grads: list[Tensor | None]
    groups: list[dict[str, Any]] | None
    """Where weights join the path from inputs to outputs; None if no input needed a gradient."""
    beside: list[Tensor]
    """Weights that no group holds: they reach the outputs on a path of their own."""

    def run(self, parameters: list[Tensor]) -> None:
        """Add the gradients of the weights."""
        if self.groups is None:
            whole_backward(self.outputs, self.grads)
            return
        if self.beside:
            torch.autograd.backward(self.outputs, self.grads, inputs=self.beside, retain_graph=True)
        stage_backward_weight(iter(parameters), self.groups)  # type: ignore[arg-type]


def input_half(
    outputs: list[Tensor], grads: list[Tensor | None], inputs: list[Tensor], parameters: list[Tensor]
) -> WeightHalf:
    """Gradients of the inputs only; the rest is left for later.

    `torch.distributed.pipelining` does the cutting of the graph (torch 2.13). It leaves out weights that do not meet
    the inputs' path, so those are found here.
    """
    kept = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    outputs, grads = [output for output, _ in kept], [grad for _, grad in kept]
    if not outputs or not any(tensor.requires_grad for tensor in inputs):
        return WeightHalf(outputs, grads, None, [])
    given = [torch.ones_like(output) if grad is None else grad for output, grad in kept]
    edges = [not_a_view(output) for output in outputs]  # torch detaches them in place
    _, groups = stage_backward_input(edges, given, inputs, iter(parameters))  # type: ignore[arg-type]
    held = {node for group in groups for node in group["params"]}
    below = _leaves_below(outputs)
    beside = [tensor for tensor in parameters if (node := below.get(id(tensor))) is not None and node not in held]
    return WeightHalf(outputs, list(given), groups, beside)


def _leaves_below(outputs: Sequence[Tensor]) -> dict[int, Any]:
    """Nodes that accumulate gradients of leaves below `outputs`, by the leaf's id."""
    found: dict[int, Any] = {}
    seen = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node
        waiting += [following for following, _ in node.next_functions]
    return found
