"""The parameters of this rank's experts while they compute."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.anatomy import place_of
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.autograd_collectives import local_shard
from lightning_3d.tensor.axis import Axis


@contextmanager
def own_shards(
    module: nn.Module,
    names: Sequence[str],
    axis: Axis,
    *,
    gathered: bool = False,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[dict[str, Tensor]]:
    """Let `module` compute with this rank's shards of the parameters `names` inside, or with those of all ranks.

    Attributes have the values of `numbers` meanwhile. Gradients are those of the tokens of all ranks, so an N-th of
    them is this rank's part of a mean over ranks.
    """
    shards: dict[str, Tensor] = {}
    for name in names:
        shard = local_shard(module.get_parameter(name))
        shards[name] = _Averaged.apply(shard, axis.size)  # type: ignore[arg-type]
    if gathered:
        shards = dict(zip(names, _Gathered.apply(axis, names, *shards.values()), strict=True))
    with UndoStack() as undo:
        for name, number in numbers.items():
            undo.set(module, name, number)
        for name, shard in shards.items():
            undo.set(*place_of(module, name), shard)
        yield shards


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


class _Gathered(torch.autograd.Function):
    """The experts of all ranks, from `shards` with as many rows on each. Gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, names: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.names = axis, names
        ctx.set_materialize_grads(False)
        rows = [axis.all_rows(shard, shard.numel()).view(-1, *shard.shape[1:]) for shard in shards]
        # frozen ones beside others: their gradients would be computed, and summed over the ranks
        ctx.mark_non_differentiable(
            *(whole for whole, shard in zip(rows, shards, strict=True) if not shard.requires_grad)
        )
        return tuple(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        asked = ctx.needs_input_grad[2:]
        if unused := [name for name, grad, some in zip(ctx.names, grads, asked, strict=True) if some and grad is None]:
            raise UnsupportedError(
                f"the mixture with {unused[0]} computed without it, so ranks cannot sum the gradients of their experts:"
                " one that has none would not answer. Use expert_parallel_size=1."
            )
        size = ctx.axis.size
        return None, None, *(None if grad is None else ctx.axis.reduce_scatter([*grad.chunk(size)]) for grad in grads)


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
