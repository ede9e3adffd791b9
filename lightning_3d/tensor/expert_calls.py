"""Calls of experts of which each tensor rank has some: other ranks' experts cost nothing here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.axes.group import Group
from lightning_3d.module.expert_modules import RoutedCall
from lightning_3d.tensor.geometry import TensorSplit

SENTINEL = "_is_expert_parallel"
"""Attribute of Hugging Face's experts: numbers from `num_experts` on are other ranks', and are skipped."""


class OwnRoutes:
    """Calls the module `experts` with the routes to those of one tensor rank. Each has `numbers` of them."""

    def __init__(self, experts: nn.Module, numbers: TensorSplit, group: Group) -> None:
        self.experts, self.group, ((self.start, self.stop),) = experts, group, numbers.pieces[group.rank]
        self.call = RoutedCall(experts)

    def __call__(self, forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        (hidden, index, weights), others = self.call.taken(args, kwargs)
        self.call.check(hidden, index, weights, "Leave them out of tensor_plan.")
        own = (index >= self.start) & (index < self.stop)
        # The code of the module skips other ranks' routes itself, and waits for no value.
        chosen = getattr(getattr(self.experts, "config", None), "_experts_implementation", None)
        if chosen == "grouped_mm" and hasattr(self.experts, SENTINEL):
            local = torch.where(own, index - self.start, self.stop - self.start)
            return self.call.run(forward, [hidden, local, weights.masked_fill(~own, 0.0)], others)
        where = self.group.places(own)
        tokens = where[:-1]
        routes = [hidden[tokens], (index[where] - self.start)[:, None], weights[where][:, None]]
        rows = self.call.run(forward, routes, others)
        result = rows.new_zeros((*hidden.shape[:-1], rows.shape[-1]))
        return result.index_put(tokens, rows, accumulate=True)


def foreign_result(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[Tensor]) -> Tensor:
    """Zeros in place of the result of another rank's expert, with a graph like its owner's, from empty shards."""
    hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    result = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return result + sum(empty.sum().to(dtype) for empty in (hidden[:0], *parameters))
