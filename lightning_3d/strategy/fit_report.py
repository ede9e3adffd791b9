"""`FitReport`: ranks and blocks at the start of a fit, memory after its first epoch, time at its end."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.errors import PeerError
from lightning_3d.launch import job_folder
from lightning_3d.launch.hydra_job import FAILED, FILE, write_side_file
from lightning_3d.layout import PIPELINE_AXIS, Coordinate, Layout
from lightning_3d.module.amounts import show_bytes
from lightning_3d.module.host_memory import peak_bytes
from lightning_3d.module.packed_weights import scales, value_bytes
from lightning_3d.monitor.callback import Monitor3D, QuietMonitor
from lightning_3d.optim.probe import check_evaluations, states_per_parameter_byte
from lightning_3d.optim.state_bytes import StateBytes
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan
from lightning_3d.parallel.state_counts import expected_states, with_states
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.first_batch import promised_samples
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.strategy.banner import memory_line, opening, step_line
from lightning_3d.zero.half_weights import cast_parameters

_COLUMNS = ("weights", "gradients", "states", "buffers", "disk", "rest", "peak")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank after an optimizer step, and its peak."""

    weights: int
    gradients: int
    states: int
    """Of the optimizers."""
    buffers: int
    disk: int
    """Weights and states on a disk, which the other numbers leave out."""
    rest: int | None
    """At the peak: activations, gathered weights and messages. None on a CPU, which counts no allocations."""
    peak: int
    """Allocated on the GPU since training began; on a CPU the peak of the process since it began."""
    planned: StateBytes
    """In a step, with the batches accumulated at the start. Weights that ZeRO 1 and 2 gather count beside shards."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all ranks. `str()` is a table."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> int:
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak)

    @property
    def line(self) -> str:
        rank = self.ranks[self.fullest]
        sizes = {name: getattr(rank, name) for name in _COLUMNS[:4]}
        on_disk = f" (and {show_bytes(rank.disk)} on the disk)" if rank.disk else ""
        counted = " + ".join(f"{show_bytes(size)} {name}" for name, size in sizes.items() if size)
        peak = f"its process had {show_bytes(rank.peak)} at most, with torch"
        if rank.rest is not None:
            peak = f"peak {show_bytes(rank.peak)}, of which {show_bytes(rank.rest)} activations and gathered tensors"
        return (
            f"memory after the first epoch, rank {self.fullest}: {counted}{on_disk} after a step"
            f" ({show_bytes(rank.planned.total)} planned during a step); {peak}"
        )

    def __str__(self) -> str:
        heads = ["rank", *_COLUMNS, "planned"]
        rows = [heads]
        for number, rank in enumerate(self.ranks):
            sizes = [getattr(rank, name) for name in _COLUMNS]
            shown = ["-" if size is None else show_bytes(size) for size in sizes]
            rows.append([str(number), *shown, show_bytes(rank.planned.total)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors that take memory of this rank, each once."""
    here = [local(value) for value in values if isinstance(value, Tensor) and not value.is_meta]
    return list({id(tensor): tensor for tensor in here}.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(value_bytes, tensors))


REMEMBERED = 1000
"""Number of latest batches whose times count."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    step_seconds: float | None
    """Median of one optimizer step without the first batch, None with one batch only."""
    seconds: float
    """From the first batch to the end of training."""
    memory_bytes: int
    """Peak of any rank: allocated on its GPU, or on a CPU the peak of the process."""
    steps: int
    """Of the optimizer."""
    step_samples: int | None
    """Of one optimizer step, all data ranks together; None where the loader names no batch."""


def write(
    folder: Path, measured: Measured, layout: Layout, metrics: Mapping[str, Tensor], device: torch.device
) -> None:
    """Write a report to `folder`, for tables over many jobs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    report = {
        "layout": {**asdict(layout), "said": str(layout)},
        "devices": layout.world_size,
        "device": name,
        "metrics": {key: float(value) for key, value in metrics.items() if value.numel() == 1},
        **asdict(measured),
    }
    write_side_file(folder / FILE, json.dumps(report, indent=2), replaces=folder / FAILED)


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write the reason of a failure to `folder` and to the job's log. Each failing rank calls it.

    The reason of a rank that failed because of another rank is written only if there is no other reason.
    """
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    first = getattr(error, "rank", None)
    first = rank if first is None else first
    logging.getLogger("lightning_3d").error("The job failed on rank %d: %s", first, reason)
    file, others = folder / FAILED, isinstance(error, PeerError) or first != rank
    if not others or not os.path.exists(file):  # a Path raises where the folder cannot be read
        write_side_file(file, json.dumps({"rank": first, "reason": reason}))


_FIRST_STEPS = 3
"""Optimizer steps whose gradients are counted. Lightning drops them at the end of an epoch."""


class FitReport:
    """Reports one fit. Made before the module is divided."""

    def __init__(
        self,
        trainer: Trainer,
        parallel: ParallelModule,
        plan: ParallelPlan,
        layout: Layout,
        place: Coordinate,
        device: torch.device,
        quiet: bool,
    ) -> None:
        self.trainer, self.parallel, self.layout, self.place = trainer, parallel, layout, place
        self.device, self.quiet = device, quiet
        self.pieces = None if plan.uncut_run is None else plan.uncut_run.pieces
        self.monitor: QuietMonitor | None = None
        """Of a run without a monitor of the user's."""
        self.kept: float | None = None
        """Bytes of optimizer states for each byte of a trained parameter, None where they could not be counted."""
        self.gradients = 0
        """The most bytes of gradients after an optimizer step."""
        half = trainer.precision_plugin.half_dtype()  # type: ignore[attr-defined]  # it is one of ours
        self.expected = expected_states(
            parallel.module, layout, plan.split, plan.tensor, plan.experts,
            halves=cast_parameters(parallel.module) if half is not None else (),
            microbatches=trainer.accumulate_grad_batches,
        )  # fmt: skip
        """Bytes of each pipeline rank in a step, counted before the module is placed and a schedule accumulates."""
        if plan.split is not None:
            line = plan.split.warning(layout.sizes[PIPELINE_AXIS], layout.schedule)
            if line is not None:
                rank_zero_warn(line)
        if plan.context is not None and plan.context.warning is not None:
            rank_zero_warn(plan.context.warning)
        if not quiet:
            lines = [axis.line for axis in (plan.experts, plan.context) if axis is not None]
            rank_zero_info(opening(parallel.module, layout, plan.split, plan.tensor, *lines, plan.scope.line))

    def prepare(self) -> None:
        """Count the optimizers' states, before hooks of the user may count steps: a copy of each optimizer steps.

        Add a monitor, unless the user has one. It is no callback of the Trainer: that list is the user's, who may read,
        copy and index it.
        """
        self.kept = states_per_parameter_byte(self.trainer.optimizers)
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        if not self.quiet and not any(isinstance(each, Monitor3D) for each in callbacks):
            self.monitor = QuietMonitor()

    def ask_monitor(self, hook: str, *args: Any) -> None:
        if self.monitor is not None:
            getattr(self.monitor, hook)(self.trainer, self.parallel.module, *args)

    def end_step(self, output: Any) -> None:
        if self.monitor is not None:
            self.monitor.step_ended(output)

    def timed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Let the monitor know that the gradients are there, where Lightning lets callbacks know."""
        calls = count(1)

        def computed() -> Any:
            if self.parallel.stages is not None:
                check_evaluations(optimizer, next(calls))
            output = closure()
            self.ask_monitor("on_before_optimizer_step", optimizer)
            return output

        return computed

    def begin(self) -> None:
        trainer = self.trainer
        self.began = self.last = time.perf_counter()
        self.batches: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds of each."""
        self.begun = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.unprinted = not self.quiet
        """True until the memory of the first epoch is printed."""
        self.first_epoch, self.first_step = trainer.current_epoch, trainer.global_step
        self.gradients = 0
        if not self.quiet:
            if trainer.global_rank == 0:
                rank_zero_info(memory_line(self.expected, trainer.optimizers, self.kept))
            batch = promised_samples(trainer.train_dataloader)
            rank_zero_info(step_line(self.layout, trainer.accumulate_grad_batches, batch, self.pieces))
        self.ask_monitor("on_train_start")

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        self._end_batch()
        if self.trainer.current_epoch > self.first_epoch:
            self._end_first_epoch()
        self.ask_monitor("on_train_batch_start", batch, batch_idx)

    def _end_batch(self) -> None:
        now = time.perf_counter()
        if self.begun > 1:  # the first batch also warms up
            self.batches.append(now - self.last)
        self.last, self.begun = now, self.begun + 1

    def count_gradients(self) -> None:
        if self.trainer.global_step < self.first_step + _FIRST_STEPS:
            grads = _tensors(parameter.grad for parameter in self.parallel.module.parameters())
            self.gradients = max(self.gradients, _bytes(grads))

    def memory(self) -> MemoryReport:
        """The memory of every rank. Collective; between steps."""
        self.parallel.data.reshard()
        return MemoryReport(tuple(talk.gather(self._memory_here())))

    def _memory_here(self) -> RankMemory:
        """The memory of this rank, with nothing gathered."""
        module, disk = self.parallel.module, self.parallel.disk
        kinds = {
            "weights": _tensors([*module.parameters(), *scales(module)]),
            "states": _tensors(tensors_in([list(optimizer.state.values()) for optimizer in self.trainer.optimizers])),
            "buffers": _tensors(module.buffers()),
        }
        every = [tensor for tensors in kinds.values() for tensor in tensors]
        away = {id(tensor) for tensor in every if disk is not None and disk.has(tensor)}
        counted = {name: _bytes(each for each in some if id(each) not in away) for name, some in kinds.items()}
        peak = peak_bytes(self.device)
        on_device = _bytes(each for each in every if each.device == self.device and id(each) not in away)
        rest = max(0, peak - on_device - self.gradients) if self.device.type == "cuda" else None
        planned = with_states(self.expected, self.kept or 0.0)[self.place[PIPELINE_AXIS]]
        on_disk = _bytes(each for each in every if id(each) in away)
        return RankMemory(**counted, disk=on_disk, gradients=self.gradients, rest=rest, peak=peak, planned=planned)

    def _end_first_epoch(self) -> None:
        """Print the memory of the fullest rank, once."""
        if self.unprinted:
            self.unprinted = False
            rank_zero_info(self.memory().line)

    def end(self) -> Measured:
        self.ask_monitor("on_train_end")
        self._end_first_epoch()
        self._end_batch()
        accumulated = self.trainer.accumulate_grad_batches
        batch = promised_samples(self.trainer.train_dataloader)
        measured = Measured(
            step_seconds=median(self.batches) * accumulated if self.batches else None,
            steps=self.trainer.global_step - self.first_step,
            step_samples=batch * accumulated * self.layout.data_parallel_size if batch else None,
            seconds=time.perf_counter() - self.began,
            memory_bytes=talk.largest_of([peak_bytes(self.device)])[0],
        )
        folder = job_folder()
        if folder is not None and self.trainer.global_rank == 0:
            write(folder, measured, self.layout, self.trainer.callback_metrics, self.device)
        return measured
