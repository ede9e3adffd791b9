"""`apply_tensor`: make a module compute by its plan, and undo it.

`Trainer(detect_anomaly=True)` checks every gradient for NaN by an operation that DTensor (torch 2.13) has no rule for.
The rule registered here makes the tensor ranks answer together, so that all of them raise.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.parameters import Held
from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.module.torch_private import ANY_TRUE, in_wrapper, is_compiled, own_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.shards import unsharded
from lightning_3d.sandbox.deferred import Deferred, cut_later, empty, realize
from lightning_3d.tensor.autograd_collectives import gather_shards
from lightning_3d.tensor.axis import Axis, peer_group
from lightning_3d.tensor.dropout import ShardDraws
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.patch import patch_unit
from lightning_3d.tensor.tensor_plan import TensorPlan
from lightning_3d.tensor.vocabulary import patch_vocabulary


@dataclass
class AppliedTensor:
    """A module of which each rank of `mesh` has shards of some parameters."""

    module: nn.Module
    splits: Mapping[str, TensorSplit]
    """Every split parameter, by name."""
    mesh: DeviceMesh
    originals: dict[str, nn.Parameter]
    """The parameter objects that the shards replaced, by first name. They have no values."""

    def split_of(self, held: Held) -> TensorSplit | None:
        """Return the division of a parameter, None where the ranks of this axis do not divide it."""
        here = [self.splits[name] for name in held.names if name in self.splits and not held.now.is_meta]
        return here[-1] if here else None

    def full(self, held: Held, shard: Tensor) -> Tensor:
        split = self.split_of(held)
        return shard if split is None else full_tensor(shard, split)

    def shard(self, held: Held, full: Tensor) -> Tensor:
        split = self.split_of(held)
        return full if split is None else shard_of(full.to(held.now.device), split, self.mesh)

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the shards into the original parameter objects. Collective."""
        gathered: dict[int, nn.Parameter] = {}
        for name, owner, own_name in list(_owners(self.module, self.splits)):
            shard = own_parameters(owner)[own_name]
            if shard is None or not isinstance(shard, DTensor):
                continue
            if id(shard) not in gathered:
                realize([shard])
                original = self.originals[name]
                original.data = full_tensor(shard, self.splits[name])
                original.requires_grad_(shard.requires_grad)
                gathered[id(shard)] = original
            own_parameters(owner)[own_name] = gathered[id(shard)]


def apply_tensor(
    module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, undo: UndoStack, *, ledger: Ledger | None = None
) -> AppliedTensor:
    """Replace the parameters that `plan` splits by this rank's shards (DTensors on `mesh`) and patch the blocks.

    Values are equal on every tensor rank. Parameters on meta (blocks of other pipeline stages) stay unchanged.
    """
    _answer_anomaly_checks()
    axis = Axis(peer_group(mesh.get_group(), ledger, mesh.device_type))
    applied = AppliedTensor(module, plan.splits, mesh, {})
    replace_by_shards(applied, undo)
    for name, unit in plan.units.items():
        if not _is_elsewhere(module, [f"{name}.{own}" if name else own for own in unit.splits]):
            patch_unit(module.get_submodule(name), unit, axis, undo, name)
    _warn_of_uncompiled(module, plan)
    for child in module.modules():
        if plan.units and isinstance(child, nn.TransformerEncoder):
            # shards cannot be nested tensors, as torch's fused eval layers use
            undo.set(child, "use_nested_tensor", False)
    present = {name: split for name, split in plan.vocabulary.items() if not _is_elsewhere(module, [name])}
    patch_vocabulary(module, present, axis, undo)
    return applied


def replace_by_shards(applied: AppliedTensor, undo: UndoStack) -> None:
    """Register this rank's shards in the place of the parameters that `applied` splits."""
    undo.collective(applied.unshard)
    shards: dict[int, nn.Parameter] = {}
    for name, owner, own_name in list(_owners(applied.module, applied.splits)):
        full = own_parameters(owner)[own_name]
        if full is None or full.is_meta or isinstance(full, DTensor):  # DTensor: done under another name of the owner
            continue
        if id(full) not in shards:
            shards[id(full)] = _shard(full, applied.splits[name], applied.mesh)
        applied.originals[name] = full
        own_parameters(owner)[own_name] = shards[id(full)]


@torch.no_grad()
def _warn_of_uncompiled(module: nn.Module, plan: TensorPlan) -> None:
    """Warn once of compiled blocks whose dropout on shards dynamo cannot follow."""
    blocks = ((module.get_submodule(name), unit) for name, unit in plan.units.items())
    block = next((block for block, unit in blocks if is_compiled(block) and ShardDraws(block, unit)), None)
    if block is not None:
        inside = in_wrapper(block)
        how = "run in several graphs" if inside is None else "run uncompiled in training"
        rank_zero_warn(
            f"Compiled blocks ({type(inside or block).__name__}) {how}: dropout acts on shards in them, so each tensor"
            " rank draws a mask of its own, which no graph can contain. For one graph set the rate of that dropout to"
            " 0. Dropout behind the block's sum over the ranks is compiled. docs/compile.md has all forms."
        )


def full_tensor(tensor: Tensor, split: TensorSplit | None) -> Tensor:
    """The full parameter or gradient. A fused matrix too is in source order. Collective over its mesh.

    `tensor` may be plain, a shard on the tensor mesh, or an FSDP2 shard of one, whose mesh ends with that axis.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if split is None:
        return unsharded(tensor)
    mesh, shard = tensor.device_mesh, tensor.to_local().detach()
    home, shard = shard.device, shard.to(mesh.device_type)  # offloaded shards are in host memory
    for axis in reversed(range(mesh.ndim - 1)):
        shard = _gather_data(shard, tensor, axis, split)
    return gather_shards(shard, Axis(Group(mesh.get_group(mesh.ndim - 1))), split).to(home)


def _gather_data(shard: Tensor, tensor: DTensor, axis: int, split: TensorSplit) -> Tensor:
    """Gather along one mesh axis, on which FSDP2 divides the tensor rank's shard into chunks."""
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
    return torch.cat(Axis(Group(mesh.get_group(axis))).all_gather(shard, shapes), dim=dim)


def _is_elsewhere(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if another pipeline stage owns these parameters: here they are on meta or absent."""
    owned = dict(module.named_parameters(remove_duplicate=False))
    return any(name not in owned or owned[name].is_meta for name in names)


def shard_of(full: Tensor, split: TensorSplit, mesh: DeviceMesh) -> DTensor:
    local = local_part(full, split, mesh.get_local_rank()).clone(memory_format=torch.contiguous_format)
    return _on_mesh(local, full, split, mesh)


def _on_mesh(local: Tensor, full: Tensor, split: TensorSplit, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(split.dim)], run_check=False, shape=full.shape, stride=full.stride())


def _shard(full: nn.Parameter, split: TensorSplit, mesh: DeviceMesh) -> nn.Parameter:
    """This tensor rank's shard of `full`, which is empty afterwards.

    The shard of a deferred parameter gets its value later: ZeRO shards it again, and all of them are too much.
    """
    trained, rank = full.requires_grad, mesh.get_local_rank()
    if isinstance(full, Deferred):
        shape = list(full.shape)
        shape[split.dim] = split.local_size(rank)
        memory = full.new_empty(shape)
        shard = nn.Parameter(_on_mesh(memory, full, split, mesh), requires_grad=trained)
        cut_later(full, split.dim, split.boxes(rank), shard)
    else:
        shard = nn.Parameter(shard_of(full.detach(), split, mesh), requires_grad=trained)
        empty(full)  # at once: full weights and shards together would be the peak of set-up
        return_freed_memory()
    shard.__dict__.update(full.__dict__)
    return shard


def _owners(module: nn.Module, splits: Mapping[str, TensorSplit]) -> Iterator[tuple[str, nn.Module, str]]:
    owners = dict(module.named_modules(remove_duplicate=False))
    for name in splits:
        owner, _, own_name = name.rpartition(".")
        if own_name in (own_parameters(owners[owner]) if owner in owners else ()):
            yield name, owners[owner], own_name


@cache
def _answer_anomaly_checks() -> None:
    """Add DTensor's missing rule for the NaN check of anomaly detection. torch has no way to remove a rule."""

    @register_sharding(ANY_TRUE)
    def rule(_: object) -> list[tuple[list[Replicate], list[Replicate]]]:
        return [([Replicate()], [Replicate()])]
