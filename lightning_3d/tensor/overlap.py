"""Overlap of two things in backward: the sum of an input's gradient over the tensor ranks, and the weight's gradient.

Autograd computes both gradients of a product in one step, so the sum waits for both. Here the weight's gradient gets a
step of its own:

    forward     enter, token (of the weight), launch, product (of input, weight and token)
    backward    product (input's gradient), launch: the sum begins, token: the weight's gradient, enter: the sum ends

The token comes before the end of the sum because autograd runs the newest nodes first. In another order the gradients
would be the same, and nothing would overlap.

Only the first product of each region does this (a fused one, queries, a gate). The others were created after the
launch, so their gradients are computed before it.

On the CPU this is off: sums and products share the cores there, and the steps cost some 4% of a small block's time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.module.anatomy import is_transposed_linear

ON_CPU = False
"""True in tests, which have no other device."""


class EarlySum:
    """The sum of a gradient over the ranks, which may begin before autograd needs it."""

    def __init__(self, start: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.start = start
        self.begun: tuple[Tensor, Callable[[], Tensor]] | None = None

    def begin(self, grad: Tensor) -> None:
        """Begin the sum of `grad` while autograd goes on."""
        self.begun = grad, self.start(grad)

    def end(self, grad: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of `grad`. `total` computes it where the sum did not begin, or began with another tensor."""
        begun, self.begun = self.begun, None
        if begun is None:
            return total(grad)
        result = begun[1]()
        # It is another tensor where other code used the input too, or a hook changed the gradient.
        return result if grad is begun[0] else total(grad)


def early_sum(start: Callable[[Tensor], Callable[[], Tensor]]) -> EarlySum | None:
    """The sum of a gradient that `start` begins. None in compiled code, whose backward is ordered by the compiler."""
    return None if torch.compiler.is_compiling() else EarlySum(start)


@dataclass(frozen=True)
class ProductKind:
    """The product of a module's input with its weight."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    turned: bool
    """True where the weight has outputs first, as in torch's linear."""

    def of_weight(self, grad: Tensor, input: Tensor) -> Tensor:
        grad, input = _rows(grad), _rows(input)
        return grad.T @ input if self.turned else input.T @ grad


class Deferral:
    """One product and its weight."""

    def __init__(self, kind: ProductKind, weight: Tensor) -> None:
        self.kind, self.weight = kind, weight
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.token: Tensor | None = None

    def launch(self, tensor: Tensor, early: EarlySum) -> Tensor:
        """The tensor for the region's products, from `tensor`, which entered the region."""
        self.weight = as_autocast_would(self.weight)
        # The order of these two lines is that of their backwards, reversed.
        self.token = _Token.apply(self.weight, self.kind, self.kept)
        return _Launch.apply(tensor, early)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """The result of the module for a launched `input`."""
        return _Product.apply(as_autocast_would(input), self.weight, bias, self.token, self.kind, self.kept)


def defer(module: nn.Module, weight: Tensor) -> Deferral | None:
    """A deferral of the gradient of `weight`, which `module` uses. None where that is not possible."""
    if not (weight.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    kind = _kind_of(type(module)) if ON_CPU or not weight.is_cpu else None
    return None if kind is None else Deferral(kind, weight)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, early: EarlySum) -> Tensor:
        ctx.early = early
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.is_grad_enabled():  # with create_graph the sum needs a graph, which an early sum has not
            ctx.early.begin(grad)
        return grad, None


class _Token(torch.autograd.Function):
    """Stands for a weight in the graph. `kept` brings the tensors that its gradient is computed from."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: ProductKind, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.kind, ctx.kept = kind, kept
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.kind.of_weight(*ctx.kept.pop()) if ctx.kept else None, None, None


class _Product(torch.autograd.Function):
    """A product that leaves the weight's gradient to the token. The input's may depend on the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        kind: ProductKind,
        kept: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        ctx.kind, ctx.kept = kind, kept
        ctx.save_for_backward(input, weight)
        # Detached, the result is no view for autograd, so the code that follows may change it in place.
        return kind.forward(input, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        ctx.kept.clear()  # a backward for inputs only left an entry
        of_weight = None
        if torch.is_grad_enabled():
            of_weight = ctx.kind.of_weight(grad, input)  # in a list, a gradient with a graph would keep itself alive
        else:
            ctx.kept.append((grad, input))
        rows = _rows(grad)
        of_input = (rows @ (weight if ctx.kind.turned else weight.T)).view(input.shape)
        of_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, grad.new_zeros(()), None, None


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of a product with `tensor`."""
    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else tensor.dtype


def as_autocast_would(tensor: Tensor) -> Tensor:
    """`tensor` in the precision that the product computes in, so that autograd saves one copy."""
    dtype = autocast_dtype(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _kind_of(module: type[nn.Module]) -> ProductKind | None:
    if module.forward is nn.Linear.forward:
        return ProductKind(F.linear, turned=True)
    if is_transposed_linear(module):
        return ProductKind(lambda input, weight, bias: F.linear(input, weight.T, bias), turned=False)
    return None
