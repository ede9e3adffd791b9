"""Exchange between the stages of a pipeline outside of steps: states that only some ranks have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.axes.group import Group
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
        self._elsewhere: set[nn.Parameter] = set()
        self.on_some_ranks: dict[nn.Parameter, tuple[str, int]] = {}
        """Parameters that some ranks do not have: their names, and the first rank with them. Equal on every rank."""

    def locate_parameters(self, module: nn.Module) -> None:
        """Find the parameters of `module`, or of a copy, that another rank of the pipeline counts and saves."""
        self._elsewhere |= {
            parameter
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if parameter.is_meta or self.first_holder.get(name, self.rank) != self.rank
        }
        for name, parameter in module.named_parameters():
            owners = [self.stage_rank[stage] for stage in self.split.stages_of(name)]
            if len(set(owners)) < self.peers.size:
                self.on_some_ranks[parameter] = name, owners[0]

    def with_gradient(self, gathered: Mapping[nn.Parameter, Tensor]) -> set[str]:
        """Names of parameters in `on_some_ranks` with a gradient on a rank that has them. Collective.

        Args:
            gathered: the tensor that has the gradient in the place of a parameter.
        """
        if not self.on_some_ranks or self.peers.simulated:
            return set()
        has_gradient = [int(gathered.get(parameter, parameter).grad is not None) for parameter in self.on_some_ranks]
        somewhere = talk.Largest(has_gradient, self.group).wait()
        return {name for (name, _), has in zip(self.on_some_ranks.values(), somewhere, strict=True) if has}

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts `parameter` in norms and provides it to the others."""
        return parameter not in self._elsewhere

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
