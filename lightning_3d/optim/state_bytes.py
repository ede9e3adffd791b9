"""Optimizer states per parameter, counted by stepping a copy of the optimizer on small parameters."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.optim.probe import step_small


def states_per_parameter_byte(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the average bytes of states for each byte of a trained parameter; None where a copy cannot step.

    States that are smaller than their parameter (step counts, a row of means) are left out.
    """
    states, trained = 0.0, 0
    for optimizer in optimizers:
        sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in optimizer.param_groups]
        try:
            twin = step_small(optimizer, steps=1).twin if any(sizes) else optimizer
        except Exception:  # an optimizer of the user's own may count on its own parameters
            return None
        for group, size in zip(twin.param_groups, sizes, strict=True):
            states += size * bytes_per_byte(twin, group["params"]) if size else 0
        trained += sum(sizes)
    return states / trained if trained else 0.0


def bytes_per_byte(optimizer: Optimizer, parameters: Sequence[Tensor]) -> float:
    """Return the bytes of states for each byte of `parameters`."""
    kept = [(p, value) for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    states = sum(value.nbytes for p, value in kept if value.numel() >= p.numel())
    return states / sum(p.nbytes for p in parameters)
