"""What is read off a simulated rank, and when."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.comm.buckets import local
from lightning_3d.dryrun.pretend import Pretend, held
from lightning_3d.dryrun.report import Sent

STEPS = 2
"""Optimizer steps of which the last is reported: the first makes optimizer states and rehearses the pipeline."""


class Watch(Callback):
    """Takes the measurements of one training step and hands them to `done`."""

    def __init__(self, pretend: Pretend, done: Callable[[dict[str, Any]], None]) -> None:
        self.pretend, self.done = pretend, done
        self.seen: dict[str, Any] = {}
        self.steps = 0
        self.begun = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen["setup_peak"] = self.pretend.memory.restart()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.begun:
            self.begun = True
            self.pretend.memory.restart()
            self.pretend.flops = 0
            _ledger(trainer).reset()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        grads = [local(p.grad) for p in module.parameters() if p.grad is not None]
        self.seen["gradients"] = held(grads)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps, self.begun = trainer.global_step, False
        if self.steps >= STEPS:
            self.done(self._measured(trainer, module))

    def _measured(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        parameters = [local(parameter.detach()) for parameter in module.parameters() if not parameter.is_meta]
        sent = tuple(Sent(**row._asdict()) for row in _ledger(trainer).rows())
        return {
            **self.seen,
            "parameters": held(parameters),
            "optimizer": held([local(value) for optimizer in trainer.optimizers for value in _states(optimizer)]),
            "peak": self.pretend.memory.peak,
            "flops": self.pretend.flops,
            "sent": sent,
        }


def _states(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _ledger(trainer: Trainer) -> Any:
    strategy: Any = trainer.strategy
    return strategy._sending.ledger
