"""Tensors on a disk: fetched into memory, used, and put back, within a budget.

Weights and optimizer states go through the same three calls. While a batch of tensors is used, the next one is read
and the last one is written.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_3d.errors import ConfigurationError
from lightning_3d.module.torch_private import no_functions
from lightning_3d.offload.disk_file import PAGE, Buffer, DiskFile, DiskRegion, Transfer, paged

SMALL = 2**16
"""Bytes of a tensor that is not worth a read: it stays in memory."""


class DiskTensor:
    """A tensor, and others that use its memory from its beginning: a region of a file, but while it is fetched."""

    def __init__(self, region: DiskRegion, *tensors: Tensor) -> None:
        self.region, self.tensors = region, tensors

    @property
    def nbytes(self) -> int:
        return self.region.nbytes

    def use(self, memory: Tensor) -> None:
        """Have the tensors use the bytes `memory`, which have their values."""
        with no_functions():  # no write of the user's code, which is watched in a step
            self._use(memory)

    def _use(self, memory: Tensor) -> None:
        for tensor in self.tensors:
            tensor.data = memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, _strides(tensor))


@dataclass(eq=False)
class FetchedTensors:
    """Disk tensors in memory."""

    items: tuple[DiskTensor, ...]
    buffer: Buffer
    starts: tuple[int, ...]
    transfer: Transfer

    def memory(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.buffer.bytes[start : start + self.items[index].nbytes]


class DiskTransfers:
    """Fetches and puts back disk tensors of this rank with at most `budget` bytes of memory."""

    def __init__(self, budget: int) -> None:
        self.budget, self.taken = budget, 0
        self._files: WeakSet[DiskFile] = WeakSet()
        self._free: list[Buffer] = []
        self._ahead: dict[tuple[DiskTensor, ...], FetchedTensors] = {}
        self._written: list[FetchedTensors] = []
        self.moved = 0
        """Bytes that were read and written so far."""

    def __reduce__(self) -> Any:
        return DiskTransfers, (self.budget,)  # a copy of a module has its values in memory

    def check(self, nbytes: int, what: str) -> None:
        """Raise if `nbytes`, which are needed at the same time, are more than the budget."""
        if nbytes > self.budget:
            raise ConfigurationError(
                f"offload_budget is {self.budget / 1e9:.3g} GB, and {what} takes {nbytes / 1e9:.3g} GB, all of it at"
                f' the same time. Use offload_budget="{-(-nbytes // 10**8) / 10:.1f}GB" or more.'
            )

    def has(self, tensor: Tensor) -> bool:
        spans = (span for file in self._files for span in file.mapped)
        return any(low <= tensor.data_ptr() < high for low, high in spans)

    def store(self, file: DiskFile, groups: Sequence[Sequence[Tensor]]) -> list[DiskTensor]:
        """Move tensors to the disk. Those of a group use the same memory."""
        self._files.add(file)
        items = [DiskTensor(file.region(paged(group[0].nbytes)), *group) for group in groups]
        if items:
            buffer, starts = self._room(items)
            batch = FetchedTensors(tuple(items), buffer, starts, Transfer())
            self._copy_in(batch)
            self.put_back(batch, changed=True)
        return items

    def prefetch(self, items: Sequence[DiskTensor]) -> None:
        """Start to read `items` if there is memory for them now."""
        key = tuple(items)
        need = sum(paged(item.nbytes) for item in key)
        if key and key not in self._ahead and self._collect(need):
            self._ahead[key] = self._read(key)

    def fetch(self, items: Sequence[DiskTensor]) -> FetchedTensors:
        key = tuple(items)
        batch = self._ahead.pop(key, None) or self._read(key)
        batch.transfer.wait()
        for index, item in enumerate(key):
            item.use(batch.memory(index))
        return batch

    def put_back(self, batch: FetchedTensors, *, changed: bool) -> None:
        """End the use of `batch`; write it if it was changed."""
        if changed:
            self._copy_in(batch)
        for item in batch.items:
            item.use(item.region.mapped)
        if not changed:
            self._free.append(batch.buffer)
            return
        parts: list[Future[None]] = []
        for item, start in zip(batch.items, batch.starts, strict=True):
            parts += item.region.write(batch.buffer, start).parts
            self.moved += item.nbytes
        batch.transfer = Transfer(parts)
        self._written.append(batch)

    def finish(self) -> None:
        """End everything that is under way, and free the memory."""
        for batch in self._ahead.values():
            batch.transfer.wait()
            self._free.append(batch.buffer)
        self._ahead = {}
        self._end_writes(every=True)
        self._give_up(0)

    def _read(self, items: tuple[DiskTensor, ...]) -> FetchedTensors:
        mine = {item.region for item in items}
        for batch in list(self._written):
            if any(item.region in mine for item in batch.items):
                self._end(batch)
        buffer, starts = self._room(items)
        parts: list[Future[None]] = []
        for item, start in zip(items, starts, strict=True):
            item.region.forget_pages()
            parts += item.region.read(buffer, start).parts
            self.moved += item.nbytes
        return FetchedTensors(items, buffer, starts, Transfer(parts))

    def _copy_in(self, batch: FetchedTensors) -> None:
        """Copy tensors that were replaced into the buffer."""
        for index, item in enumerate(batch.items):
            tensor, memory = item.tensors[0], batch.memory(index)
            if tensor.data_ptr() != memory.data_ptr():
                memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, _strides(tensor)).copy_(tensor)

    def _room(self, items: Sequence[DiskTensor]) -> tuple[Buffer, tuple[int, ...]]:
        """A buffer for `items`, and the start of each in it."""
        *starts, need = accumulate((paged(item.nbytes) for item in items), initial=0)
        need = max(need, PAGE)
        while not self._collect(need):
            if self._written:
                self._end(self._written[0])
            elif self._ahead:  # the order of use has changed
                unused = self._ahead.pop(next(iter(self._ahead)))
                unused.transfer.wait()
                self._free.append(unused.buffer)
            else:
                break  # `check` has passed: what is over the budget is in use
        fitting = [buffer for buffer in self._free if need <= len(buffer.bytes) <= 2 * need]
        if fitting:
            buffer = min(fitting, key=lambda each: len(each.bytes))
            self._free.remove(buffer)
            return buffer, tuple(starts)
        self._give_up(need)
        self.taken += need
        return Buffer(need), tuple(starts)

    def _collect(self, need: int) -> bool:
        """Return True if there is memory for `need` more bytes, or a free buffer."""
        self._end_writes(every=False)
        free = sum(len(buffer.bytes) for buffer in self._free)
        return self.taken - free + need <= self.budget

    def _give_up(self, need: int) -> None:
        """Free buffers until `need` more bytes are within the budget; all of them for 0."""
        while self._free and (not need or self.taken + need > self.budget):
            self.taken -= len(self._free.pop(0).bytes)

    def _end_writes(self, *, every: bool) -> None:
        for batch in list(self._written):
            if every or batch.transfer.done:
                self._end(batch)

    def _end(self, batch: FetchedTensors) -> None:
        self._written.remove(batch)
        batch.transfer.wait()
        self._free.append(batch.buffer)


def without_base(tensor: Tensor) -> Tensor:
    """`tensor` as another object with the same memory. A view would keep the memory of its base in use."""
    other = torch.empty(0, dtype=tensor.dtype)
    with no_functions():
        other.data = tensor.detach()
    return other


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()
