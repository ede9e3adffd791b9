"""`RankMeter`: reads memory, FLOPs and sent bytes off a rank while it trains."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.axes.ledger import Ledger
from lightning_3d.ranks.shards import local
from lightning_3d.tools.dryrun.fake_device import FakeDevice, storage_bytes

LARGE = 500_000_000
"""Parameters from which one optimizer step is run, not two."""


def steps_of(module: nn.Module) -> int:
    """The number of optimizer steps to run. The last is reported.

    Two, since the first may send in other buckets; one for a large module, whose steps take long.
    """
    return 1 if sum(parameter.numel() for parameter in module.parameters()) > LARGE else 2


class RankMeter(Callback):
    """Measures the last of `steps` optimizer steps and passes the result to `done`."""

    def __init__(self, pretend: FakeDevice, steps: int, done: Callable[[dict[str, Any]], None]) -> None:
        self.pretend, self.steps, self.done = pretend, steps, done
        self.found: dict[str, Any] = {}
        self.stepped = 0
        self.peak = 0
        self.begun = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.found["setup_peak"] = self.pretend.memory.restart()
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False  # the metric of a plateau may come from validation, which is skipped

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.begun:
            self.begun = True
            self.before = _states(trainer)
            self.pretend.memory.restart()
            self.pretend.flops = 0
            ledger_of(trainer).reset()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        self.found["gradients"] = storage_bytes([local(p.grad) for p in module.parameters() if p.grad is not None])
        self.peak = self.pretend.memory.restart()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.stepped:
            return
        self.stepped, self.begun = trainer.global_step, False
        if self.stepped >= self.steps:
            self.done(self._measured(trainer, module))

    def _measured(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        parameters = [local(parameter.detach()) for parameter in module.parameters() if not parameter.is_meta]
        states = _states(trainer)
        return {
            **self.found,
            "parameters": storage_bytes(parameters),
            "optimizer": states,
            # the first step of an optimizer allocates its states; every later step has them from the start
            "peak": max(self.peak + states - self.before, self.pretend.memory.peak),
            "flops": self.pretend.flops,
            "sent": tuple(ledger_of(trainer).rows()),
        }


def _states(trainer: Trainer) -> int:
    """Bytes of the optimizer states of this rank."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return storage_bytes([local(value) for state in states for value in state.values() if isinstance(value, Tensor)])


def ledger_of(trainer: Trainer) -> Ledger:
    strategy: Any = trainer.strategy
    return strategy.data_axis.ledger
