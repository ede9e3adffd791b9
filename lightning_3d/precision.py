"""Precision plugins that know about every axis: clipping over sharded, split and replicated parameters at once, and
one decision of all ranks on whether scaled gradients have overflowed.

`Trainer(precision="...")` gives the strategy one of Lightning's own plugins; `convert` returns ours that does the same.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.errors import ConfigurationError
from lightning_3d.ranks.shards import local

ClipNorm = Callable[[list[torch.nn.Parameter], float], Tensor]


class Precision3D(Precision):
    """What is computed in which dtype, the same in every layout.

    `Trainer(precision="...")` is enough; to set the rest give a plugin: `plugins=[Precision3D("16-mixed", ...)]`.

    Args:
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        device: type of the device that autocast is for; that of the strategy if not given.
        scaler: the loss scaler of "16-mixed", instead of one with torch's defaults.
    """

    clip_norm: ClipNorm | None = None
    """Set by the strategy: clips in place, returns the norm."""
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Set by the strategy: at its end gradients are synchronised, before `on_after_backward` looks at them."""
    root_device: torch.device | None = None
    """What this process computes on and the ranks communicate from, once `compute_on` has been told."""

    def __new__(cls, precision: Any = "32-true", *args: Any, **kwargs: Any) -> "Precision3D":
        if cls is not Precision3D:
            return super().__new__(cls)
        if precision not in _KINDS:
            raise ConfigurationError(f"precision={precision!r} is none of {', '.join(map(repr, _KINDS))}.")
        return super().__new__(_KINDS[precision])

    def __init__(
        self, precision: Any = "32-true", device: str | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        super().__init__()
        if scaler is not None:
            raise ConfigurationError(
                f"precision={precision!r} scales no loss: leave the scaler out, or use '16-mixed'."
            )

    def compute_on(self, device: torch.device) -> None:
        """Called by the strategy before anything is computed."""
        self.root_device = device

    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self.around_backward():
            super().backward(*args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.clip_norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_norm(list(self.main_params(optimizer)), float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        grads = [parameter.grad for parameter in self.main_params(optimizer) if parameter.grad is not None]
        for grad in grads:
            local(grad).clamp_(-clip_val, clip_val)

    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward, against underflow."""
        return 1.0

    def policy(self) -> MixedPrecisionPolicy:
        """What FSDP2 casts parameters and gradients to: nothing.

        Mixed precision is autocast's business, so that the numbers are those of one device (norms and losses in fp32
        with fp32 weights); gathering half-size parameters would save wire bytes but hand norms rounded weights, which
        some kernels refuse.
        """
        return MixedPrecisionPolicy()


class _True(Precision3D):
    pass


class _Double(Precision3D, DoublePrecision):
    pass


class _Half(Precision3D, HalfPrecision):
    def __init__(self, precision: Any, device: str | None = None, scaler: Any = None) -> None:
        Precision3D.__init__(self, precision, device, scaler)
        HalfPrecision.__init__(self, precision)


class _Mixed(Precision3D, MixedPrecision):
    __qualname__ = "MixedPrecision"  # the checkpoint key of the loss scale: a stock 16-mixed checkpoint resumes here

    def __init__(self, precision: Any, device: str | None = None, scaler: Any = None) -> None:
        MixedPrecision.__init__(self, precision, device or _accelerator(), scaler)
        self._chosen = device

    def __reduce__(self) -> Any:
        return Precision3D, (self.precision, self._chosen, self.scaler)  # under its own name it cannot be found

    def compute_on(self, device: torch.device) -> None:
        super().compute_on(device)
        self.device = self._chosen or device.type  # on a machine with GPUs the Trainer may still be told to use the CPU

    def loss_scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """As Lightning's, but gradients of all kinds are unscaled, once, and all ranks step or none does.

        A fused optimizer could unscale by itself; it is given unscaled gradients too, and only skips.
        """
        scaler = self.scaler
        if scaler is None or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        skipped = result is None and model.automatic_optimization
        if not skipped:
            unscale(scaler, optimizer, self.root_device)
        self._after_closure(model, optimizer)
        if skipped:
            return result
        output = scaler.step(optimizer, **kwargs)
        scaler.update()
        return output


def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer, device: torch.device | None) -> None:
    """Divide the gradients of `optimizer` by the loss scale; an overflow on one rank is one on all. Collective.

    `_found_inf_per_device` is the scaler's own record, read in torch 2.11 and 2.13. A rank may hold no gradient of this
    optimizer, then it has no record yet and would refuse to step. Offloaded gradients have theirs on the CPU, which
    NCCL does not send from.

    Args:
        scaler: that the loss was scaled with.
        optimizer: its states are left alone.
        device: that the ranks communicate from; that of the record if none is known.
    """
    with _local_gradients(optimizer):
        scaler.unscale_(optimizer)
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    if device is None:
        device = next(iter(found), torch.device(scaler._device))
    overflowed = torch.zeros((), device=device)
    for record in found.values():
        overflowed = torch.maximum(overflowed, record.to(device))
    if dist.is_initialized():
        dist.all_reduce(overflowed, op=dist.ReduceOp.MAX)
    found.clear()
    found[device] = overflowed


@contextmanager
def _local_gradients(optimizer: Optimizer) -> Iterator[None]:
    """While entered, parameters of `optimizer` that ranks share are stood in for by what has this rank's gradient."""
    held = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [_with_local_gradient(parameter) for parameter in parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters


def _with_local_gradient(parameter: Tensor) -> Tensor:
    if not isinstance(parameter.grad, DTensor):
        return parameter
    grad = local(parameter.grad)
    bearer = grad.detach()  # any tensor of its shape and type
    bearer.grad = grad
    return bearer


def _accelerator() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


_KINDS: dict[str, type[Precision3D]] = {
    "32-true": _True,
    "64-true": _Double,
    "bf16-true": _Half,
    "16-true": _Half,
    "bf16-mixed": _Mixed,
    "16-mixed": _Mixed,
}


def convert(plugin: Precision | None) -> Precision3D:
    """Our plugin that does what `plugin` says, or `plugin` itself where it is one of ours."""
    if plugin is None or type(plugin) is Precision:
        return Precision3D("32-true")
    if isinstance(plugin, Precision3D):
        return plugin
    if type(plugin) is DoublePrecision:
        return Precision3D("64-true")
    if type(plugin) is HalfPrecision:
        return Precision3D(plugin.precision)
    if type(plugin) is MixedPrecision:
        return Precision3D(plugin.precision, plugin.device, plugin.scaler)
    raise ConfigurationError(
        f"Strategy3D cannot keep the precision plugin {type(plugin).__name__}. Use one of precision="
        f"{', '.join(map(repr, _KINDS))}."
    )
