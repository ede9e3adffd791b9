"""Parameters that several stages own: their gradients are summed, so that the copies stay equal bit for bit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_3d.pipeline.split import PipelineSplit, Tie
from lightning_3d.pipeline.wire import Wire
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import like, local

_TAG = 1 << 29


class Ties:
    """The ties of this rank, grouped by the ranks that have them."""

    def __init__(
        self, split: PipelineSplit, wire: Wire, stage_rank: Sequence[int], grad_holder: Callable[[str], Tensor]
    ) -> None:
        """
        Args:
            grad_holder: the tensor whose `.grad` is this rank's gradient of a parameter, by the parameter's name. With
                FSDP2 that is the gathered parameter, as long as its gradient has not been reduced.
        """
        self.wire, self.grad_holder = wire, grad_holder
        self.groups: dict[tuple[int, ...], list[Tie]] = {}
        self.ties: list[Tie] = []
        """Those of several ranks, also of others. Equal on every rank."""
        for tie in split.ties:
            ranks = tuple(sorted({stage_rank[stage] for stage in tie.stages}))
            if len(ranks) > 1:
                self.ties.append(tie)
                if wire.rank in ranks:
                    self.groups.setdefault(ranks, []).append(tie)

    def sum_gradients(self) -> None:
        """Give every rank of a tie the sum of all its gradients, added in the order of ranks."""
        if not self.ties:
            return
        mine = {tie.name for ties in self.groups.values() for tie in ties}
        present = [int(tie.name in mine and self.grad_holder(tie.name).grad is not None) for tie in self.ties]
        self._present = talk.Largest(present, self.wire.group)
        for ranks, ties in self.groups.items():
            tensors = [self.grad_holder(tie.name) for tie in ties]
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            for dtype in dict.fromkeys(tensor.dtype for tensor in trained):
                self._sum(ranks, [tensor for tensor in trained if tensor.dtype == dtype])

    def _without_gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of `tensors` that have a gradient on no rank. A rank that has all of them need not ask."""
        if all(tensor.grad is not None for tensor in tensors):
            return []
        named = zip(self.ties, self._present.wait(), strict=True)
        return [self.grad_holder(tie.name) for tie, present in named if not present]

    def _sum(self, ranks: tuple[int, ...], tensors: list[Tensor]) -> None:
        absent = {id(tensor) for tensor in self._without_gradient(tensors)}
        parts = [
            local(tensor.grad) if tensor.grad is not None else torch.zeros_like(local(tensor)) for tensor in tensors
        ]
        mine = torch.cat([part.detach().reshape(-1) for part in parts])
        total = self._exchange(ranks, mine)
        offset = 0
        for tensor, part in zip(tensors, parts, strict=True):
            piece = total[offset : offset + part.numel()].view(part.shape)
            offset += part.numel()
            if id(tensor) in absent:
                continue
            if tensor.grad is None:
                tensor.grad = like(tensor, piece.clone())
            else:
                local(tensor.grad).copy_(piece)

    def _exchange(self, ranks: tuple[int, ...], mine: Tensor) -> Tensor:
        others = [rank for rank in ranks if rank != self.wire.rank]
        buffers = {rank: torch.empty_like(mine) for rank in others}
        with self.wire.naming("exchanging gradients of tied parameters"):
            self.wire.peers.begin_swap("send", dict.fromkeys(others, mine), buffers, _TAG)()
        buffers[self.wire.rank] = mine
        total = buffers[ranks[0]].clone()
        for rank in ranks[1:]:
            total += buffers[rank]
        return total
