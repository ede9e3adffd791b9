"""Checkpoints in one file: exactly Lightning's own, read without running code unless the user asks for that."""

import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_3d.checkpoint.locks import create, put_away, release, remove_leftovers, shared, unguessable_name
from lightning_3d.checkpoint.manifest import sync_directory
from lightning_3d.checkpoint.safetensors_files import CHUNK_BYTES
from lightning_3d.errors import CheckpointError

# A checksum of all of a file that `torch.save` writes, kept as the comment that a zip archive may end with.
#
# torch and Lightning load such a file as any other. torch itself compares no checksum when it loads.

_MARK = b"lightning_3d crc32 "
_LENGTH = len(_MARK) + 8
_EMPTY = struct.pack("<H", 0)
"""The length of the comment, as `torch.save` writes it at the very end."""


class _Summed:
    """A file that is written from its start to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc = file, 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self.crc = zlib.crc32(content, self.crc)
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_with_checksum(checkpoint: Any, file: BinaryIO) -> None:
    """`torch.save`, with a checksum. An OSError of the file is raised as one, where torch has its own words."""
    summed = _Summed(file)
    sink: Any = summed
    try:
        torch.save(checkpoint, sink)
    except RuntimeError:
        if summed.error is None:
            raise
        raise summed.error from None
    file.seek(-len(_EMPTY), 2)
    file.write(struct.pack("<H", _LENGTH) + _MARK + b"%08x" % summed.crc)


def verify_checksum(path: Path) -> None:
    """Raise a CheckpointError if `path` has a checksum that is wrong. A file of others has none."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - _LENGTH))
        seal = file.read()
        if not seal.startswith(_MARK):
            return
        file.seek(0)
        crc, left = 0, size - _LENGTH - len(_EMPTY)
        while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        crc, length = zlib.crc32(_EMPTY, crc), file.read(len(_EMPTY))
    if seal != _MARK + b"%08x" % crc or length != struct.pack("<H", _LENGTH):
        raise CheckpointError(f"{path} is damaged: its checksum is {crc:08x}, its end says {seal[-8:]!r}.")


_FOLDER = 0x10
"""The attribute that marks a folder in a zip archive."""


def load_file(io: CheckpointIO, path: Any, weights_only: bool | None, *, local: bool) -> dict[str, Any]:
    """Load through `io`. Every kind of damage becomes a CheckpointError."""
    if local and Path(path).is_file():
        check_file(Path(path))
    elif not local and weights_only is None:
        weights_only = True  # Lightning would unpickle anything that comes over http
    try:
        loaded = io.load_checkpoint(path, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains more than tensors and plain values. By default only these are loaded: {error}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a broken pickle raises whatever its noise happens to mean
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:300]}).") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, not the dict that a Trainer saves.")
    return loaded


def save_file(checkpoint: dict[str, Any], path: Path) -> list[str]:
    """Write what Lightning would write, to another name, and rename it to `path` once it is complete.

    Returns the classes and functions in it that are refused by default when it is loaded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if remove_leftovers(path):
        rank_zero_warn(shared(path))
    new = unguessable_name(path)
    try:
        with create(new) as file:
            save_with_checksum(checkpoint, file)
            file.seek(0)
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            file.flush()
            os.fsync(file.fileno())
            if path.is_dir():  # a sharded checkpoint
                put_away(path)
            os.replace(new, path)
            release(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    remove_leftovers(path)
    return refused


def copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """`checkpoint` with tensors in host memory that training does not change; those that share memory still do."""
    seen: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in seen:
            seen[place] = torch.empty_like(tensor, device="cpu").copy_(tensor)
        return seen[place]

    return apply_to_collection(checkpoint, Tensor, copy)


def check_file(path: Path) -> None:
    """Compare the checksums of a file that `torch.save` wrote; torch itself does not when it loads."""
    verify_checksum(path)
    size = path.stat().st_size
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                if file.read(2) == b"PK":
                    raise CheckpointError(f"{path} was cut short: it has no directory at its end.")
            return  # of the time before torch 1.6, or of another format
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > size:
                raise CheckpointError(f"{path} has {size} bytes and would unpack to {unpacked}: torch packs nothing.")
            folders = [info.filename for info in archive.infolist() if info.is_dir() or info.external_attr & _FOLDER]
            if folders:  # torch reads nothing of them, and says nothing
                raise CheckpointError(f"{path} is damaged: {folders[0]!r:.80} in it is marked as a folder.")
            broken = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError, EOFError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {broken} in it is wrong.")
