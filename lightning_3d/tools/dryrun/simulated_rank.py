"""One simulated rank: a fork of the process that was about to train. It runs to the end of a step."""

import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore  # private to torch, read in 2.13

from lightning_3d.axes.ledger import Ledger
from lightning_3d.errors import Lightning3DError
from lightning_3d.module.undo import do_nothing
from lightning_3d.ranks.process_groups_private import forget_groups
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.tools.dryrun.cluster import World, no_pointers
from lightning_3d.tools.dryrun.fake_device import FakeDevice, storage_bytes
from lightning_3d.tools.dryrun.lone_rank import become_lone_rank
from lightning_3d.tools.dryrun.report import RankReport

SAVING = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end", "on_exception")
"""Hooks in which Lightning's callbacks save."""


class SimulatedRank:
    """A child process that ends with a report."""

    def __init__(self, world: World, rank: int, trainer: Trainer, module: nn.Module, fit: Callable[[], Any]) -> None:
        self.rank = rank
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the child has ended)
        self._read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            for stream in (1, 2):
                os.dup2(self.log.fileno(), stream)
            sys.stdout = sys.stderr = self.log
            _live(world, rank, trainer, module, fit, write)
        os.close(write)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def report(self) -> RankReport:
        """Wait until the child ends, and return its report."""
        with open(self._read, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        self.log.seek(0)
        log = self.log.read()
        self.log.close()
        if not raw:
            code = os.waitstatus_to_exitcode(status)
            found: dict[str, Any] = {"error": f"rank {self.rank} ended with exit code {code} and no report"}
        else:
            found = pickle.loads(raw)
        return RankReport(rank=self.rank, log=log if found.get("error") else "", **found)


_NEW_PROCESS = (
    " This process has trained before, and its fork cannot run a backward: start the dry run in a new process."
)
LARGE = 500_000_000
"""Parameters from which one optimizer step is run, not two: its steps take long."""


class RankMeter(Callback):
    """Measures the last of `steps` optimizer steps and passes the result to `done`."""

    def __init__(self, pretend: FakeDevice, steps: int, done: Callable[[dict[str, Any]], None]) -> None:
        self.pretend, self.steps, self.done = pretend, steps, done
        self.found: dict[str, Any] = {}
        self.stepped = 0
        self.peak = 0
        self.begun = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # a parameter that no operation has returned yet is not counted
        self.pretend.memory.add([local(parameter.detach()) for parameter in module.parameters()])
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
    states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
    return storage_bytes([local(tensor) for tensor in tensors_in(states)])


def ledger_of(trainer: Trainer) -> Ledger:
    strategy: Any = trainer.strategy
    return strategy.data_axis.ledger


def _live(world: World, rank: int, trainer: Trainer, module: nn.Module, fit: Callable[[], Any], write: int) -> NoReturn:
    gc.freeze()  # inherited garbage may end a store or a group, whose threads a fork does not have
    code, parent = 0, os.getppid()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            no_pointers()
            found = _run(world, rank, trainer, module, fit)
        said = dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning)
        found["warnings"] = (*said, *found.get("warnings", ()))
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(found, pipe)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a fork must not run the exit handlers of the process that it was forked from
    raise AssertionError


def _leave_with(parent: int) -> None:
    """End this process when its parent, which waits for the report, is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class _Over(BaseException):
    """Ends a simulated rank once everything is measured. A BaseException: `except Exception` does not catch it."""


def _run(world: World, rank: int, trainer: Trainer, module: nn.Module, fit: Callable[[], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def done(measured: dict[str, Any]) -> None:
        found.update(measured)
        raise _Over

    try:
        _become(world, rank)
        become_lone_rank(world, trainer.strategy)
        world.fake_parameters(module)
        large = sum(parameter.numel() for parameter in module.parameters()) > LARGE
        steps = 1 if large else 2  # the first may send in other buckets
        _shorten(trainer, RankMeter(world.pretend, steps, done))
        with world.pretend:
            fit()
    except _Over:
        return {**found, "warnings": _about_values(world.pretend.reads), "calls": tuple(world.pretend.calls)}
    except Lightning3DError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        traceback.print_exc()
        started = "fork-based multiprocessing" in str(error)
        return {"error": f"{type(error).__name__}: {error}{started * _NEW_PROCESS}"}
    too_short = (
        "training ended before the dry run had measured an optimizer step. It needs the batches of two steps: raise"
        " max_steps or limit_train_batches of the Trainer, or give the dataset more samples"
    )
    return {"error": too_short}


def _become(world: World, rank: int) -> None:
    torch.set_num_threads(1)  # a fork has none of the OpenMP threads of its parent
    world.rank = rank
    forget_groups()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world.cluster.devices)


def _shorten(trainer: Trainer, meter: RankMeter) -> None:
    """Switch off validation, logging and saving. The meter ends training."""
    trainer.num_sanity_val_steps = trainer.limit_val_batches = 0
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            vars(callback).update(dict.fromkeys(SAVING, do_nothing))  # tensors have no values
        elif isinstance(callback, EarlyStopping):
            callback.strict = False  # its metric may come from validation
    trainer.save_checkpoint = do_nothing  # type: ignore[method-assign]
    trainer.callbacks = [meter, *callbacks]  # type: ignore[attr-defined]


def _about_values(places: set[str]) -> tuple[str, ...]:
    if not places:
        return ()
    return (
        "The step reads the value of a tensor in Python (`item`, a branch). A dry run has shapes only and went on with"
        f" 1, and with the branch for false: {', '.join(sorted(places))}",
    )
