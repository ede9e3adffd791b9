"""Rows of a tensor on each data rank: as FSDP2 shards dimension 0, and the way back."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_3d.axes.group import Group


def my_rows(full: Tensor, rank: int, size: int) -> Tensor:
    """Return the rows of `rank` of `size` (as `torch.chunk`: all but the last ranks have the same number)."""
    chunks = torch.chunk(full, size, dim=0)
    return chunks[rank] if rank < len(chunks) else full[:0]


def my_interval(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first of the rows that `my_rows` returns of so many, and the row after the last."""
    step = -(-rows // size)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def all_rows(mine: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """Return the full tensor of `shape`, of which every rank of `group` has the rows `mine`. Collective."""
    everyone = Group(group)
    rows = -(-shape[0] // everyone.size)
    padded = mine.new_zeros((rows, *shape[1:]))
    padded[: mine.shape[0]] = mine
    full = mine.new_empty((rows * everyone.size, *shape[1:]))
    everyone.all_gather(full, padded)
    return full[: shape[0]]


def padded(gradient: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return `gradient` with zero rows added until `size` divides them; without a copy where none are missing."""
    if gradient.ndim and not gradient.shape[0] % size and gradient.dtype == dtype and gradient.is_contiguous():
        return gradient
    rows = gradient.to(dtype).contiguous().view(gradient.shape or (1,))
    missing = -rows.shape[0] % size
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def make_contiguous(parameter: nn.Parameter) -> tuple[int, ...]:
    """Store `parameter` row by row, as FSDP2 wants it. Return the strides that it had, () if they were these."""
    if parameter.is_contiguous() or isinstance(parameter, DTensor):
        return ()
    stride = parameter.stride()
    parameter.data = parameter.data.contiguous()
    return stride
