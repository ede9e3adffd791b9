"""A checksum of all of a file that `torch.save` writes, kept as the comment that a zip archive may end with.

torch and Lightning load such a file as any other. torch itself compares no checksum when it loads.
"""

import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_3d.checkpoint.safetensors_files import CHUNK_BYTES
from lightning_3d.errors import CheckpointError

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


def save_sealed(checkpoint: Any, file: BinaryIO) -> None:
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


def check_seal(path: Path) -> None:
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
