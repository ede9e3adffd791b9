"""LBFGS, which searches with all parameters as one vector and computes the loss several times in a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS

from lightning_3d.local import local
from lightning_3d.zero.replaced_step import replace_step
from lightning_3d.zero.whole_step import Convert


def search_as_one(
    optimizer: LBFGS, whole: Convert, part: Convert, mean: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """Have `optimizer.step` search with whole parameters and the loss of all ranks; returns what undoes it.

    With a loss of its own each rank would stop searching at another point. What it searches with, every rank holds
    whole: parameters, gradients and as many vectors of all of them as `history_size` says, twice.

    Reads `_params`, where LBFGS (torch 2.11 and 2.13) keeps what it steps; `tests/same/test_optimizers.py` fails when
    that changes.
    """
    original = optimizer.step

    def step(self: LBFGS, closure: Callable[[], Any]) -> Any:
        with torch.no_grad():
            held = self.param_groups[0]["params"]
            wholes = [_whole(parameter, whole) for parameter in held]

            def shared() -> Any:
                _deal_out(held, wholes, part)
                with torch.enable_grad():
                    loss = closure()
                for parameter, full in zip(held, wholes, strict=True):
                    if full is not parameter:
                        full.grad = None if parameter.grad is None else whole(parameter, parameter.grad)
                return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

            self._params = wholes
            _rename(self, held[0], wholes[0])
            try:
                return original(shared)
            finally:
                _deal_out(held, wholes, part)
                self._params = held
                _rename(self, wholes[0], held[0])

    return replace_step(optimizer, step)


def _whole(parameter: nn.Parameter, whole: Convert) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(whole(parameter, parameter.detach()), requires_grad=parameter.requires_grad)


def _deal_out(held: list[nn.Parameter], wholes: list[nn.Parameter], part: Convert) -> None:
    for parameter, full in zip(held, wholes, strict=True):
        if full is not parameter:
            local(parameter.detach()).copy_(local(part(parameter, full.detach())))


def _rename(optimizer: LBFGS, old: nn.Parameter, new: nn.Parameter) -> None:
    """Its state, which is of all parameters, is kept under the first one."""
    if old is not new and old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
