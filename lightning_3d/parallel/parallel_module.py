"""A module and the parallelisms that were applied to it: full tensors, shards, and the way back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.activations.recompute_blocks import RecomputedBlocks
from lightning_3d.module.state_dict import full_optimizer_entries, swap_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.offload.disk_tensors import DiskTensor, DiskTransfers
from lightning_3d.pipeline.exchange import StageExchange
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.tensor.apply import AppliedTensor, full_tensor, shard_of
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.zero import DataParallel, ShardedData


@dataclass
class ParallelModule:
    """A module and the parallelisms that were applied to it."""

    module: nn.Module
    data: DataParallel = field(default_factory=DataParallel)
    tensor: AppliedTensor | None = None
    recomputed: RecomputedBlocks | None = None
    stages: StageExchange | None = None
    pipeline: Pipeline | None = None
    """Runs the stages, once it is opened; None without stages."""
    originals: Mapping[str, nn.Parameter] = field(default_factory=dict)
    changes: UndoStack = field(default_factory=UndoStack)
    """Undoes the parallelisms, and what else is put on the module until then."""
    fitted: UndoStack = field(default_factory=UndoStack)
    """Undoes what the last fit has put on its optimizers."""
    splits: Mapping[nn.Parameter, TensorSplit] = field(default_factory=dict)
    disk: DiskTransfers | None = None
    """For what is on a disk."""

    @property
    def swaps(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameter registered before -> parameter registered now, for those that were replaced."""
        now = dict(self.module.named_parameters())
        return {old: now[name] for name, old in self.originals.items() if now[name] is not old}

    def gather_full(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The full tensor of `shard`, which is sharded like `parameter`. Collective over the data and tensor axes."""
        shard = self.data.gather_full(parameter, shard)
        split = self.splits.get(parameter)
        return full_tensor(shard, split) if split is not None else shard

    def take_shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's shard of `full`, sharded like `parameter`."""
        if parameter.is_meta:
            return torch.empty_like(full, device="meta")
        split = self.splits.get(parameter)
        if split is not None and self.tensor is not None:
            full = shard_of(full.to(parameter.device), split, self.tensor.mesh)
        return self.data.take_shard(parameter, full)

    def counts(self, parameter: nn.Parameter) -> bool:
        """True where this rank's stage is the one that counts a parameter which several stages have."""
        return self.stages is None or self.stages.counts(parameter)

    def shard_on_disk(self, parameter: nn.Parameter) -> DiskTensor | None:
        """The shard of `parameter` where it is on a disk."""
        disk = self.data.disk if isinstance(self.data, ShardedData) else None
        return None if disk is None else disk.of.get(parameter)

    def abandon(self) -> None:
        """Remove hooks and patches once other ranks do not answer any more. The parameters stay sharded."""
        self.fitted.abandon()
        self.changes.abandon()

    def leave_in_shards(self) -> None:
        """End a run after which the module stays in shards."""
        self.data.reshard()
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module plain and unsplit again, and give `optimizers` its parameters and full states. Collective."""
        self.fitted.close()
        if type(self.data) is DataParallel and self.tensor is None and self.stages is None:
            self.changes.close()
            return
        self.data.reshard()
        entries = [full_optimizer_entries(optimizer, self.gather_full, self.stages) for optimizer in optimizers]
        before = dict(self.module.named_parameters(remove_duplicate=False))
        self.changes.close()
        after = dict(self.module.named_parameters(remove_duplicate=False))
        # an evaluation replaces parameters too, and the optimizers of the `fit` before it have the originals
        swaps = {old: after[name] for name, old in self.originals.items()}
        swap_parameters(optimizers, swaps | {before[name]: after[name] for name in before}, entries)
