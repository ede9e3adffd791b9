"""`Trainer(sync_batchnorm=True)`: batch statistics over the data axis only, on any device."""

import torch
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class DataBatchNorm(LayerSync):
    """Synchronise batch norm over `group`.

    torch's own SyncBatchNorm needs a CUDA-like device. By default it sums over tensor and pipeline peers too, which
    have the same samples or never call the layer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.undone: list[tuple[nn.Module, dict[str, object]]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                module.forward = _SyncedForward(module, self.group)  # type: ignore[assignment,method-assign]
                self.undone.append((module, module.__dict__))
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for _, attributes in self.undone:
            del attributes["forward"]
        self.undone = []
        return model


class _SyncedForward:
    """`_BatchNorm.forward` with the mean and variance of all data ranks."""

    def __init__(self, module: _BatchNorm, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        module._check_input_dim(x)
        if not module.training:
            return type(module).forward(module, x)
        mean, variance, count = _moments(x, self.group)
        _track(module, mean.detach(), variance.detach(), count)
        shape = (1, -1) + (1,) * (x.ndim - 2)
        normal = (x.to(mean.dtype) - mean.view(shape)) * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normal = normal * module.weight.view(shape) + module.bias.view(shape)
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
    momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_((variance * count / (count - 1).clamp(min=1)).to(module.running_var.dtype), momentum)


def syncs_statistics(module: nn.Module) -> bool:
    """Return True if a forward of `module` talks to other data ranks."""
    return any(
        isinstance(each, nn.SyncBatchNorm) or isinstance(vars(each).get("forward"), _SyncedForward)
        for each in module.modules()
    )
