"""`Strategy3D(resume="auto")`: checkpoints and note of an earlier start of this run, and the layout to resume in.

A run is identified by the directory of its ModelCheckpoints. Without one, Lightning creates a new directory at each
start. Then the job that torchrun or Slurm restarts identifies the run, by a note that an earlier start left.

`refit` chooses the layout when a job returns with another number of ranks. No process group is used here.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.last import checkpoints_in, newest_first
from lightning_3d.checkpoint.locks import create, remove_leftovers, unguessable_name
from lightning_3d.checkpoint.manifest import NAME
from lightning_3d.checkpoint.remote_path import Place, RemotePath, located
from lightning_3d.errors import CheckpointError, LayoutError
from lightning_3d.layout import PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.module.amounts import divisors

NOTE = "lightning_3d-run.json"
ACCUMULATED = "accumulate_grad_batches"
LARGEST = 10**6
"""Upper limit for data ranks and for accumulated batches."""
PREEMPTED = "preempted.ckpt"


@dataclass(frozen=True)
class RunNote:
    """Facts about a run for a later start."""

    folders: tuple[str, ...]
    data_parallel_size: int
    """Of the first start."""
    accumulate_grad_batches: int
    """As the user set it at the first start."""

    @property
    def windows(self) -> int:
        """Batches of one optimizer step, over all data ranks."""
        return self.data_parallel_size * self.accumulate_grad_batches

    @classmethod
    def read(cls, path: Place) -> "RunNote | None":
        try:
            content = json.loads(path.read_text())
            crc = content.pop("crc")
            note = cls(_folders(content), _number(content, "data_parallel_size"), _number(content, ACCUMULATED))
            if crc != note.crc:
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}, which says how many batches an optimizer step of this run is made of, is damaged:"
                f" {error!r:.200}. Resuming without it may change the global batch. Remove it if this start has as many"
                " data ranks and accumulated batches as the first one."
            ) from error
        return note

    @property
    def crc(self) -> int:
        return zlib.crc32(json.dumps(asdict(self)).encode())

    def dumps(self) -> str:
        return json.dumps({**asdict(self), "crc": self.crc})


def _folders(content: Any) -> tuple[str, ...]:
    folders = content["folders"]
    if not isinstance(folders, list) or not all(isinstance(folder, str) and "\0" not in folder for folder in folders):
        raise ValueError(f"folders={folders!r:.80} are no paths")
    return tuple(folders)


def _number(content: Any, name: str) -> int:
    number = content[name]
    if type(number) is not int or not 1 <= number <= LARGEST:
        raise ValueError(f"{name}={number!r:.40} is no number from 1 to {LARGEST}")
    return number


@dataclass(frozen=True)
class SavedRun:
    """The state that a start resumes from."""

    checkpoints: tuple[str, ...]
    """The newest first."""
    note: RunNote | None


def find_run(trainer: Trainer) -> SavedRun:
    """Read the checkpoints of this run and its note."""
    note = next((n for n in (RunNote.read(path) for path in _notes(trainer)) if n is not None), None)
    folders = dict.fromkeys([*_given(trainer), *(note.folders if note is not None else ())])
    found = [path for folder in folders for path in checkpoints_in(located(folder)) if _was_saved(located(path))]
    if SLURMEnvironment.detect():
        found += [str(path) for path in located(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")]
    return SavedRun(tuple(newest_first(found)), note)


def _was_saved(path: Place) -> bool:
    """True where a save to `path` ended. Else warns: such a checkpoint cannot be resumed from."""
    saved = path.is_file() or (path / NAME).exists()
    if not saved:
        rank_zero_warn(f"Skipping the checkpoint {path}: it has no {NAME}, or is no file. Its save never ended.")
    return saved


def note_of(trainer: Trainer, layout: Layout, earlier: SavedRun | None) -> RunNote:
    """The note of a run in `layout`. It keeps the facts of the first start if the global batch is the same."""
    old = earlier.note if earlier is not None else None
    accumulated, data = trainer.accumulate_grad_batches, layout.data_parallel_size
    folders = dict.fromkeys([*folders_of(trainer), *(old.folders if old is not None else ())])
    if old is not None and data * accumulated == old.windows:
        data, accumulated = old.data_parallel_size, old.accumulate_grad_batches
    return RunNote(tuple(folders), data, accumulated)


def leave_note(trainer: Trainer, note: RunNote) -> None:
    """Write `note` to the places that a later start reads. On rank 0, once directories are known."""
    content = note.dumps().encode()
    for path in (*(located(folder) / NOTE for folder in note.folders), *_job_notes(trainer)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(path, RemotePath):
            path.write_bytes(content)
            continue
        new = unguessable_name(path)
        with create(new) as file:
            file.write(content)
            file.flush()
            os.replace(new, path)
        remove_leftovers(path)


def folders_of(trainer: Trainer) -> tuple[str, ...]:
    """The directories to which this start saves, once its callbacks are set up. The run's own if nothing is saved."""
    found = [str(each.dirpath) for each in _savers(trainer) if each.dirpath is not None]
    return tuple(dict.fromkeys(found)) or (str(trainer.default_root_dir),)


def preempted_path(trainer: Trainer) -> str:
    """The path to which a preempted run saves."""
    return str(located(folders_of(trainer)[0]) / PREEMPTED)


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    callbacks: list[Any] = trainer.checkpoint_callbacks
    return [each for each in callbacks if isinstance(each, ModelCheckpoint) and not each.save_weights_only]


def _given(trainer: Trainer) -> tuple[str, ...]:
    """Directories that are equal at every start."""
    savers = _savers(trainer)
    if not savers:
        return (str(trainer.default_root_dir),)
    return tuple(str(each.dirpath) for each in savers if each.dirpath is not None)


def _notes(trainer: Trainer) -> Iterator[Place]:
    yield from (located(folder) / NOTE for folder in _given(trainer))
    # torchrun names every unnamed job "none".
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or "0"
    if int(restarts) > 0 or os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        yield from _job_notes(trainer)


def _job_notes(trainer: Trainer) -> list[Place]:
    """The note that is named by the job, under a launcher that restarts jobs."""
    job = _job()
    return [located(trainer.default_root_dir) / f".lightning_3d-{job}.json"] if job is not None else []


def _job() -> str | None:
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is not None:
        return f"torchrun-{''.join(c if c.isalnum() else '_' for c in name)}"
    return f"slurm-{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else None


def refit(layout: Layout, windows: int, world: int, blocks: int | None = None) -> tuple[Layout, int]:
    """A layout for `world` ranks, and the batches to accumulate so that an optimizer step has the same `windows`.

    The data axis changes first, with equal tensor and pipeline sizes. If that cannot keep the global batch, the
    pipeline size changes, then the tensor size, each by as little as possible.
    """
    found = min(_candidates(layout, windows, world, blocks), key=lambda each: _changes(layout, each), default=None)
    if found is None:
        counts = ", ".join(str(count * layout.peers) for count in divisors(windows))
        raise LayoutError(
            f"{world} ranks cannot resume the run: an optimizer step was made of {windows} batches (data ranks x"
            f" accumulate_grad_batches), which no layout of {world} ranks divides evenly. Start"
            f" {counts} ranks, or pass ckpt_path= to resume with your own settings."
        )
    return found, windows // found.data_parallel_size


def _candidates(layout: Layout, windows: int, world: int, blocks: int | None) -> Iterator[Layout]:
    now = layout.sizes
    others = layout.peers // (now[TENSOR_AXIS] * now[PIPELINE_AXIS])
    for data in divisors(world // others) if world % others == 0 else ():
        if windows % data:
            continue
        for tensor in divisors(world // others // data):
            pipeline = world // others // data // tensor
            if now[TENSOR_AXIS] % tensor:
                continue  # a split over N ranks is certain to work over divisors of N only
            if pipeline != now[PIPELINE_AXIS] and not _can_cut(layout, pipeline, blocks):
                continue
            yield replace(layout, data_parallel_size=data, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def _can_cut(layout: Layout, pipeline: int, blocks: int | None) -> bool:
    """True where a pipeline of another size is certain to work."""
    most = layout.num_stages if blocks is None else max(blocks, 1)
    return pipeline == 1 or replace(layout, pipeline_parallel_size=pipeline).num_stages <= most


def _changes(wanted: Layout, layout: Layout) -> tuple[float, ...]:
    tensor, pipeline = (wanted.sizes[axis] / layout.sizes[axis] for axis in (TENSOR_AXIS, PIPELINE_AXIS))
    return (tensor, max(pipeline, 1 / pipeline), -layout.data_parallel_size)
