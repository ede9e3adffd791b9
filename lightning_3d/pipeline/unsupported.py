"""Features that a pipeline does not support, refused before training."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_3d.errors import NO_PIPELINE, UnsupportedError


def check_automatic(module: Any) -> None:
    """Raise `UnsupportedError` for manual optimization (a GAN)."""
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            "Manual optimization cannot run under a pipeline: the backward of a microbatch starts before training_step"
            " has run for the next one, so training_step cannot call it. Use automatic optimization, or"
            f" {NO_PIPELINE}."
        )


def check_supported(module: Any, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Raise `UnsupportedError` for manual optimization and for optimizers that evaluate the loss several times.

    Warns of an overridden `backward`, which may do no more than Lightning's.
    """
    check_automatic(module)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                f"{type(optimizer).__name__} evaluates the loss several times per step from flattened parameters, of"
                " which a pipeline rank has only those of its stage. Use another optimizer, or"
                f" {NO_PIPELINE}."
            )
    if isinstance(module, LightningModule) and is_overridden("backward", module):
        rank_zero_warn(
            f"{type(module).__name__}.backward is called under a pipeline once the gradients are there: changes that it"
            " makes to the loss have no effect. Do it in training_step."
        )
