"""The forward of an experts module on a rank that owns some experts, and `apply_experts`, which puts it there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.expert_plan import DividedExperts, ExpertPlan
from lightning_3d.experts.expert_shards import InGraph, own_shards
from lightning_3d.experts.listed_forward import ListedForward
from lightning_3d.experts.token_route import TokenRoute, to_owners, to_tokens
from lightning_3d.layout import EXPERT_AXIS
from lightning_3d.module.expert_modules import RoutedCall
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.trees import leaves
from lightning_3d.tensor.apply import AppliedTensor, replace_by_shards
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.zero import OwnExperts


class ExpertForward(ForwardLayer, rank=Layer.EXPERTS):
    """Sends tokens to the owners of their experts, computes those of this rank, and takes the results back."""

    def __init__(self, module: nn.Module, experts: DividedExperts, axis: Axis) -> None:
        super().__init__(module)
        self.experts, self.axis, self.call = experts, axis, RoutedCall(module)
        self.loads: Tensor | int = 0
        """Rows that each expert of this rank got."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes, others = self.call.taken(args, kwargs)
        hidden, index, weights = compute_late(tuple(routes))
        self.call.check(hidden, index, weights, "Use expert_parallel_size=1.")
        if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(others)):
            raise UnsupportedError(
                f"{type(self.module).__name__} is called with a tensor among {', '.join(others)}, beside hidden"
                " states, experts and weights. It would not travel with the tokens. Use expert_parallel_size=1."
            )
        route = TokenRoute.of(index, self.experts.count, self.axis)
        if self.module.training:
            self.loads = self.loads + route.loads
        rows, factors = to_owners(hidden.reshape(-1, hidden.shape[-1]), weights, route)
        own = dict.fromkeys(self.experts.numbers, self.experts.count // self.axis.size)
        with own_shards(self.module, self.experts.parameters, self.axis, numbers=own) as shards:
            result = self.call.run(self.next, [rows, route.experts[:, None], factors], others)
        # without rows experts may be left out of the graph, on this rank alone
        used = () if sum(route.receives) else shards.values()
        return to_tokens(InGraph.apply(result, 2, rows, factors, *used), route).view(hidden.shape)


class GatheredForward(ForwardLayer, rank=Layer.EXPERTS):
    """The forward of code that multiplies all experts at once: with the experts of all ranks, gathered for the call."""

    def __init__(self, module: nn.Module, experts: DividedExperts, axis: Axis) -> None:
        super().__init__(module)
        self.experts, self.axis = experts, axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_shards(self.module, self.experts.parameters, self.axis, gathered=True):
            return self.next(*args, **kwargs)


@dataclass
class AppliedExperts(AppliedTensor):
    """A module of which each rank owns some experts."""

    own: OwnExperts
    mixtures: dict[str, "ExpertForward | ListedForward"]
    """Those whose tokens travel, by name."""

    def take_loads(self) -> dict[str, tuple[int, int]]:
        """Rows of the fullest expert and of all here, in training since the last call, read once for all mixtures."""
        found = {name: each.loads for name, each in self.mixtures.items() if isinstance(each.loads, Tensor)}
        for each in self.mixtures.values():
            each.loads = 0
        if not found:
            return {}
        kind = self.mesh.device_type  # those of a list are on the host
        read = torch.stack([torch.stack([each.max(), each.sum()]).to(kind) for each in found.values()]).tolist()
        return {name: (fullest, rows) for name, (fullest, rows) in zip(found, read, strict=True)}


def make_layers(module: nn.Module, experts: DividedExperts, axis: Axis) -> list[ForwardLayer]:
    """The layer for the forward of `module`, and those of the experts of a list."""
    if not experts.listed:
        return [(GatheredForward if experts.gathered else ExpertForward)(module, experts, axis)]
    mixture = ListedForward(module, experts, axis)
    return [mixture, *mixture.layers]


def apply_experts(
    module: nn.Module, plan: ExpertPlan, mesh: DeviceMesh, undo: UndoStack, ledger: Ledger | None = None
) -> AppliedExperts:
    """Replace the experts of `module` by those of this rank, and let tokens travel.

    Args:
        module: with equal weights on every rank. Parameters on meta, of other pipeline stages, stay unchanged.
        plan: from `plan_experts`, with the size of `mesh`.
        mesh: the one-dimensional mesh of owners.
        undo: reverts it, which is collective.
        ledger: counts the bytes of every collective.
    """
    axis = Axis(Group(mesh.get_group(), EXPERT_AXIS, ledger))
    here = {name: module.get_submodule(name) for name in plan.modules}
    here = {name: part for name, part in here.items() if not any(p.is_meta for p in part.parameters())}
    applied = AppliedExperts(module, plan.splits, mesh, {}, OwnExperts(), {})
    replace_by_shards(applied, undo)
    for name, part in here.items():
        experts = plan.modules[name]
        for layer in make_layers(part, experts, axis):
            add_layer(layer, undo)
            if isinstance(layer, ExpertForward | ListedForward):
                applied.mixtures[name] = layer
        if experts.copied:
            applied.own.alone += [part.get_parameter(own) for own in experts.parameters]
        else:
            applied.own.modules.append(part)
    return applied
