"""Exchange between the stages of a pipeline: states that only some ranks have, gradients of tied parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.axes.parameters import Parameters
from lightning_3d.pipeline.split import PipelineSplit, Tie
from lightning_3d.pipeline.wire import Spec, Wire, naming
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import like, local


class StageExchange:
    """Parameters and their ranks, for one pipeline."""

    def __init__(
        self, split: PipelineSplit, group: dist.ProcessGroup, stage_rank: Sequence[int], device: torch.device
    ) -> None:
        self.split, self.group, self.stage_rank, self.device = split, group, stage_rank, device
        self.peers = Group(group)
        self.rank = self.peers.rank
        self.first_holder = {name: stage_rank[tie.stages[0]] for tie in split.ties for name in tie.names}

    def locate(self, parameters: Parameters) -> None:
        """Note which rank of the pipeline counts and saves each parameter."""
        parameters.exchange = self.exchange
        for held in parameters:
            first = {self.first_holder.get(name, self.rank) for name in held.names}
            held.counted = not held.now.is_meta and first == {self.rank}
            owners = [self.stage_rank[stage] for stage in self.split.stages_of(held.names[0])]
            held.source = owners[0] if len(set(owners)) < self.peers.size else None

    def with_gradient(self, parameters: Parameters) -> set[str]:
        """Names of parameters that some ranks lack, with a gradient on a rank that has them. Collective."""
        some = [held for held in parameters if held.source is not None]
        if not some:
            return set()
        somewhere = talk.PendingMax([int(held.now.grad is not None) for held in some], self.group).wait()
        return {held.names[0] for held, has in zip(some, somewhere, strict=True) if has}

    def exchange(self, mine: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
        """The entries of all ranks of the pipeline; each key must be provided by one rank only. Collective. Tensors
        travel as tensors, everything else as Python objects.
        """
        of = lambda value: Spec.of(value) if isinstance(value, Tensor) else value  # noqa: E731
        outline = {key: {name: of(it) for name, it in entry.items()} for key, entry in mine.items()}
        result: dict[Any, dict[str, Any]] = {}
        for source, entries in enumerate(talk.gather(outline, self.group)):
            for key, entry in entries.items():
                result[key] = {name: self._share(mine, key, name, value, source) for name, value in entry.items()}
        return result

    def _share(self, mine: Mapping[Any, Mapping[str, Any]], key: Any, name: str, value: Any, source: int) -> Any:
        if not isinstance(value, Spec):
            return value
        if source == self.rank:
            tensor: Tensor = mine[key][name].detach().to(self.device).contiguous()
        else:
            tensor = value.empty(self.device)
        return self.peers.broadcast(tensor, source)


_TAG = 1 << 29


class Ties:
    """The ties of this rank, grouped by the ranks that have them. Equal sums keep the copies equal bit for bit."""

    def __init__(
        self, split: PipelineSplit, wire: Wire, stage_rank: Sequence[int], grad_holder: Callable[[str], Tensor]
    ) -> None:
        """`grad_holder` gives the tensor that has this rank's gradient of a parameter, by its name. With FSDP2 that is
        the gathered parameter, as long as its gradient has not been reduced."""
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
        self._present = talk.PendingMax(present, self.wire.group)
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
        pieces = total.split([part.numel() for part in parts])
        for tensor, part, piece in zip(tensors, parts, pieces, strict=True):
            if id(tensor) in absent:
                continue
            if tensor.grad is None:
                tensor.grad = like(tensor, piece.view(part.shape).clone())
            else:
                local(tensor.grad).copy_(piece.view(part.shape))

    def _exchange(self, ranks: tuple[int, ...], mine: Tensor) -> Tensor:
        others = [rank for rank in ranks if rank != self.wire.rank]
        buffers = {rank: torch.empty_like(mine) for rank in others}
        with naming("exchanging gradients of tied parameters"):
            self.wire.peers.begin_swap("send", dict.fromkeys(others, mine), buffers, _TAG)()
        buffers[self.wire.rank] = mine
        total = buffers[ranks[0]].clone()
        for rank in ranks[1:]:
            total += buffers[rank]
        return total
