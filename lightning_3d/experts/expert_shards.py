"""The parameters of this rank's experts while they compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.undo import Change
from lightning_3d.tensor.autograd_collectives import local_shard


@contextmanager
def own_shards(module: nn.Module, names: Sequence[str], ranks: int) -> Iterator[dict[str, Tensor]]:
    """Let `module` compute with this rank's shards of the parameters `names` inside.

    Their gradients are those of the tokens of all `ranks`, so an N-th of them is this rank's part of a mean over ranks.
    """
    changes, shards = [], dict[str, Tensor]()
    try:
        for name in names:
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            shards[name] = _Averaged.apply(local_shard(owner._parameters[last]), ranks)  # type: ignore[arg-type]
            changes.append(Change(owner, last, shards[name]))
        yield shards
    finally:
        for change in reversed(changes):
            change.revert()


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


class InGraph(torch.autograd.Function):
    """`result`, whose graph has `others` on every rank. The first `number` get no gradient by this, the rest zeros."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, number: int, *others: Tensor) -> Tensor:
        ctx.number, ctx.shapes = number, [each.shape for each in others[number:]]
        # a checkpoint recomputes up to the last saved tensor: on every rank it has to pass the exchange
        ctx.save_for_backward(result.new_empty(0))
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        asked = zip(ctx.shapes, ctx.needs_input_grad[2 + ctx.number :], strict=True)
        zeros = (grad.new_zeros(shape) if some else None for shape, some in asked)
        return grad, None, *(None,) * ctx.number, *zeros
