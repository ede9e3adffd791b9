"""Precision plugins for all axes: the dtypes of computation, and one overflow decision.

With scaled gradients all ranks must skip a step together, so they decide together. `Trainer(precision="...")` gives the
strategy one of Lightning's own plugins, and `convert` returns ours that does the same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.axes.group import Group
from lightning_3d.errors import ConfigurationError
from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks.shards import local


class Precision3D(Precision):
    """The dtypes of computation, equal in every layout.

    `Trainer(precision="...")` is enough. To set the other arguments pass `plugins=[Precision3D("16-mixed", ...)]`.

    Args:
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        device: device type for autocast. By default that of the strategy.
        scaler: the loss scaler of "16-mixed". By default one with torch's defaults.
    """

    around_backward: Callable[..., AbstractContextManager[None]] = staticmethod(lambda *_: nullcontext())
    """Set by the strategy: its end synchronises gradients, before `on_after_backward` reads them. It takes the loss and
    the `inputs` of the backward."""
    root_device: torch.device | None = None
    """The device of this process's computation and communication, set by `compute_on`."""

    def __new__(cls, precision: Any = "32-true", *args: Any, **kwargs: Any) -> "Precision3D":
        if cls is not Precision3D:
            return super().__new__(cls)
        if precision not in _KINDS:
            raise ConfigurationError(
                f"precision={precision!r} is not supported. Use one of {', '.join(map(repr, _KINDS))}."
            )
        return super().__new__(_KINDS[precision])

    def __init__(
        self, precision: Any = "32-true", device: str | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        super().__init__()
        if scaler is not None:
            raise ConfigurationError(
                f"precision={precision!r} does not scale the loss, so omit the scaler, or use '16-mixed'."
            )

    def compute_on(self, device: torch.device) -> None:
        """Set the device. The strategy calls this before any computation."""
        self.root_device = device

    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self.around_backward(args[0], kwargs.get("inputs", ())):
            super().backward(*args, **kwargs)

    def loss_scale(self) -> float:
        """The factor of the loss before backward, against underflow."""
        return 1.0

    def half_dtype(self) -> torch.dtype | None:
        """The dtype to which autocast casts the operands of matrix products; None without autocast."""
        return None

    def loss_factor(self) -> float | Tensor:
        """As `loss_scale`, for the device: a host that reads a number waits for it."""
        return self.loss_scale()


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
        # The parent of forked processes must not ask for CUDA: its children could not use it any more.
        given = scaler is not None or precision != "16-mixed"
        MixedPrecision.__init__(self, precision, device or "cpu", scaler if given else torch.amp.GradScaler("cpu"))
        self._chosen, self._makes_scaler = device, not given

    def __reduce__(self) -> Any:
        return Precision3D, (self.precision, self._chosen, self.scaler)  # pickle does not find it by its name

    def compute_on(self, device: torch.device) -> None:
        super().compute_on(device)
        self.device = self._chosen or device.type  # a Trainer may use the CPU of a machine with GPUs
        if self._makes_scaler and self.scaler is not None and self.scaler._device != self.device:
            state, self.scaler = self.scaler.state_dict(), torch.amp.GradScaler(self.device)
            self.scaler.load_state_dict(state)

    def half_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16

    def loss_scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def loss_factor(self) -> float | Tensor:
        return 1.0 if self.scaler is None else self.scaler.scale(torch.ones((), device=self.root_device))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step as Lightning does, but unscale gradients of all kinds once. All ranks step, or none does.

        A fused optimizer could unscale by itself. It gets unscaled gradients too, and only skips.
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
    """Divide the gradients of `optimizer` by the loss scale. An overflow on one rank counts on all. Collective.

    `_found_inf_per_device` is the scaler's own record, read in torch 2.11 and 2.13. A rank without gradients of this
    optimizer has no record, and the scaler would refuse to step. Offloaded gradients have their record on the CPU, and
    NCCL cannot send from there: ranks communicate from `device`, by default that of the record.
    """
    groups = optimizer.param_groups
    with replaced_entries((group, "params", [*map(_with_local_gradient, group["params"])]) for group in groups):
        scaler.unscale_(optimizer)
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    if device is None:
        device = next(iter(found), torch.device(scaler._device))
    overflowed = torch.zeros((), device=device)
    for record in found.values():
        overflowed = torch.maximum(overflowed, record.to(device))
    Group().all_max(overflowed)
    found.clear()
    found[device] = overflowed


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor with this rank's shard of the gradient in the place of a sharded parameter."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    grad = local(parameter.grad)
    carrier = grad.detach()  # any tensor of its shape and type
    carrier.grad = grad
    return carrier


_KINDS: dict[str, type[Precision3D]] = {
    "32-true": _True,
    "64-true": _Double,
    "bf16-true": _Half,
    "16-true": _Half,
    "bf16-mixed": _Mixed,
    "16-mixed": _Mixed,
}


def convert(plugin: Precision | None) -> Precision3D:
    """Our plugin with the precision of `plugin`, or `plugin` itself where it is ours."""
    if plugin is None or type(plugin) is Precision:
        return Precision3D("32-true")
    if isinstance(plugin, Precision3D):
        return plugin
    if type(plugin) in (DoublePrecision, HalfPrecision):
        return Precision3D(plugin.precision)
    if type(plugin) is MixedPrecision:
        # The Trainer says "cuda" where `accelerator=` is an object: autocast would do nothing on any other device.
        scaler = plugin.scaler
        usual: list[Any] = [{}, torch.amp.GradScaler("cpu").state_dict()]
        unchanged = type(scaler) is torch.amp.GradScaler and scaler.state_dict() in usual
        device = None if plugin.device == "cuda" else plugin.device
        return Precision3D(plugin.precision, device, None if unchanged else scaler)
    raise ConfigurationError(
        f"Strategy3D does not support the precision plugin {type(plugin).__name__}, so its dtypes would be lost."
        f" Use one of precision={', '.join(map(repr, _KINDS))}. For 4 or 8 bits see docs/qlora.md."
    )
