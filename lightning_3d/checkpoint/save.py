"""Save a sharded checkpoint: agree who writes what, write, and make it count once everyone has written."""

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_3d.checkpoint.collect import OPTIMIZERS, Collected, TensorEntry, merge_optimizers
from lightning_3d.checkpoint.locks import release, shared
from lightning_3d.checkpoint.manifest import NAME, Manifest, Stored, claim, commit, name_in_file, sync_directory
from lightning_3d.checkpoint.placement import Piece, box
from lightning_3d.checkpoint.remote_path import Place, RemotePath, of_other_format
from lightning_3d.checkpoint.safetensors_files import DTYPES, Written, write_bytes, write_part
from lightning_3d.errors import CheckpointError
from lightning_3d.ranks import agreement, talk
from lightning_3d.ranks.shards import local

T = TypeVar("T")


class SaveFailed(CheckpointError):
    """The disk refused a write. The checkpoint of before is still there; incomplete files are removed."""


@dataclass(frozen=True)
class SaveJob:
    """Everything that one rank needs to write its shards, without messages."""

    rank: int
    path: Place
    directory: Place
    """The directory for the files: another name next to `path` while a single file has that name."""
    generation: str
    """Distinguishes the files of this save from those of other saves to the same path."""
    plan: tuple[dict[str, tuple[Piece, ...]], ...]
    """The boxes that each rank writes."""
    stored: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of every tensor."""
    tensors: tuple[Tensor, ...]
    """The tensors that this rank writes, in the order of its plan."""
    state: bytes = b""
    """On rank 0: everything that is not a tensor."""
    objects: bytes = b""
    """On rank 0: values without a plain form."""
    claimed: BinaryIO | None = None
    """On rank 0: the open file that becomes the manifest."""

    def part_name(self, rank: int) -> str:
        return f"part-{rank:05d}-{self.generation}.safetensors"


def prepare(found: Collected, path: Place, rank: int) -> SaveJob:
    """Agree on who writes what. Collective."""
    mine = on_every_rank(lambda: _claim(found, path) if rank == 0 else None, path)
    everyone = talk.gather((None if mine is None else mine.where, found.listing, found.optimizers, found.own))
    claimed_by_first = everyone[0][0]
    assert claimed_by_first is not None
    path, directory, generation = claimed_by_first
    if isinstance(directory, RemotePath):
        on_every_rank(partial(_see, directory, generation), path)
    listings = [each[1] for each in everyone]
    plan = tuple(share_out(listings))
    stored = {name: (e.dtype, e.placement.shape) for listing in reversed(listings) for name, e in listing.items()}
    state = b""
    if rank == 0:
        optimizers = json.dumps(merge_optimizers([each[2] for each in everyone]), separators=(",", ":"))
        owns = ",".join(each[3] for each in everyone)
        state = f'{{"rest":{found.rest},"{OPTIMIZERS}":{optimizers},"ranks":[{owns}]}}'.encode()
    tensors = [
        local(found.tensors[name].detach())[box(piece.local, piece.size)]
        for name, pieces in plan[rank].items()
        for piece in pieces
    ]
    objects, claimed = (mine.objects, mine.file) if mine is not None else (b"", None)
    return SaveJob(rank, path, directory, generation, plan, stored, tuple(tensors), state, objects, claimed)


def share_out(listings: Sequence[Mapping[str, TensorEntry]]) -> list[dict[str, tuple[Piece, ...]]]:
    """For each rank the boxes that it writes. A box of several ranks goes to the one with least to write.

    Equal on every rank, without messages.
    """
    holders: dict[tuple[str, Piece], list[tuple[int, Piece]]] = defaultdict(list)
    for rank, listing in enumerate(listings):
        for name, entry in listing.items():
            for piece in entry.placement.pieces:
                place = Piece(offset=piece.offset, size=piece.size, local=piece.offset)
                holders[name, place].append((rank, piece))
    load = [0] * len(listings)
    tasks: list[dict[str, list[Piece]]] = [defaultdict(list) for _ in listings]
    # what only one rank can write comes first, then the rest fills up, the largest first
    for (name, place), choices in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0][1].elements)):
        entry = listings[choices[0][0]][name]
        rank, piece = min(choices, key=lambda choice: load[choice[0]]) if entry.replicated else choices[0]
        load[rank] += place.elements * DTYPES[entry.dtype].itemsize
        tasks[rank][name].append(piece)
    return [{name: tuple(pieces) for name, pieces in sorted(task.items())} for task in tasks]


@dataclass(frozen=True)
class _Claim:
    """The directory in which rank 0 has made sure that files can be written."""

    where: tuple[Place, Place, str]
    """The path, the directory and the generation of a job."""
    file: BinaryIO | None
    objects: bytes


def _claim(found: Collected, path: Place) -> _Claim:
    objects, generation = _pickled(found.objects), os.urandom(4).hex()
    directory = path
    if path.is_file():
        if isinstance(path, RemotePath):
            raise CheckpointError(of_other_format(path, "one file"))
        directory = path.with_name(f"{path.name}.{generation}")
    return _Claim((path, directory, generation), claim(directory, generation), objects)


def _see(directory: Place, generation: str) -> None:
    if not (directory / f"{NAME}.{generation}").exists():
        raise CheckpointError(
            f"rank 0 has begun to write {directory}, and this rank does not see it there. Every rank writes its shards"
            ' to one folder: use a store that all of them see, or checkpoint_format="full", which rank 0 alone writes'
        )


class CopyBuffer:
    """Memory for a copy, used again from one save to the next: touching new pages takes as long as copying."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies of `tensors` in host memory, in the place of those made before."""
        starts = list(accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors), initial=0))
        if self._bytes.numel() < starts[-1]:
            self._bytes = torch.empty(starts[-1], dtype=torch.uint8)
        return tuple(
            self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for start, tensor in zip(starts, tensors, strict=False)
        )


def snapshot(job: SaveJob, buffer: CopyBuffer) -> SaveJob:
    """`job` with tensors that training does not change."""
    return replace(job, tensors=buffer.copies(job.tensors))


def _pickled(objects: Mapping[str, Any]) -> bytes:
    if not objects:
        return b""
    buffer = io.BytesIO()
    try:
        torch.save(dict(objects), buffer)
    except Exception as error:  # whatever the user's own __reduce__ raises
        raise CheckpointError(f"{', '.join(objects)} cannot be saved: {error}") from error
    return buffer.getvalue()


def write(job: SaveJob) -> list[Written]:
    job.directory.mkdir(parents=True, exist_ok=True)
    pieces = [(name, piece) for name, pieces in job.plan[job.rank].items() for piece in pieces]
    header = {name_in_file(n, job.stored[n][1], p): (job.stored[n][0], p.size) for n, p in pieces}
    written = []
    if pieces:
        note = f"part {job.rank} of {len(job.plan)}"
        written.append(write_part(job.directory / job.part_name(job.rank), header, job.tensors, note))
    for kind, content in (("state", job.state), ("objects", job.objects)):
        if content:
            suffix = "json" if kind == "state" else "pt"
            written.append(write_bytes(job.directory / f"{kind}-{job.generation}.{suffix}", content))
    return written


def carry_out(job: SaveJob, group: dist.ProcessGroup | None = None) -> None:
    """Write, and make it count if every rank has written. Raises the same on every rank. Collective over `group`."""
    try:
        written = on_every_rank(lambda: write(job), job.path, group)
        files = tuple(file for each in talk.gather(written, group) for file in each)
        on_first_rank(lambda: _commit(job, files), job.path, job.rank, group)
    except CheckpointError:
        if job.rank == 0:
            with suppress(OSError):  # of the same broken disk: the error that is raised says why the save failed
                _discard(job)
        raise
    finally:
        if job.claimed is not None:
            release(job.claimed)


def on_first_rank(work: Callable[[], object], path: Any, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Do `work`, which writes `path`, on rank 0. Raises the same on every rank. Collective."""
    on_every_rank(work if rank == 0 else lambda: None, path, group)


def on_every_rank(work: Callable[[], T], path: Any, group: dist.ProcessGroup | None = None) -> T:
    """Do `work`, a part of saving `path`, without messages. Raises the same on every rank. Collective."""

    def named() -> T:
        try:
            return work()
        except Exception as error:
            disk = isinstance(error, OSError | SaveFailed)
            text = f"rank {talk.place()[0]}: {'' if disk else f'{type(error).__name__}: '}{error}"
            raise (SaveFailed if disk else CheckpointError)(
                f"{path} was not saved: {text}. What was there before is still there."
            ) from error

    return agreement.together(named, group=group, local=True)


def _commit(job: SaveJob, files: tuple[Written, ...]) -> None:
    tensors = {}
    for name, (dtype, shape) in job.stored.items():
        pieces = [(rank, piece) for rank, task in enumerate(job.plan) for piece in task.get(name, ())]
        tensors[name] = Stored(dtype, shape, tuple((job.part_name(rank), piece) for rank, piece in pieces))
    names = {file.name.partition("-")[0]: file.name for file in files}
    directory = job.directory
    manifest = Manifest(files, tensors, names["state"], names.get("objects"), len(job.plan))
    try:
        commit(directory, manifest, job.claimed)
    except CheckpointError as error:  # a file is gone, on a file system without locks
        raise SaveFailed(f"{error} {shared(job.path)}") from error
    if isinstance(job.path, Path) and isinstance(directory, Path) and directory != job.path:
        job.path.unlink(missing_ok=True)
        directory.rename(job.path)
        sync_directory(job.path.parent)


def _discard(job: SaveJob) -> None:
    """Remove what the ranks wrote, all of which have ended. One rank does: others would look into what it removes.

    All stays where the manifest already names it: what went wrong came behind that.
    """
    manifest = job.directory / NAME
    if not job.directory.is_dir() or (manifest.exists() and job.generation in manifest.read_text()):
        return
    for file in job.directory.glob(f"*{job.generation}*"):
        file.unlink()
    if isinstance(job.directory, Path) and not any(job.directory.iterdir()):
        job.directory.rmdir()
