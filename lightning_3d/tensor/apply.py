"""`apply_tensor`: make a module compute by its plan, and undo it.

`Trainer(detect_anomaly=True)` asks every gradient whether anything in it is NaN, which DTensor (torch 2.13) does not
know how to answer: of a shard's, all tensor ranks do together, so that all of them raise.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_3d.tensor.autograd_collectives import gather_shards
from lightning_3d.tensor.axis import GroupAxis, Ledger
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.guards import guard_shards
from lightning_3d.tensor.patch import Undo, patch_unit
from lightning_3d.tensor.tensor_plan import TensorPlan
from lightning_3d.tensor.vocabulary import patch_vocabulary


@dataclass
class AppliedTensor:
    """A module in shards."""

    module: nn.Module
    plan: TensorPlan
    mesh: DeviceMesh
    undo_patches: Undo
    originals: dict[str, nn.Parameter]
    """The parameter objects that the shards replace, without their values, by first name."""

    @property
    def splits(self) -> Mapping[str, TensorSplit]:
        """Every split parameter, by name."""
        return self.plan.splits

    @torch.no_grad()
    def undo(self) -> None:
        """Gather the shards into the parameter objects that were there before and take every patch off. Collective."""
        wholes: dict[int, nn.Parameter] = {}
        for name, owner, own_name in list(_owners(self.module, self.plan.splits)):
            shard = owner._parameters[own_name]
            if shard is None or not isinstance(shard, DTensor):
                continue
            if id(shard) not in wholes:
                whole = self.originals[name]
                whole.data = full_tensor(shard, self.plan.splits[name])
                whole.requires_grad_(shard.requires_grad)
                wholes[id(shard)] = whole
            owner._parameters[own_name] = wholes[id(shard)]
        self.undo_patches.run()


def apply_tensor(
    module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, ledger: Ledger | None = None
) -> AppliedTensor:
    """Replace the parameters that `plan` splits by this rank's shards (DTensors on `mesh`) and patch the blocks.

    Args:
        module: the whole module, with equal values on every tensor rank. Parameters on meta (blocks of other pipeline
            stages) are left alone.
        plan: from `plan_tensor` with the size of `mesh`.
        mesh: the one-dimensional tensor mesh.
        ledger: told of every collective.
    """
    _answer_anomaly_checks()
    axis = GroupAxis(mesh.get_group(), ledger)
    undo, originals = Undo(), dict[str, nn.Parameter]()
    shards: dict[int, nn.Parameter] = {}
    for name, owner, own_name in list(_owners(module, plan.splits)):
        whole = owner._parameters[own_name]
        if whole is None or whole.is_meta or isinstance(whole, DTensor):  # the last: done, under another name of owner
            continue
        if id(whole) not in shards:
            shards[id(whole)] = _shard(whole, plan.splits[name], mesh)
        originals[name] = whole
        owner._parameters[own_name] = shards[id(whole)]
    for whole in {id(p): p for p in originals.values()}.values():
        whole.data = whole.data.new_empty(0)
    for name, unit in plan.units.items():
        if not _is_elsewhere(module, [f"{name}.{own}" if name else own for own in unit.splits]):
            undo.steps.append(patch_unit(module.get_submodule(name), unit, axis).run)
    guard_shards(module, plan, undo)
    for child in module.modules():
        if plan.units and isinstance(child, nn.TransformerEncoder):
            undo.set(child, "use_nested_tensor", False)  # torch's fused eval layers take nested tensors, shards do not
    present = {name: split for name, split in plan.vocabulary.items() if not _is_elsewhere(module, [name])}
    undo.steps.append(patch_vocabulary(module, present, axis).run)
    return AppliedTensor(module, plan, mesh, undo, originals)


@torch.no_grad()
def full_tensor(tensor: Tensor, split: TensorSplit | None) -> Tensor:
    """The whole of a parameter or gradient, in source order also where it is a fused matrix. Collective over its mesh.

    Args:
        tensor: plain, a shard on the tensor mesh, or what FSDP2 made of one: a shard on a mesh whose last axis is the
            tensor axis.
        split: how it is divided over the tensor ranks; None where it is not.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if split is None:
        return tensor.full_tensor()
    mesh, shard = tensor.device_mesh, tensor.to_local().detach()
    for axis in reversed(range(mesh.ndim - 1)):
        shard = _gather_data(shard, tensor, axis, split)
    return gather_shards(shard, GroupAxis(mesh.get_group(mesh.ndim - 1)), split)


def _gather_data(shard: Tensor, tensor: DTensor, axis: int, split: TensorSplit) -> Tensor:
    """Undo what FSDP2 did along one mesh axis: it divides the tensor rank's shard in chunks."""
    placement, mesh = tensor.placements[axis], tensor.device_mesh
    if placement.is_replicate():
        return shard
    kind: Any = placement  # Shard, or the private _StridedShard (torch 2.13): both have a dimension
    dim: int = kind.dim
    tensor_rank = mesh.get_local_rank(mesh.ndim - 1)
    length = split.local_size(tensor_rank) if dim == split.dim else tensor.shape[dim]
    step = -(-length // mesh.size(axis))
    shapes = [list(shard.shape) for _ in range(mesh.size(axis))]
    for rank, shape in enumerate(shapes):
        shape[dim] = max(0, min(length, (rank + 1) * step) - rank * step)
    return torch.cat(GroupAxis(mesh.get_group(axis)).all_gather(shard, shapes), dim=dim)


def _is_elsewhere(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether another pipeline stage holds these parameters: here they are on meta, or gone."""
    owned = dict(module.named_parameters(remove_duplicate=False))
    return any(name not in owned or owned[name].is_meta for name in names)


def shard_of(whole: Tensor, split: TensorSplit, mesh: DeviceMesh) -> DTensor:
    """The shard of `whole` that is this tensor rank's."""
    local = local_part(whole, split, mesh.get_local_rank()).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, [Shard(split.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _shard(whole: nn.Parameter, split: TensorSplit, mesh: DeviceMesh) -> nn.Parameter:
    parameter = nn.Parameter(shard_of(whole.detach(), split, mesh), requires_grad=whole.requires_grad)
    parameter.__dict__.update(whole.__dict__)
    return parameter


def _owners(module: nn.Module, splits: Mapping[str, TensorSplit]) -> Iterator[tuple[str, nn.Module, str]]:
    owners = dict(module.named_modules(remove_duplicate=False))
    for name in splits:
        owner, _, own_name = name.rpartition(".")
        if own_name in getattr(owners.get(owner), "_parameters", {}):
            yield name, owners[owner], own_name


@cache
def _answer_anomaly_checks() -> None:
    """Add DTensor's missing rule for the NaN check of anomaly detection. torch has no way to remove a rule."""

    @register_sharding(torch.ops.aten._is_any_true.default)
    def rule(_: object) -> list[tuple[list[Replicate], list[Replicate]]]:
        return [([Replicate()], [Replicate()])]
