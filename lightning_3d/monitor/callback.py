"""`Monitor3D`: Lightning's hooks, the logger and the progress bar. `StepClock` and `Watch` do the work."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_3d.errors import ConfigurationError
from lightning_3d.extensions import load
from lightning_3d.launch import job_folder
from lightning_3d.layout import PIPELINE_AXIS
from lightning_3d.module.amounts import show_bytes, show_seconds
from lightning_3d.module.host_memory import peak_bytes
from lightning_3d.module.operation_count import OperationCount
from lightning_3d.module.torch_private import uncompiled
from lightning_3d.module.undo import UndoStack
from lightning_3d.monitor.pass_record import PassRecorder
from lightning_3d.monitor.step_clock import Spent, StepClock
from lightning_3d.monitor.watch import BlockSums, Board, Note, Watch
from lightning_3d.ranks import talk
from lightning_3d.sandbox.interceptor import is_users
from lightning_3d.sandbox.trees import leaves

_IDS = (torch.int64, torch.int32)


class BatchSize:
    """Adds up. The first batch decides: one with a table of integers (samples x positions) is counted in tokens."""

    def __init__(self) -> None:
        self.unit = ""
        self._total, self._batches = 0, 0

    def add(self, batch: Any) -> None:
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        ids = next((tensor for tensor in tensors if tensor.ndim == 2 and tensor.dtype in _IDS), None)
        if not self.unit:
            self.unit = "samples" if ids is None else "tokens"
        self._batches += 1
        if self.unit == "tokens" and ids is not None:
            self._total += ids.numel()
        elif tensors:
            self._total += tensors[0].shape[0]

    @property
    def mean(self) -> float:
        return self._total / max(1, self._batches)


PREFIX = "3d/"
WARM_UP = 2
"""Batches that are not timed. The first builds things, and in the second operations are counted."""
TIMED = {"[_TrainingEpochLoop].train_dataloader_next": "data", "run_training_batch": "step"}
"""Lightning's names, in profilers, for waiting for the loader and for a batch without the hooks around it."""


class Monitor3D(Callback):
    """Log speed, shares of a step and memory of a training with `Strategy3D`, and warn of what slows or spoils it.

    Without one of yours, the strategy adds one that logs nothing: it warns, and sums up at the end of `fit`.

    Args:
        peak_tflops: TFLOP/s that a device could reach, for the MFU. Known for the GPUs of the catalogue.
        timetable_steps: batches, after two that warm up, in which the passes of the pipeline are timed for
            `lightning-3d timeline`.
    """

    logs = True

    def __init__(self, peak_tflops: float | None = None, timetable_steps: int = 0) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigurationError(f"peak_tflops={peak_tflops!r} is no rate above 0. Leave it out, or give TFLOP/s.")
        if not isinstance(timetable_steps, int) or timetable_steps < 0:
            raise ConfigurationError(
                f"timetable_steps={timetable_steps!r} is no number of batches. Leave it out, or give 3."
            )
        self._given_peak, self._timetable_steps = peak_tflops, timetable_steps
        self._recorder: PassRecorder | None = None
        self._counter: OperationCount | None = None
        self._counting, self._closing = ExitStack(), UndoStack()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_counter", "_clock", "_sums", "_watch", "_recorder", "_experts")
        at_work: dict[str, Any] = {name: None for name in own if name in vars(self)}
        return {**vars(self), **at_work, "_counting": ExitStack(), "_closing": UndoStack()}  # a copy is not at work

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(trainer.strategy, "strategy_name", None) != "3d":
            raise ConfigurationError(
                f"Monitor3D reads the clocks of Strategy3D, and this Trainer has {type(trainer.strategy).__name__}."
                " Use Trainer(strategy=Strategy3D(...)), which also runs on one device, or leave the callback out."
            )

    # ---- Lightning's hooks ---------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self._device: torch.device = strategy.root_device
        self._times_waits = self._device.type == "cpu"  # on a GPU the device waits, not the host
        self._data_ranks: int = strategy.layout.data_parallel_size
        self._experts, self._owners = strategy.run.parallel.experts, strategy.layout.expert_parallel_size
        self._stage_ranks: int = strategy.world_size // strategy.layout.sizes[PIPELINE_AXIS]
        peak = load("device peak")(self._device, str(strategy.precision_plugin.precision))
        self._peak = self._given_peak * 1e12 if self._given_peak is not None else peak
        self._utilisation = "hfu" if strategy.recomputes else "mfu"
        self._clock, self._batches = StepClock(strategy.data_axis.ledger), 0
        self._steps = self._first_step = trainer.global_step
        self._size = BatchSize()
        self._flops: int | None = None
        self._all = Spent()
        self._sums = BlockSums(pl_module)
        places = {rank: str(strategy.layout.coordinate(rank)) for rank in range(strategy.world_size)}
        groups = {rank: strategy.layout.coordinate(rank)[PIPELINE_AXIS] for rank in places}
        self._watch = Watch(Board(), places, groups, self._sums)
        self._closing.callback(self._sums.detach)
        self._attach_clock(trainer)
        self._recorder = self._new_recorder(strategy) if self._timetable_steps else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batches == WARM_UP - 1 and _can_count():
            self._counter = OperationCount()
            self._counting.enter_context(uncompiled(pl_module))
            self._counting.enter_context(self._counter)
        elif self._batches == WARM_UP:
            self._clock.restart()
            self._loads(1)
        if self._recorder is not None:
            self._recorder.begin_batch(self._batches)
        self._size.add(batch)
        self._sums.begin(self._batches)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._clock.begin_optimizer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_counting()
        self._sums.end(_loss_of(outputs))
        if self._recorder is not None and self._recorder.ends_with(self._batches):
            self._write_timetable(trainer)
        self._batches += 1
        every, steps = trainer.log_every_n_steps, trainer.global_step  # type: ignore[attr-defined]
        due = every > 0 and steps != self._steps and steps % every == 0
        self._steps = steps
        self._watch.batch_ended(due)
        if due and self._batches > WARM_UP:
            self._report(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(self, "_clock") and _trains(trainer):  # a hook may evaluate before training begins
            self._clock.begin("pause")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(self, "_clock") and _trains(trainer):
            self._clock.end("pause")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None and self._recorder.under_way:  # training was shorter than the record
            self._write_timetable(trainer)
        self._close()
        if self._batches > WARM_UP:
            self._all += self._clock.take()
        note = replace(self._note(self._all), bad=self._watch.first_bad())
        notes = dict(enumerate(talk.gather(note)))
        self._watch.end(notes)
        if self._all.batches:
            rank_zero_info(self._summary(trainer, self._metrics(trainer, self._all, notes)))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _attach_clock(self, trainer: Trainer) -> None:
        """Time loader and batch where Lightning's profilers do, and optimizers until torch's hook after their step."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        for name, mark in (("start", self._clock.begin), ("stop", self._clock.end)):
            _watch_action(profiler, name, mark, self._closing)
        for optimizer in trainer.optimizers:
            handle = optimizer.register_step_post_hook(lambda *_: self._clock.optimizer_stepped())
            self._closing.callback(handle.remove)

    def _new_recorder(self, strategy: Any) -> PassRecorder:
        if strategy.pipeline is None or strategy.pipeline.split.has_one_stage:
            raise ConfigurationError(
                f"Monitor3D(timetable_steps={self._timetable_steps}) times the passes of a pipeline, and nothing is cut"
                f" into stages here ({strategy.layout}). Use pipeline_parallel_size=2 or more, or leave timetable_steps"
                " out."
            )
        place = strategy.layout.coordinate(strategy.global_rank)
        sends = not any(index for axis, index in place.items() if axis != PIPELINE_AXIS)
        return PassRecorder(strategy.pipeline, WARM_UP, self._timetable_steps, sends=sends)

    def _write_timetable(self, trainer: Trainer) -> None:
        assert self._recorder is not None
        folder = job_folder() or Path(trainer.log_dir or trainer.default_root_dir)
        self._recorder.write(folder if trainer.is_global_zero else None)

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._stop_counting()
        self._closing.close()

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counting.close()
            self._flops, self._counter = self._counter.flops, None

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        spent = self._clock.take()
        self._all += spent
        notes = self._watch.exchange(self._note(spent))
        if not self.logs or not trainer.is_global_zero:
            return
        metrics = self._metrics(trainer, spent, notes)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # the number that Lightning's own values have
        for name in (f"{PREFIX}{self._size.unit}_per_second", f"{PREFIX}{self._utilisation}"):
            if name in metrics:
                module.log(name, metrics[name], prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    def _note(self, spent: Spent) -> Note:
        share = spent.data / spent.seconds if spent.seconds else 0.0
        busy = spent.busy / spent.batches if spent.batches and self._times_waits else None
        memory, loads = peak_bytes(self._device), self._loads(spent.batches)
        return Note(busy=busy, data_waiting=share, flops=self._flops, memory=memory, experts=loads)

    def _loads(self, batches: int) -> dict[str, tuple[float, float]]:
        """Rows of experts here in a batch: notes of ranks are of other batches, and not of as many."""
        loads = self._experts.take_loads() if self.logs and self._experts is not None else {}
        return {name: (fullest / max(1, batches), rows / max(1, batches)) for name, (fullest, rows) in loads.items()}

    def _metrics(self, trainer: Trainer, spent: Spent, notes: dict[int, Note]) -> dict[str, float]:
        """Numbers of this rank; operations are the mean over ranks, memory is that of the fullest."""
        each = spent.seconds / spent.batches
        metrics = {"step_seconds": each * trainer.accumulate_grad_batches}
        metrics[f"{self._size.unit}_per_second"] = self._size.mean * self._data_ranks / each
        counted = [note.flops for note in notes.values() if note.flops is not None]
        if len(counted) == trainer.world_size and any(counted):
            rate = fmean(counted) / each
            metrics["tflops_per_device"] = rate / 1e12
            if self._peak is not None:
                metrics[self._utilisation] = rate / self._peak
        shares = spent.shares()
        if not self._times_waits:
            shares = {"data_waiting": shares["data_waiting"]}
        metrics |= {f"share/{name}": share for name, share in shares.items()}
        for mixture in {name for note in notes.values() for name in note.experts}:
            loads = [note.experts[mixture] for note in notes.values() if mixture in note.experts]
            if len(loads) < self._stage_ranks:  # notes of some ranks have not come yet
                continue
            rows = sum(all_here for _, all_here in loads) * self._owners / len(loads)
            share = max(fullest for fullest, _ in loads) / max(1, rows)
            metrics["fullest_expert"] = max(share, metrics.get("fullest_expert", 0.0))
        metrics["memory_gb"] = max(note.memory for note in notes.values()) / 1e9
        metrics["sent_gb"] = spent.sent / spent.batches / 1e9 * trainer.accumulate_grad_batches
        return {f"{PREFIX}{name}": value for name, value in metrics.items()}

    def _summary(self, trainer: Trainer, metrics: dict[str, float]) -> str:
        values = {name.removeprefix(PREFIX): value for name, value in metrics.items()}
        speed = f"{values[f'{self._size.unit}_per_second']:,.0f} {self._size.unit}/s"
        if "tflops_per_device" in values:
            rate = values["tflops_per_device"]
            scale, unit = next((each for each in ((1.0, "T"), (1e-3, "G")) if rate >= each[0]), (1e-6, "M"))
            speed += f", {rate / scale:.3g} {unit}FLOP/s on a device"
        if self._utilisation in values:
            speed += f" ({self._utilisation.upper()} {values[self._utilisation]:.1%})"
        shares = {name.partition("/")[2]: share for name, share in values.items() if name.startswith("share/")}
        parts = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        memory = show_bytes(values["memory_gb"] * 1e9)
        steps = f"{trainer.global_step - self._first_step:,} steps, {show_seconds(values['step_seconds'])} each"
        return f"{steps}: {speed}; {parts}; {memory} on the fullest rank"


class QuietMonitor(Monitor3D):
    """The monitor of a run that has none. It logs nothing, and the strategy calls it.

    A strategy has no hook at the end of a batch, so that the monitor listens to the profiler.
    """

    logs = False
    _loss: Tensor | None = None

    def step_ended(self, output: Any) -> None:
        """Keep the loss of `output`. The last one of a batch counts."""
        self._loss = _loss_of(output)

    def _attach_clock(self, trainer: Trainer) -> None:
        handled = sys.exc_info()[1]  # where fit runs in an `except`

        def ended(part: str) -> None:
            if part == "step" and sys.exc_info()[1] is handled:  # else the batch fails: the profiler stops then too
                loss, self._loss = self._loss, None
                self.on_train_batch_end(trainer, trainer.lightning_module, loss, None, 0)

        _watch_action(trainer.profiler, "stop", ended, self._closing)  # type: ignore[attr-defined]
        super()._attach_clock(trainer)  # its clock hears of the end first


def _watch_action(profiler: Any, name: str, mark: Callable[[str], None], undo: UndoStack) -> None:
    """Call `mark` where Lightning starts or stops an action of `TIMED`. `undo` reverts it."""
    original = getattr(profiler, name)

    def watched(action: str) -> None:
        if action in TIMED:
            mark(TIMED[action])
        original(action)

    undo.set(profiler, name, watched)


def _can_count() -> bool:
    """Return False where other code has a class that is made by torch's `MyTensor(tensor)`, refused while counting."""
    kinds = [Tensor]
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()
    return not any(is_users(kind) and _by_torch(kind) for kind in kinds)


def _by_torch(kind: type) -> bool:
    names = getattr(getattr(kind.__new__, "__code__", None), "co_names", ())
    other = any(name.endswith("subclass") for name in names)
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ and not other  # type: ignore[attr-defined]


def _trains(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach() if isinstance(loss, Tensor) and not loss.is_meta and loss.numel() == 1 else None
