"""Optimizers that look at a whole matrix (its rows' means, its singular values) step on whole tensors.

One parameter at a time is made whole with its gradient and state, stepped, and dealt out again: more is sent than the
optimizer's arithmetic is worth, but the numbers are those of one device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_3d.local import local
from lightning_3d.zero.replaced_step import replace_step

WHOLE: tuple[type[Optimizer], ...] = tuple(
    getattr(optim, name)
    for name in ("Adafactor", "Muon")
    if hasattr(optim, name)  # Muon came with torch 2.9
)
Convert = Callable[[nn.Parameter, Tensor], Tensor]


def step_on_wholes(optimizer: Optimizer, whole: Convert, part: Convert) -> Callable[[], None]:
    """Have `optimizer.step` work on whole tensors; returns what undoes it."""
    original = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _step_one(self, group, parameter, original, whole, part)
        finally:
            self.param_groups = groups
        return loss

    return replace_step(optimizer, step)


@torch.no_grad()
def _step_one(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    step: Callable[[], Any],
    whole: Convert,
    part: Convert,
) -> None:
    assert parameter.grad is not None
    full = nn.Parameter(whole(parameter, parameter.detach()))
    full.grad = whole(parameter, parameter.grad)
    if parameter in optimizer.state:
        optimizer.state[full] = _converted(optimizer.state.pop(parameter), parameter, whole)
    optimizer.param_groups = [{**group, "params": [full]}]
    step()
    local(parameter.detach()).copy_(local(part(parameter, full.detach())))
    optimizer.state[parameter] = _converted(optimizer.state.pop(full, {}), parameter, part)


def _converted(state: dict[str, Any], parameter: nn.Parameter, convert: Convert) -> dict[str, Any]:
    return {
        key: convert(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }
