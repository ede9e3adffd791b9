"""Rows of a tensor on each data rank: how FSDP2 deals dimension 0 out, and the way back."""

import torch
from torch import Tensor
from torch import distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def my_rows(whole: Tensor, rank: int, size: int) -> Tensor:
    """The rows that `rank` of `size` holds (as `torch.chunk`: all but the last ranks hold the same number)."""
    chunks = torch.chunk(whole, size, dim=0)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def all_rows(mine: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor of `shape`, of which every rank of `group` holds `mine`. Collective."""
    size = dist.get_world_size(group)
    rows = -(-shape[0] // size)
    padded = mine.new_zeros((rows, *shape[1:]))
    padded[: mine.shape[0]] = mine
    whole = mine.new_empty((rows * size, *shape[1:]))
    _all_gather(whole, padded, group=group)
    return whole[: shape[0]]
