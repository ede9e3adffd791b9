"""`Trainer(sync_batchnorm=True)`: batch statistics over the data axis only, on any device."""

from typing import Any

import torch
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, is_plain
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule


class DataBatchNorm(LayerSync):
    """Synchronise batch norm over `group`.

    torch's own SyncBatchNorm needs a CUDA-like device. By default it sums over tensor and pipeline peers too, which
    have the same samples or never call the layer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.undo = group, UndoStack()

    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                synced = _SyncedForward if is_plain(module, _BatchNorm) else _SyncedOwnForward
                add_layer(synced(module, self.group), self.undo)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.undo.close()
        return model


class _SyncedForward(ForwardLayer, rank=Layer.DATA):
    """`_BatchNorm.forward` with the mean and variance of all data ranks."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(module)
        self.group = group

    def __call__(self, input: Tensor) -> Any:  # named as torch names it: callers may
        module = self.module
        module._check_input_dim(input)
        if not module.training:
            return self.next(input)
        mean, variance, count = _moments(input, self.group)
        _track(module, mean.detach(), variance.detach(), count)
        return _normal(input, mean, variance, module.weight, module.bias, module.eps)


class _SyncedOwnForward(_SyncedForward):
    """A forward of the user's, which may do more (an activation), with the mean and variance of all data ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rule = _Sync(self.group)
        if not self.module.training:
            return self.next(*args, **kwargs)
        with Interceptor(rule):
            result = self.next(*args, **kwargs)
        if not rule.synced:
            raise UnsupportedError(
                f"sync_batchnorm=True: {type(self.module).__name__} is a batch norm whose forward does not call"
                " torch.nn.functional.batch_norm, so its statistics would be those of one rank. Call that function,"
                " or use sync_batchnorm=False."
            )
        return result


class _Sync(Rule):
    """Compute calls of `batch_norm` with the mean and variance of all data ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.synced = False

    def before(self, call: Call) -> Call:
        if call.func is not F.batch_norm:
            return call
        self.synced = True
        return call._replace(func=self._batch_norm)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance, count = _moments(input, self.group)
        if running_mean is not None and running_var is not None:
            _average(running_mean, running_var, mean.detach(), variance.detach(), count, momentum)
        return _normal(input, mean, variance, weight, bias, eps)


def _normal(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    normal = (x.to(mean.dtype) - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
    if weight is not None and bias is not None:
        normal = normal * weight.view(shape) + bias.view(shape)
    return normal.to(x.dtype)


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and (biased) variance per channel over every rank of `group`, and how many values went into them."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    dims = [dim for dim in range(x.ndim) if dim != 1]
    local = x.new_full((1,), x.numel() // x.shape[1])
    sums = all_reduce(torch.cat([x.sum(dims), local]), group=group)
    count = sums[-1].detach()  # a tensor: a number would make the host wait for the device
    mean = sums[:-1] / count
    shape = (1, -1) + (1,) * (x.ndim - 2)
    squares = all_reduce(((x - mean.view(shape)) ** 2).sum(dims), group=group)
    return mean, squares / count, count


def _track(module: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum: Tensor | float | None = module.momentum
    if momentum is None:  # a mean of all batches; a number would make the host wait for the device
        momentum = 1.0 / module.num_batches_tracked.to(module.running_mean.dtype)
    _average(module.running_mean, module.running_var, mean, variance, count, momentum)


def _average(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: Tensor, momentum: Tensor | float
) -> None:
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(running_var.dtype), momentum)
