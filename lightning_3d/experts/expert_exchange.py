"""The exchange of tokens: a row for each expert that a token goes to, sent to the owner of that expert and back.

Rows are sorted by expert: those of one owner are neighbours, and it has to learn only their number for each expert.
`to_owners` and `to_tokens` are collectives, and each is the backward of the other. They run on every rank, also on one
that has no rows for anybody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.axis import Axis


@dataclass(frozen=True, eq=False)
class TokenRoute:
    """The rows that a rank sends, and those that it receives as an owner of experts."""

    axis: Axis
    order: Tensor
    """The pairs of a token and one of its experts, numbered by token, in the order of rows."""
    tokens: Tensor
    """The token of each row."""
    choices: int
    """Experts of a token."""
    sends: Sequence[int]
    """Rows for each owner."""
    receives: Sequence[int]
    """Rows of each rank."""
    experts: Tensor
    """For each received row the expert, numbered among those of this rank."""
    loads: Tensor
    """Received rows of each expert of this rank."""

    @classmethod
    def of(cls, index: Tensor, count: int, axis: Axis) -> "TokenRoute":
        """The route of tokens with the experts `index` (one row for each token), of `count` experts. Collective.

        The numbers of rows are exchanged on the device, and read once.
        """
        pairs, own = index.reshape(-1), count // axis.size
        sent = pairs.new_zeros(count).scatter_add_(0, pairs, torch.ones_like(pairs))
        got = axis.all_to_all(sent, [own] * axis.size, [own] * axis.size)
        sends, receives = axis.group.read_sizes(sent, got, pairs.numel())
        order = pairs.argsort(stable=True)
        numbers = torch.arange(own, device=pairs.device).repeat(axis.size)
        experts = numbers.repeat_interleave(got, output_size=sum(receives))
        loads = got.view(axis.size, own).sum(0)
        return cls(axis, order, order // index.shape[-1], index.shape[-1], sends, receives, experts, loads)

    def forth(self, *rows: Tensor) -> list[Tensor]:
        """The rows of other ranks and this one for the experts here, in one message."""
        return exchange(rows, self.axis, self.sends, self.receives)

    def back(self, *rows: Tensor) -> list[Tensor]:
        """The rows of tokens of this rank, from all owners."""
        return exchange(rows, self.axis, self.receives, self.sends)

    def summed(self, rows: Tensor) -> Tensor:
        """For each token the sum of its rows."""
        return self.by_pair(rows).unflatten(0, (-1, self.choices)).sum(1)

    def by_pair(self, rows: Tensor) -> Tensor:
        """The rows in the order of tokens."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def exchange(rows: Sequence[Tensor], axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> list[Tensor]:
    """The rows that each rank sends here, so many of each, in one message."""
    packed = [each.contiguous().view(torch.uint8) for each in rows]
    widths = [each.shape[1] for each in packed]
    buffer = torch.cat(packed, 1) if len(packed) > 1 else packed[0]
    width = sum(widths)
    arrived = axis.all_to_all(buffer.view(-1), [n * width for n in sends], [n * width for n in receives])
    columns = arrived.view(-1, width).split(widths, 1)
    return [part.contiguous().view(each.dtype) for part, each in zip(columns, rows, strict=True)]


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, route: TokenRoute) -> tuple[Tensor, ...]:
        ctx.route, ctx.shape = route, weights.shape
        rows, factors = hidden.index_select(0, route.tokens), weights.reshape(-1, 1).index_select(0, route.order)
        return tuple(route.forth(rows, factors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor, factors: Tensor) -> Any:
        route = ctx.route
        rows, factors = route.back(rows, factors)
        return route.summed(rows), route.by_pair(factors).view(ctx.shape), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: TokenRoute) -> Tensor:
        ctx.route = route
        return route.summed(*route.back(rows))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        route = ctx.route
        return route.forth(grad.index_select(0, route.tokens))[0], None


def to_owners(hidden: Tensor, weights: Tensor, route: TokenRoute) -> tuple[Tensor, Tensor]:
    """The rows and factors for the experts of this rank, from the tokens of all ranks and the weights of experts."""
    return _ToOwners.apply(hidden, weights, route)


def to_tokens(rows: Tensor, route: TokenRoute) -> Tensor:
    """For each token of this rank the sum of its results, from the results of each rank's experts."""
    return _ToTokens.apply(rows, route)


class InGraph(torch.autograd.Function):
    """`result`, whose graph has `others` on every rank. They get no gradient by this, or zeros."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, zeros: bool, *others: Tensor) -> Tensor:
        ctx.zeros, ctx.shapes = zeros, [each.shape for each in others]
        # a checkpoint recomputes up to the last saved tensor: on every rank it has to pass the exchange
        ctx.save_for_backward(result.new_empty(0))
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        asked = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        return grad, None, *(grad.new_zeros(shape) if ctx.zeros and some else None for shape, some in asked)
