"""Make tensors equal on every rank of a group, many at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch import distributed as dist

BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensors` with those of the first rank of `group`. Every rank passes tensors of the same shapes."""
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.broadcast(bucket[0], group=group, group_src=0)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        for tensor in same:
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
