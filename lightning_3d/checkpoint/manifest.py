"""The files of a sharded checkpoint. It is complete once its manifest is written.

A checkpoint is a directory. Each save writes files with new names. Then it replaces `manifest.json`, which names the
files, in one step. Then it removes files that the manifest does not name. A kill at any moment leaves the old manifest
with all its files, or the new one with all of its. This holds in a remote store too, which replaces a file in one step.

Files of a save under way, of this job or another, are kept, and so are those of a manifest that is being read. A writer
has a lock on `manifest.json.GENERATION`, a reader on the manifest itself.
"""

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint import locks
from lightning_3d.checkpoint.placement import Piece
from lightning_3d.checkpoint.plain_json import parse
from lightning_3d.checkpoint.remote_path import Place, RemotePath
from lightning_3d.checkpoint.safetensors_files import DTYPES, Slot, Written, checksum, read_header
from lightning_3d.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 2**28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}", re.ASCII)
_OURS = re.compile(r"(part|state|objects)-[A-Za-z0-9_.-]+|manifest\.json\.(old-)?[0-9a-f]*", re.ASCII)
_GENERATION = re.compile(r"(?:(?:part-\d+|state|objects)-|manifest\.json\.(?:old-)?)([0-9a-f]+)(?:\.\w+)?", re.ASCII)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: in which boxes it lies in which files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Piece], ...]
    """(file, box); in the file it is named by `name_in_file`."""


@dataclass(frozen=True)
class Manifest:
    files: tuple[Written, ...]
    tensors: dict[str, Stored]
    state: str
    """The file with everything that is not a tensor."""
    objects: str | None = None
    """The file with what has no plain form, pickled; read only where asked for."""
    ranks: int = 1

    def dumps(self) -> bytes:
        names = [file.name for file in self.files]
        tensors = {
            name: [stored.dtype, stored.shape, [[names.index(f), p.offset, p.size] for f, p in stored.pieces]]
            for name, stored in self.tensors.items()
        }
        content = {
            "format": "lightning_3d",
            "version": VERSION,
            "ranks": self.ranks,
            "state": self.state,
            "objects": self.objects,
            "files": [[file.name, file.size, file.crc] for file in self.files],
            "tensors": tensors,
        }
        return json.dumps({**content, "crc": _crc(content)}, separators=(",", ":")).encode()


def _crc(content: dict[str, Any]) -> int:
    """Of the manifest itself: it names the checksums of everything else."""
    return zlib.crc32(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())


def name_in_file(name: str, shape: Sequence[int], piece: Piece) -> str:
    """The name of a box in the safetensors file: that of the tensor, if the box is all of it."""
    return name if piece.size == tuple(shape) else f"{name}@{','.join(map(str, piece.offset))}"


def claim(directory: Place, generation: str) -> BinaryIO | None:
    """The file that becomes the manifest of a save. Until it does, it keeps the files of the save from others.

    None in a remote store, where a file shows the ranks that they see the same folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(directory, RemotePath):
        (directory / f"{NAME}.{generation}").write_bytes(b"")
        return None
    if any(locks.is_in_use(file) for file in directory.glob(f"{NAME}.*") if ".old-" not in file.name):
        rank_zero_warn(locks.shared(directory))
    return locks.create(directory / f"{NAME}.{generation}")


def commit(directory: Place, manifest: Manifest, file: BinaryIO | None) -> None:
    """Write `manifest` to the claimed `file`, make it the current one, and remove files without use."""
    if file is not None:
        file.write(manifest.dumps())
        file.flush()
        os.fsync(file.fileno())
    _check_files(directory, manifest.files)  # a job on another host may see no locks
    with locks.alone(directory):
        if isinstance(directory, RemotePath):
            (directory / NAME).write_bytes(manifest.dumps())
        elif file is not None:
            # The manifest that is replaced stays under another name too, by which `sweep` sees that it is read.
            with suppress(CheckpointError, OSError):  # there is none, it is damaged, or this file system has no links
                os.link(directory / NAME, directory / f"{NAME}.old-{_generation(read_manifest(directory).state)}")
            os.replace(file.name, directory / NAME)
            locks.release(file)
            sync_directory(directory)
        try:
            sweep(directory, keep={NAME, *(each.name for each in manifest.files)})
        except OSError as error:
            rank_zero_warn(f"{directory} is saved. Files of the save before it stay until the next one: {error}")


def sync_directory(directory: Path) -> None:
    """Let renames in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Place, keep: Iterable[str]) -> None:
    """Remove the files of other saves, finished or not, except those in use. Files of other origin stay."""
    keep = set(keep)
    ours = [file for file in directory.iterdir() if file.name not in keep and _OURS.fullmatch(file.name)]
    for generation in {_generation(file.name) for file in ours}:
        new, old = (directory / f"{NAME}.{kind}{generation}" for kind in ("", "old-"))
        with locks.unused(new) as unwritten, locks.unused(old) as unread:
            for file in ours if unwritten and unread else ():
                if _generation(file.name) == generation:
                    file.unlink(missing_ok=True)


def _generation(name: str) -> str:
    found = _GENERATION.fullmatch(name)
    return found[1] if found is not None else ""


def remove_directory(directory: Place) -> bool:
    """Remove a checkpoint, for others in one step; False, and it stays, while someone writes or reads it."""
    if isinstance(directory, RemotePath):
        (directory / NAME).unlink(missing_ok=True)
        directory.rmdir()
        return True
    with ExitStack() as held:
        if not all(held.enter_context(locks.unused(file)) for file in directory.glob(f"{NAME}*")):
            return False
        locks.put_away(directory)
    locks.remove_leftovers(directory)
    return True


def reading(directory: Place) -> locks.Reading:
    """Keep the files that the manifest in `directory` names, for as long as what is returned is there."""
    return locks.Reading.of(directory / NAME)


def is_sharded(path: Place) -> bool:
    """Return True if `path` is a sharded checkpoint of this package, or was to become one."""
    return path.is_dir() and ((path / NAME).exists() or any(_OURS.fullmatch(file.name) for file in path.iterdir()))


def without_manifest(directory: Place) -> str:
    """Message about a directory that is no checkpoint of this package, with the remedy if another strategy wrote it."""
    if (directory / ".metadata").exists():
        return (
            f"{directory} is a sharded checkpoint of torch, such as FSDPStrategy writes. Make one file of it first:"
            f" python -m lightning.pytorch.utilities.consolidate_checkpoint {directory}"
        )
    if (directory / "checkpoint").is_dir() or (directory / "zero_to_fp32.py").exists():
        return (
            f"{directory} is a checkpoint of DeepSpeed. Make one file of its weights first, with"
            " lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict."
        )
    return f"{directory} has no {NAME}: the save was interrupted, or it is no checkpoint of ours."


def read_manifest(directory: Place, held: locks.Reading | None = None) -> Manifest:
    """The manifest, if the files that it names, kept by `held`, have the right sizes. Else raises a CheckpointError."""
    path = directory / NAME
    if not path.is_file():
        raise CheckpointError(without_manifest(directory))
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; no manifest is larger than {MAX_BYTES}.")
    content = parse((held or locks.Reading(None)).read(path), str(path))
    if not isinstance(content, dict) or content.get("format") != "lightning_3d":
        raise CheckpointError(f"{path} is not a manifest of lightning_3d.")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} is of version {content.get('version')!r:.40}; this package reads {VERSION}.")
    try:
        if content.pop("crc") != _crc(content):
            raise ValueError("its own checksum is wrong")
        manifest = _manifest(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r:.200}") from None
    _check_files(directory, manifest.files)
    return manifest


def _manifest(content: dict[str, Any]) -> Manifest:
    files = tuple(Written(_file_name(name), _count(size), _count(crc)) for name, size, crc in content["files"])
    names = {file.name for file in files}
    for special in (content["state"], content["objects"]):
        if special is not None and special not in names:
            raise ValueError(f"{special!r:.80} is not among the files")
    if len(names) != len(files) or content["state"] is None:
        raise ValueError("files are named twice, or there is no state")
    tensors = {name: _stored(name, entry, files) for name, entry in content["tensors"].items()}
    ranks = _count(content["ranks"])
    return Manifest(files, tensors, content["state"], content["objects"], ranks)


def _stored(name: str, entry: Any, files: tuple[Written, ...]) -> Stored:
    dtype, shape, pieces = entry
    shape = tuple(_count(n) for n in shape)
    if dtype not in DTYPES:
        raise ValueError(f"{name:.80} has the unknown type {dtype!r:.20}")
    boxes = []
    for index, offset, size in pieces:
        piece = Piece(tuple(map(_count, offset)), tuple(map(_count, size)), (0,) * len(shape))
        if not len(piece.offset) == len(piece.size) == len(shape):
            raise ValueError(f"a part of {name:.80} has other dimensions than {shape}")
        if any(at + n > total for at, n, total in zip(piece.offset, piece.size, shape, strict=True)):
            raise ValueError(f"a part of {name:.80} lies outside of {shape}")
        boxes.append((files[_count(index)].name, piece))
    if sum(piece.elements for _, piece in boxes) != math.prod(shape) or _any_overlap([piece for _, piece in boxes]):
        raise ValueError(f"the parts of {name:.80} do not add up to {shape}")
    return Stored(dtype, shape, tuple(boxes))


def _any_overlap(pieces: list[Piece]) -> bool:
    """Return True if two boxes share an element. Sorted by their first row, only neighbours can."""
    pieces = sorted((piece for piece in pieces if piece.elements), key=lambda piece: piece.offset)
    compared = 0
    for index, piece in enumerate(pieces):
        for other in pieces[index + 1 :]:
            if piece.offset and other.offset[0] >= piece.offset[0] + piece.size[0]:
                break
            compared += 1
            if compared > 10**6:
                raise ValueError("no layout divides a tensor into more than a million columns")
            if piece.overlap(other) is not None:
                return True
    return False


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == NAME:
        raise ValueError(f"{name!r:.80} is not a name that a file of a checkpoint has")
    return name


def _check_files(directory: Place, files: Iterable[Written]) -> None:
    files = tuple(files)
    found = directory.sizes() if isinstance(directory, RemotePath) else _sizes(directory, files)
    for file in files:
        if file.name not in found:
            raise CheckpointError(f"{directory} lacks {file.name}, which its manifest names.")
        size = found[file.name]
        if size is None:
            raise CheckpointError(f"{file.name} in {directory} is not a plain file.")
        if size != file.size:
            raise CheckpointError(f"{file.name} in {directory} has {size} bytes; it was written with {file.size}.")


def _sizes(directory: Path, files: Iterable[Written]) -> dict[str, int | None]:
    """Name of each of `files` that is there -> its size, None where it is no plain file."""
    found: dict[str, int | None] = {}
    for name in (file.name for file in files):  # others come and go while other jobs save
        with suppress(FileNotFoundError):
            status = (directory / name).lstat()
            found[name] = status.st_size if stat.S_ISREG(status.st_mode) else None
    return found


def verify(directory: Place, files: Iterable[Written]) -> None:
    """Read `files` and raise a CheckpointError for one that is not what was written."""
    for file in files:
        found = checksum(directory / file.name)
        if found != file.crc:
            raise CheckpointError(
                f"{file.name} in {directory} is damaged: its checksum is {found:08x}, written was {file.crc:08x}."
            )


def slots(directory: Place, manifest: Manifest) -> dict[str, tuple[tuple[Piece, Slot], ...]]:
    """For every tensor its boxes and their places. Raises where a file differs from the manifest."""
    names = {file for stored in manifest.tensors.values() for file, _ in stored.pieces}
    headers = {name: read_header(directory / name) for name in names}
    found: dict[str, tuple[tuple[Piece, Slot], ...]] = {}
    for name, stored in manifest.tensors.items():
        entries = []
        for file, piece in stored.pieces:
            slot = headers[file].pop(name_in_file(name, stored.shape, piece), None)
            if slot is None or slot.dtype != DTYPES[stored.dtype] or slot.shape != piece.size:
                raise CheckpointError(f"{file} in {directory} lacks its shard of {name[:80]!r}.")
            entries.append((piece, slot))
        found[name] = tuple(entries)
    return found
