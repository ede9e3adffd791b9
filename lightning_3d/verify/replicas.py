"""Checks that ranks agree: on copies of a parameter (`verify="replicas"`), the first loss, buffers of a step."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch import distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.errors import DivergenceError
from lightning_3d.layout import CONTEXT_AXIS, EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Coordinate, Layout
from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.pipeline.loss_mean import equal_losses, rounding_of
from lightning_3d.ranks import talk
from lightning_3d.ranks.mesh import expert_place
from lightning_3d.ranks.shards import sharded_axes
from lightning_3d.sandbox.fingerprint import digest, is_absent
from lightning_3d.sandbox.snapshot import keeps_statistics
from lightning_3d.sandbox.trees import loss_of

EVERY = 25
"""Training batches between two comparisons of replicas."""


class ReplicaCheck(StepCheck):
    """Compares tensors of which several ranks have a copy, bit by bit: in the first step, or every `EVERY` batches."""

    def __init__(self, parallel: ParallelModule, layout: Layout, device: torch.device, *, once: bool) -> None:
        self.parallel, self.layout, self.device, self.once = parallel, layout, device, once
        self.buffers = [] if once else [name for name, _ in parallel.module.named_buffers()]
        """Those that all ranks know of: some are made while a stage trains. Data ranks may have other ones."""
        self.batches = 0

    def before_train(self, args: Args) -> None:
        step, self.batches = self.batches, self.batches + 1
        if not self.once and step % EVERY == 0:
            self._compare(f"before training batch {step}")

    def after_train(self, output: Any) -> None:
        if not self.parallel.module.automatic_optimization:  # the optimizer has stepped
            self._end_first()

    def after_backward(self) -> None:
        if self.parallel.module.automatic_optimization:
            self._end_first()

    def _end_first(self) -> None:
        if self.once and self.batches == 1:
            self.batches += 1
            self._compare("after the first training batch")

    def _compare(self, when: str) -> None:
        """Raise on every rank, naming the first parameter or buffer that differs. Collective over the world."""
        ranks = Group()
        if ranks.simulated:
            return
        named: list[tuple[str, Tensor | None]] = list(self.parallel.module.named_parameters())
        parameters, buffers = len(named), dict(self.parallel.module.named_buffers())
        named += [(name, buffers.get(name)) for name in self.buffers]
        mine = torch.tensor([[digest(t), self._axes(t)] for _, t in named], device=self.device)
        world = ranks.all_rows(mine)
        for index, (name, _) in enumerate(named):
            first: dict[tuple[int, ...], tuple[int, int]] = {}
            for rank, table in enumerate(world):
                mark, axes = table[index].tolist()
                if axes < 0:
                    continue  # another stage's
                place = self.layout.coordinate(rank)
                part = self._part(place, axes) if index < parameters else (place.data, place[PIPELINE_AXIS])
                holder, expected = first.setdefault(part, (rank, mark))
                if mark != expected:
                    raise DivergenceError(
                        f"{when}, {name} is not the same on ranks {holder} and {rank}, which have copies of it. Look"
                        " for code that depends on the rank or writes what it computes from its samples, or a gradient"
                        " that is not reduced. A backward reduces gradients when it ends: a hook that steps an"
                        " optimizer comes too early. Average those of torch.autograd.grad:"
                        " p.grad = self.trainer.strategy.reduce(gradient)."
                    )

    def _axes(self, tensor: Tensor | None) -> int:
        """The sum of 1 if divided among data ranks, 2 among tensor ranks, 4 among owners of experts; -1 if away."""
        if tensor is None or is_absent(tensor):
            return -1
        held = self.parallel.parameters.of(tensor)
        if held is None:
            return 0
        experts = EXPERT_AXIS in sharded_axes(tensor)
        return (held.rows is not None) + 2 * (held.split is not None and not experts) + 4 * experts

    def _part(self, place: Coordinate, axes: int) -> tuple[int, ...]:
        """The shard that the rank at `place` has of a parameter that is split over `axes`."""
        if axes & 4:
            replica, owner = expert_place(self.layout, place)
            return owner, replica if axes & 1 else 0
        data = (place.data % self.layout.shard_size, place.get(CONTEXT_AXIS, 0)) if axes & 1 else (0, 0)
        return *data, (place[TENSOR_AXIS] if axes & 2 else 0)


class BufferCheck(StepCheck):
    """Warns of buffers with which data ranks train on: each has that of its own samples, or of its own random numbers.

    It looks after steps 1, 8, 64, 512 and 4096: performer-pytorch draws new projections after 1000 calls.
    """

    def __init__(self, place: Coordinate, module: LightningModule, ranks: dist.ProcessGroup) -> None:
        self.module, self.ranks, self.due, self.step = module, ranks, ranks.size() > 1, 0
        self.speaks = not any(index for axis, index in place.items() if axis != PIPELINE_AXIS)

    def after_train(self, output: Any) -> None:
        """Compare buffers of numbers, but for the statistics of norms. Collective over the data ranks."""
        self.step += 1
        if not self.due or self.step not in (1, 8, 64, 512, 4096):
            return
        norms = tuple(f"{name}." for name, part in self.module.named_modules() if keeps_statistics(part))
        named = [(name, each) for name, each in self.module.named_buffers() if not name.startswith(norms)]
        mine = {name: digest(each) for name, each in named if each.is_floating_point() and not each.is_nested}
        self.due = bool(mine)
        if not mine or talk.all_equal(mine, self.ranks):
            return
        found = talk.gather(mine, self.ranks)
        every = dict.fromkeys(name for each in found for name in each)
        names = [name for name in every if len({each.get(name) for each in found}) > 1]
        self.due = not names
        if names and self.speaks:
            warnings.warn(
                f"training_step writes its samples, or random numbers, into buffers ({', '.join(names[:3])}), so that"
                " each data rank trains on with values of its own. On one device all samples share them; DDP sends"
                " those of rank 0 before each forward. Evaluations and checkpoints have those of the first data rank."
                " Reduce what is written over the ranks where you write it, by torch.distributed.all_reduce.",
                stacklevel=2,
            )


class LossCheck(StepCheck):
    """Compares the first loss of tensor and context peers, after its backward.

    Errors of a backward name the reason where a step computes with shards.
    """

    def __init__(
        self,
        layout: Layout,
        place: Coordinate,
        module: LightningModule,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.place, self.module, self.context = place, module, context
        several = layout.tensor_parallel_size > 1 or layout.context_parallel_size > 1
        self.due = several and module.automatic_optimization  # a step that returns its loss
        self.output: Any = None

    def after_train(self, output: Any) -> None:
        if self.due:
            self.due, self.output = False, output

    def after_backward(self) -> None:
        """Raise on every rank if the losses of peers differ. Collective over the world."""
        if self.output is None:
            return
        loss, self.output = loss_of(self.output), None
        assert loss is not None, "Lightning refuses a step without one"
        rounding = rounding_of(self.module, context=self.context) / 10  # peers run equal operations on equal numbers
        mine, place = float(loss.detach()), self.place
        first: dict[tuple[int, int], tuple[int, float]] = {}
        for rank, (peers, other) in enumerate(talk.gather(((place.data, place[PIPELINE_AXIS]), mine))):
            known, expected = first.setdefault(peers, (rank, other))
            if not equal_losses(other, expected, rounding, least=1e-6):  # a loss may be about 0
                raise DivergenceError(
                    f"The first training_step returned a loss of {expected} on rank {known} and of {other} on rank"
                    f" {rank}, which have the same samples. Each computes a part of the same gradient, so it would be"
                    " wrong. Look for code that depends on the rank, on time or on a random generator of its own, for"
                    " hooks that take results of layers inside of a block (these need tensor_plan={name: 'whole'}), for"
                    " derivatives by weights that the step takes itself (of these each context rank has a part:"
                    " context_parallel_size=1), and for other versions of a package on one node."
                )
