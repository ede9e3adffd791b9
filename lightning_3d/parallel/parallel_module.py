"""A module and the parallelisms that were applied to it: full tensors, shards, and the way back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_3d.activations.recompute_blocks import RecomputedBlocks
from lightning_3d.axes.parameters import Parameters
from lightning_3d.axes.state_dict import full_optimizer_entries, swap_parameters
from lightning_3d.experts.expert_forward import AppliedExperts
from lightning_3d.module.anatomy import place_of
from lightning_3d.module.torch_private import own_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.offload.disk_tensors import DiskTransfers
from lightning_3d.pipeline.exchange import StageExchange
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.tensor.apply import AppliedTensor
from lightning_3d.zero import DataParallel


@dataclass
class ParallelModule:
    """A module and the parallelisms that were applied to it."""

    module: nn.Module
    data: DataParallel = field(default_factory=DataParallel)
    tensor: AppliedTensor | None = None
    experts: AppliedExperts | None = None
    recomputed: RecomputedBlocks | None = None
    stages: StageExchange | None = None
    pipeline: Pipeline | None = None
    """Runs the stages, once it is opened; None without stages."""
    parameters: Parameters = field(default_factory=lambda: Parameters(nn.Module()))
    """Where each parameter is, from `parallelize` on."""
    changes: UndoStack = field(default_factory=UndoStack)
    """Undoes the parallelisms, and what else is put on the module until then."""
    fitted: UndoStack = field(default_factory=UndoStack)
    """Undoes what the last fit has put on its optimizers."""
    disk: DiskTransfers | None = None
    """For what is on a disk."""

    def abandon(self) -> None:
        """Remove hooks and patches once other ranks do not answer any more. The parameters stay sharded."""
        self.fitted.abandon()
        self.changes.abandon()

    def leave_in_shards(self) -> None:
        self.data.reshard()
        for parameter in self.module.parameters():
            parameter.grad = None

    @contextmanager
    def _in_first_places(self) -> Iterator[None]:
        """Have parameters in their places of set-up: `prune.remove` in `on_train_end` has given one another name."""
        places = {held.now: place_of(self.module, held.names[0]) for held in self.parameters}
        moved = []
        for owner in self.module.modules():
            for name, each in list(own_parameters(owner).items()):
                first, leaf = places.get(each, (owner, name)) if each is not None else (owner, name)
                if own_parameters(first).get(leaf) is None:
                    own_parameters(first)[leaf] = own_parameters(owner).pop(name)
                    moved.append((first, leaf, owner, name))
        yield
        for first, leaf, owner, name in moved:
            own_parameters(owner)[name] = own_parameters(first).pop(leaf)

    @torch.no_grad()
    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module plain and unsplit again, and give `optimizers` its parameters and full states. Collective."""
        self.fitted.close()
        if type(self.data) is DataParallel and (self.tensor or self.experts or self.stages) is None:
            self.changes.close()
            return
        with self._in_first_places():
            self.data.reshard()
            entries = [full_optimizer_entries(optimizer, self.parameters) for optimizer in optimizers]
            before = dict(self.module.named_parameters(remove_duplicate=False))
            self.changes.close()
            after = dict(self.module.named_parameters(remove_duplicate=False))
        # an evaluation replaces parameters too, and the optimizers of the `fit` before it have the originals
        swaps = {held.before: after[held.names[0]] for held in self.parameters}
        swap_parameters(optimizers, swaps | {before[name]: after[name] for name in before}, entries)
