"""Step time and memory of a training, and their report for `lightning-3d compare`."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from lightning_3d.errors import PeerError
from lightning_3d.launch.hydra_job import FAILED, FILE
from lightning_3d.launch.side_file import write_side_file
from lightning_3d.layout import Layout
from lightning_3d.module.host_memory import peak_bytes
from lightning_3d.ranks import talk

REMEMBERED = 1000
"""Number of latest batches whose times count."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One `fit`, measured."""

    step_seconds: float | None
    """Median of one optimizer step without the first batch, None with one batch only."""
    seconds: float
    """From the first batch to the end of training."""
    memory_bytes: int
    """Peak of any rank: allocated on its GPU, or on a CPU the peak of the process."""


class StepMeter:
    """A clock that `Strategy3D` starts with training and asks at each batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._last = time.perf_counter()
        self._batches: deque[float] = deque(maxlen=REMEMBERED)
        self._count = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def batch(self) -> None:
        """A batch begins, and the one before has ended."""
        now = time.perf_counter()
        if self._count > 1:  # the first batch also warms up
            self._batches.append(now - self._last)
        self._last, self._count = now, self._count + 1

    def end(self, batches_per_step: int) -> Measured:
        """The measurement. Collective: memory is that of the fullest rank."""
        self.batch()
        return Measured(
            step_seconds=median(self._batches) * batches_per_step if self._batches else None,
            seconds=time.perf_counter() - self._began,
            memory_bytes=talk.largest_of([peak_bytes(self._device)])[0],
        )


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
    logging.getLogger("lightning_3d").error("The job failed on rank %d: %s", rank, reason)
    file = folder / FAILED
    if not isinstance(error, PeerError) or not os.path.exists(file):  # a Path raises where the folder cannot be read
        write_side_file(file, json.dumps({"rank": rank, "reason": reason}))
