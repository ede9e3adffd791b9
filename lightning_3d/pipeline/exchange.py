"""Exchange between the stages of a pipeline outside of steps: states that only some ranks have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.axes.parameters import Parameters
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.wire import Spec
from lightning_3d.ranks import talk


class StageExchange:
    """Parameters and their ranks, for one pipeline.

    Args:
        split: the plan that the module was cut by.
        group: the ranks of this pipeline.
        stage_rank: rank in `group` of each stage.
        device: sends the tensors of this rank.
    """

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

    def with_gradient(self, parameters: Parameters, gathered: Mapping[nn.Parameter, Tensor]) -> set[str]:
        """Names of parameters that some ranks lack, with a gradient on a rank that has them. Collective.

        Args:
            parameters: the table, equal on every rank.
            gathered: the tensor that has the gradient in the place of a parameter.
        """
        some = [held for held in parameters if held.source is not None]
        if not some:
            return set()
        has_gradient = [int(gathered.get(held.now, held.now).grad is not None) for held in some]
        somewhere = talk.Largest(has_gradient, self.group).wait()
        return {held.names[0] for held, has in zip(some, somewhere, strict=True) if has}

    def exchange(self, mine: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
        """The entries of all ranks of the pipeline; each key must be provided by one rank only. Collective.

        Args:
            mine: for each key some named values; tensors travel as tensors, everything else as Python objects.
        """
        outlines = talk.gather({key: _outline(entry) for key, entry in mine.items()}, self.group)
        result: dict[Any, dict[str, Any]] = {}
        for source, outline in enumerate(outlines):
            for key, entry in outline.items():
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


def _outline(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Spec.of(value) if isinstance(value, Tensor) else value for name, value in entry.items()}
