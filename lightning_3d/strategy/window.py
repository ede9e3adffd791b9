"""`Window`: the batches whose gradients one optimizer step adds up."""

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_3d.precision import Precision3D


@dataclass
class Window:
    """The accumulation window of the present batch."""

    trainer: Trainer
    module: LightningModule
    last: bool = True
    """True on the last batch: gradients are reduced over the data ranks after it."""

    @property
    def first(self) -> bool:
        """True on the first batch, by Lightning's rule for zeroing gradients: an epoch may end within a window."""
        automatic: bool = self.module.automatic_optimization  # type: ignore[assignment]
        return automatic and self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0

    def scale(self, plugin: Precision3D) -> float | Tensor:
        """The factor on the loss of a batch before backward: its share of the window, times the loss scale."""
        return plugin.loss_factor() / self.trainer.accumulate_grad_batches
