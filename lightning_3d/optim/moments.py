"""Optimizer states per parameter, counted by stepping a copy of the optimizer on a small one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.optim.probe import twin_of


def moments(optimizers: Sequence[Optimizer]) -> float | None:
    """Bytes of states for each byte of a trained parameter, on average; None where a copy cannot step a small one.

    States that are smaller than their parameter (step counts, a row of means) are left out.
    """
    states, trained = 0.0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            size = sum(parameter.numel() for parameter in group["params"] if parameter.requires_grad)
            try:
                states += size * _of_group(optimizer, group) if size else 0
            except Exception:  # an optimizer of the user's own may count on its own parameters
                return None
            trained += size
    return states / trained if trained else 0.0


def _of_group(optimizer: Optimizer, group: dict[str, object]) -> float:
    with torch.random.fork_rng(devices=[]):
        small = nn.Parameter(torch.ones(8, 8))
        small.grad = torch.ones(8, 8)
        twin = twin_of(optimizer, {**group, "params": [small]})
        twin.step()
    kept = [
        value for value in twin.state[small].values() if isinstance(value, Tensor) and value.numel() >= small.numel()
    ]
    return sum(value.nbytes for value in kept) / small.nbytes
