"""A weight's gradient is computed while the gradient of its input is summed over the tensor ranks.

Autograd computes both gradients of a product in one step, so a sum that waits for the one waits for the other. Here the
weight's gradient gets a step of its own:

    forward     enter, token (of the weight), launch, product (of input, weight and token)
    backward    product (input's gradient), launch: the sum begins, token: the weight's gradient, enter: the sum ends

That the token comes before the sum's end is autograd's habit of running first what was made last; without it gradients
would be the same and nothing would overlap.

For each region this is done with the first product alone (a fused one, queries, a gate): those that follow were made
after the launch, so their gradients come before it.

Not on the CPU: there sums and products share the cores, so nothing is won, and the steps cost some 4% of a small
block's time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ON_CPU = False
"""For tests, which have no other device."""


class Early:
    """A sum over the ranks that may begin before its gradient comes to where it is asked for."""

    def __init__(self, start: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.start = start
        self.begun: tuple[Tensor, Callable[[], Tensor]] | None = None

    def begin(self, grad: Tensor) -> None:
        """Begin the sum of `grad`, which autograd hands on meanwhile."""
        self.begun = grad, self.start(grad)

    def end(self, grad: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum; `total` makes it of a gradient that is not the one that it began with."""
        begun, self.begun = self.begun, None
        if begun is None:
            return total(grad)
        found = begun[1]()
        # Where something else took what entered, or a hook changed its gradient, it is another one by now.
        return found if grad is begun[0] else total(grad)


@dataclass(frozen=True)
class Kind:
    """How a module multiplies its input with its weight."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    turned: bool
    """Whether the weight has outputs first, as torch's linear has."""

    def of_weight(self, grad: Tensor, input: Tensor) -> Tensor:
        """The weight's gradient."""
        grad, input = _rows(grad), _rows(input)
        return grad.T @ input if self.turned else input.T @ grad


class Deferral:
    """One product and its weight."""

    def __init__(self, kind: Kind, weight: Tensor) -> None:
        self.kind, self.weight = kind, weight
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.token: Tensor | None = None

    def launch(self, tensor: Tensor, early: Early) -> Tensor:
        """What the region's products take, of what entered it."""
        self.weight = _as_autocast_would(self.weight)
        # The order of these two lines is that of their backwards, reversed.
        self.token = _Token.apply(self.weight, self.kind, self.kept)
        return _Launch.apply(tensor, early)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """What the module gives for what was launched."""
        return _Product.apply(_as_autocast_would(input), self.weight, bias, self.token, self.kind, self.kept)


def defer(module: nn.Module, weight: Tensor) -> Deferral | None:
    """A product of `module`, with `weight` for its own, that gives its weight's gradient later, where that can be."""
    if not (weight.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    kind = _kind_of(type(module)) if ON_CPU or not weight.is_cpu else None
    return None if kind is None else Deferral(kind, weight)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, early: Early) -> Tensor:
        ctx.early = early
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():  # else the gradient's own graph is kept, and that does not know what has begun
            ctx.early.begin(grad)
        return grad, None


class _Token(torch.autograd.Function):
    """Stands for a weight in the graph; what its gradient is made of comes by the side."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: Kind, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.kind, ctx.kept = kind, kept
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.kind.of_weight(*ctx.kept.pop()) if ctx.kept else None, None, None


class _Product(torch.autograd.Function):
    """It takes the weight too, whose gradient it leaves to the token, so that the input's depends on it in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        kind: Kind,
        kept: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        ctx.kind, ctx.kept = kind, kept
        ctx.save_for_backward(input, weight)
        # Detached, it is no view to autograd, which would not let the code that follows change it in place.
        return kind.forward(input, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        ctx.kept.clear()  # a backward that wanted inputs only left its own behind
        of_weight = None
        if torch.is_grad_enabled():
            of_weight = ctx.kind.of_weight(grad, input)  # kept, a gradient with a graph would keep itself alive
        else:
            ctx.kept.append((grad, input))
        rows = _rows(grad)
        of_input = (rows @ (weight if ctx.kind.turned else weight.T)).view(input.shape)
        of_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, grad.new_zeros(()), None, None


def _as_autocast_would(tensor: Tensor) -> Tensor:
    """What a product takes, in the precision that it computes in: so it is kept once."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _kind_of(module: type[nn.Module]) -> Kind | None:
    if module.forward is nn.Linear.forward:
        return Kind(F.linear, turned=True)
    if (module.__module__, module.__qualname__) == ("transformers.pytorch_utils", "Conv1D"):
        return Kind(lambda input, weight, bias: F.linear(input, weight.T, bias), turned=False)
    return None
