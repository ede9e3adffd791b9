"""Checkpoints in one file: exactly Lightning's own, read without running code unless the user asks for that."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_3d.errors import CheckpointError


def load_file(io: CheckpointIO, path: Any, weights_only: bool | None, *, local: bool) -> dict[str, Any]:
    """What `io` loads, with every way in which a file can be broken as a CheckpointError."""
    if local and Path(path).is_file():
        check_file(Path(path))
    elif not local and weights_only is None:
        weights_only = True  # Lightning would unpickle anything that comes over http
    try:
        loaded = io.load_checkpoint(path, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which are all that is loaded by default: {error}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a broken pickle raises whatever its noise happens to mean
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:300]}).") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not the dict that a Trainer saves.")
    return loaded


def check_file(path: Path) -> None:
    """Compare the checksums inside a file that `torch.save` wrote; torch itself does not when it loads."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                raise CheckpointError(f"{path} was cut short: it has no directory at its end.")
        return  # of the time before torch 1.6, or of another format
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > size:
                raise CheckpointError(f"{path} has {size} bytes and would unpack to {unpacked}: torch packs nothing.")
            broken = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError, EOFError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {broken} in it is wrong.")
