"""One rank's tensors as one safetensors file, written and read as a stream.

The `safetensors` library copies every tensor into one buffer before it writes, which needs too much memory for
gigabytes. This file writes the same format. That library and others read it.
"""

import ctypes
import json
import math
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_3d.checkpoint.placement import box
from lightning_3d.checkpoint.plain_json import parse
from lightning_3d.checkpoint.remote_path import Place, RemotePath
from lightning_3d.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20
PAGE_BYTES = 4096
"""Bytes of a row that are read apart from the rest of the row. The system reads pages of this size."""
REQUEST_BYTES = 2**20
"""The same in a remote store, where each read waits for an answer."""
MAX_HEADER_BYTES = 100 * 2**20
"""Also what the safetensors library accepts."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A file as it should be found again."""

    name: str
    size: int
    crc: int


class OpenFile:
    """A file that can be read after its name is gone, as long as this object is there."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.version = self._version()

    def check(self) -> None:
        """Raise if the file has other contents now."""
        if self._version() != self.version:
            raise CheckpointError(
                f"{self.path} was written to after this module was built from it. Weights are read when a rank computes"
                " its shard. Leave the file as it is until training: write the new one under another name."
            )

    def _version(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class Slot:
    """The location of a tensor in a file."""

    file: Place
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    mark: int = 0
    """See `marked`."""
    opened: OpenFile | None = field(default=None, repr=False, compare=False)
    """Read in place of `file`."""


def write_part(
    path: Place, header: Mapping[str, tuple[str, Sequence[int]]], tensors: Iterable[Tensor], note: str = ""
) -> Written:
    """Write `tensors`, which come one at a time in the order of `header` (name -> dtype and shape)."""
    text = _header(header, note)
    with _new_file(path) as file:
        crc = _write(file, len(text).to_bytes(8, "little") + text, 0)
        for tensor in tensors:
            for chunk in _bytes(tensor):
                crc = _write(file, chunk, crc)
        size = file.tell()
    return Written(name=path.name, size=size, crc=crc)


def write_bytes(path: Place, content: bytes) -> Written:
    with _new_file(path) as file:
        crc = _write(file, content, 0)
    return Written(name=path.name, size=len(content), crc=crc)


@contextmanager
def _new_file(path: Place) -> Iterator[BinaryIO]:
    """A new file, which is on the disk or in the store once this has ended."""
    with path.open("wb" if isinstance(path, RemotePath) else "xb") as file:
        yield file
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())


def _header(tensors: Mapping[str, tuple[str, Sequence[int]]], note: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "lightning_3d": note}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # the data starts aligned


def _write(file: BinaryIO, content: Any, crc: int) -> int:
    file.write(content)
    return zlib.crc32(content, crc)


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in row-major order, a few megabytes at a time, whatever its strides and device."""
    rows = tensor.detach().unsqueeze(0) if tensor.dim() == 0 else tensor.detach()
    if rows.numel() == 0:
        return
    step = max(1, CHUNK_BYTES * rows.shape[0] // rows.nbytes)
    for chunk in rows.split(step):
        yield memoryview(chunk.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def read_header(path: Place, *, skip_unknown: bool = False) -> dict[str, Slot]:
    """The locations of tensors in a file, checked against its size. `skip_unknown` leaves out unknown dtypes."""
    size = path.stat().st_size
    length = int.from_bytes(_read_bytes(path, 0, min(size, 8)), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path.name} says its header has {length} bytes, but the file has {size}.")
    entries = parse(_read_bytes(path, 8, 8 + length), f"the header of {path.name}")
    if not isinstance(entries, dict):
        raise CheckpointError(f"the header of {path.name} is a {type(entries).__name__}.")
    return {
        str(name): _slot(path, name, entry, 8 + length, size)
        for name, entry in entries.items()
        if name != "__metadata__" and not (skip_unknown and _is_unknown(entry))
    }


def _is_unknown(entry: Any) -> bool:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    return isinstance(dtype, str) and dtype not in DTYPES


def _slot(path: Place, name: str, entry: Any, base: int, size: int) -> Slot:
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        counts = [*shape, start, stop]
        if any(type(n) is not int or not 0 <= n < 2**62 for n in counts):
            raise ValueError("sizes must be whole numbers")
        if stop - start != math.prod(shape) * dtype.itemsize or base + stop > size:
            raise ValueError(f"shape {shape} does not fit bytes {start} to {stop} of a file of {size}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} has an invalid entry for {name[:80]!r}: {error!r:.200}") from None
    return Slot(file=path, start=base + start, dtype=dtype, shape=shape)


def read_box(slot: Slot, offset: Sequence[int], size: Sequence[int], out: Tensor) -> None:
    """Copy a box of a stored tensor into `out`, which has its size. Reads the rows that contain it, in chunks, and of
    long rows only their parts."""
    if math.prod(size) == 0:
        return
    if not slot.shape:
        out.copy_(_rows(slot, 0, 1).reshape(()))
        return
    row = math.prod(slot.shape[1:]) * slot.dtype.itemsize
    step = max(1, CHUNK_BYTES // row)
    first, last = offset[0], offset[0] + size[0]
    columns = box(offset[1:], size[1:])
    if (
        tuple(size[1:]) == slot.shape[1:]
        and out.is_contiguous()
        and out.dtype == slot.dtype
        and out.device.type == "cpu"
    ):
        _read(slot, slot.start + first * row, out.view(-1).view(torch.uint8))
        return
    page = REQUEST_BYTES if isinstance(slot.file, RemotePath) else PAGE_BYTES
    if slot.dtype.itemsize * math.prod(size[1:]) >= page and tuple(size[1:]) != slot.shape[1:]:
        for number, part in enumerate(out, first):
            inner = replace(slot, start=slot.start + number * row, shape=slot.shape[1:])
            read_box(inner, offset[1:], size[1:], part)
        return
    for start in range(first, last, step):
        stop = min(last, start + step)
        everything: tuple[slice, ...] = (slice(None), *columns)
        rows = _rows(slot, start, stop)[everything]
        out[start - first : stop - first].copy_(rows)


SAMPLES = 16
"""Parts of a tensor that its mark depends on: all of a small one, 64 KiB of a large one."""


def marked(slot: Slot) -> Slot:
    """`slot` with a checksum of bytes that are spread over the tensor. Another file at the same path has another."""
    nbytes, mark = math.prod(slot.shape) * slot.dtype.itemsize, 0
    last = max(0, nbytes - PAGE_BYTES)
    with _descriptor(slot) as descriptor:
        for at in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            mark = zlib.crc32(os.pread(descriptor, min(PAGE_BYTES, nbytes - at), slot.start + at), mark)
    return replace(slot, mark=mark)


def _rows(slot: Slot, start: int, stop: int) -> Tensor:
    row = math.prod(slot.shape[1:]) * slot.dtype.itemsize
    raw = torch.empty((stop - start) * row, dtype=torch.uint8)
    _read(slot, slot.start + start * row, raw)
    return raw.view(slot.dtype).view(stop - start, *slot.shape[1:])


def _read(slot: Slot, at: int, raw: Tensor) -> None:
    """Fill the bytes `raw` with those at `at` of the file."""
    with _descriptor(slot) as descriptor:
        # not by `numpy()`, after which torch frees the memory only together with the tensor
        view = memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")
        while len(view):
            if isinstance(slot.file, RemotePath):
                count = _fill(view, slot.file, at)
            else:
                count = os.preadv(descriptor, [view], at)
            if not count:
                raise CheckpointError(f"{slot.file.name} ends early: it was cut short while it was read.")
            view, at = view[count:], at + count


def _fill(view: memoryview, file: RemotePath, at: int) -> int:
    """Read the next bytes of `view` from a store. Returns their number."""
    found = file.read_range(at, at + min(len(view), CHUNK_BYTES))
    view[: len(found)] = found
    return len(found)


@contextmanager
def _descriptor(slot: Slot) -> Iterator[int]:
    if slot.opened is not None:
        slot.opened.check()
        yield slot.opened.descriptor
        return
    if isinstance(slot.file, RemotePath):
        yield -1
        return
    with open(slot.file, "rb", buffering=0) as file:
        yield file.fileno()


def checksum(path: Place) -> int:
    """crc32 of a file, read in chunks."""
    crc, size = 0, path.stat().st_size
    for start in range(0, size, CHUNK_BYTES):
        crc = zlib.crc32(_read_bytes(path, start, min(size, start + CHUNK_BYTES)), crc)
    return crc


def _read_bytes(path: Place, start: int, stop: int) -> bytes:
    if isinstance(path, RemotePath):
        return path.read_range(start, stop)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        return file.read(stop - start)
