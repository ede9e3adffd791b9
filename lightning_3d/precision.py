"""Precision plugins that know about every axis: clipping over sharded, split and replicated parameters at once.

`Trainer(precision="...")` gives the strategy one of Lightning's own plugins; `convert` returns ours that does the same.
"""

from collections.abc import Callable

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError

ClipNorm = Callable[[list[torch.nn.Parameter], float], Tensor]


class AxisPrecision(Precision):
    """Clip by the norm that one process would have seen."""

    clip_norm: ClipNorm | None = None
    """Set by the strategy: clips in place, returns the norm."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.clip_norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_norm(list(self.main_params(optimizer)), float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        grads = [parameter.grad for parameter in self.main_params(optimizer) if parameter.grad is not None]
        for grad in grads:
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.clamp_(-clip_val, clip_val)

    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward, against underflow."""
        return 1.0

    def policy(self) -> MixedPrecisionPolicy:
        """What FSDP2 casts parameters and gradients to."""
        return MixedPrecisionPolicy()


class _True(AxisPrecision):
    pass


class _Double(AxisPrecision, DoublePrecision):
    pass


class _Half(AxisPrecision, HalfPrecision):
    pass


class _Mixed(AxisPrecision, MixedPrecision):
    __qualname__ = "MixedPrecision"  # the checkpoint key of the loss scale: a stock 16-mixed checkpoint resumes here

    def loss_scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def policy(self) -> MixedPrecisionPolicy:
        """Gather parameters in the compute type, reduce gradients in fp32; what else is cast is autocast's business."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def convert(plugin: Precision | None) -> AxisPrecision:
    """Our plugin that does what `plugin` says, or `plugin` itself where it is one of ours."""
    if plugin is None or type(plugin) is Precision:
        return _True()
    if isinstance(plugin, AxisPrecision):
        return plugin
    if type(plugin) is DoublePrecision:
        return _Double()
    if type(plugin) is HalfPrecision:
        return _Half(plugin.precision)  # type: ignore[arg-type]
    if type(plugin) is MixedPrecision:
        return _Mixed(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
    raise ConfigurationError(
        f"Strategy3D cannot keep the precision plugin {type(plugin).__name__}. Use one of precision="
        "'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed', '16-mixed'."
    )
