"""The safety net: what `Strategy3D(verify=...)` compares while training."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_3d.compose import Composed
from lightning_3d.errors import DivergenceError
from lightning_3d.layout import DATA_AXIS, TENSOR_AXIS, Layout
from lightning_3d.local import local
from lightning_3d.mesh import SHARD_AXIS
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.step import loss_of

Verify = Literal["first_step", "replicas"]
EVERY = 25
"""Training batches between two comparisons of replicas."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a gradient, relative to its norm; in smaller types rounding allows 0.1."""


class ReplicaCheck:
    """Whether what several ranks hold a copy of is the same, bit by bit, on all of them."""

    def __init__(self, composed: Composed, layout: Layout, device: torch.device) -> None:
        self.composed, self.layout, self.device = composed, layout, device

    def check(self, step: int) -> None:
        """Raise on every rank, naming the first parameter that is not. Collective over the world."""
        named = list(self.composed.module.named_parameters())
        mine = torch.tensor([[digest(p), _axes(p)] for _, p in named], device=self.device)
        world = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(world, mine)
        for index, (name, _) in enumerate(named):
            first: dict[tuple[int, int], tuple[int, int]] = {}
            for rank, table in enumerate(world):
                mark, axes = table[index].tolist()
                if axes < 0:
                    continue  # another stage's
                holder, expected = first.setdefault(self._part(rank, axes), (rank, mark))
                if mark != expected:
                    raise DivergenceError(
                        f"before training batch {step}, {name} is not the same on ranks {holder} and {rank}, which hold"
                        " copies of it. Something changed it on one rank only: look for code that depends on the rank,"
                        " or a gradient that is not reduced."
                    )

    def _part(self, rank: int, axes: int) -> tuple[int, int]:
        """Which part of a parameter that is split over `axes` a rank holds."""
        place = self.layout.coordinate(rank)
        shard = self.layout.zero_shard_size or self.layout.data_parallel_size
        return (place.data % shard if axes & 1 else 0), (place.tensor if axes & 2 else 0)


def _axes(parameter: nn.Parameter) -> int:
    """1 if split over data ranks, 2 over tensor ranks, 3 both; -1 if it is not here."""
    if parameter.is_meta:
        return -1
    if not isinstance(parameter, DTensor):
        return 0
    names = parameter.device_mesh.mesh_dim_names or ()
    split = {n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)}
    return bool(split & {DATA_AXIS, SHARD_AXIS}) + 2 * (TENSOR_AXIS in split)


@torch.no_grad()
def digest(parameter: Tensor) -> int:
    """A number that depends on every bit of what this rank holds of `parameter`, and on where."""
    if parameter.is_meta:
        return 0
    bits = local(parameter.detach()).contiguous().reshape(-1).view(torch.uint8).long()
    return int((bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum())


class FirstStep:
    """The gradients of the first optimizer step again, by the unsplit module on the same samples.

    Made before the module is placed: it keeps a whole copy on this rank's device until that step is over.
    """

    def __init__(self, module: LightningModule, context: Callable[[], AbstractContextManager[Any]]) -> None:
        keep = [module.__dict__.get("_trainer"), module.__dict__.get("_fabric"), module.__dict__.get("_device_mesh")]
        self.twin: Any = copy.deepcopy(module, {id(each): each for each in keep if each is not None})
        self.context = context

    def add(self, args: tuple[Any, ...], share: float) -> None:
        """Gradients of one more batch of the window. Random numbers are drawn as the real step will draw them."""
        with seeds.set_aside(), LogTap(self.twin).recording(Record()), torch.enable_grad():
            with self.context():
                loss = loss_of(self.twin.training_step(*args))
            if loss is not None:
                (loss * share).backward()

    def compare(self, composed: Composed, group: dist.ProcessGroup, scale: float) -> None:
        """Raise on every rank if a gradient differs from the unsplit module's by more than rounding. Collective."""
        worst = max(
            (self._difference(name, parameter, composed, group, scale) for name, parameter in _here(composed)),
            default=(0.0, "", torch.float32),
            key=lambda found: found[0] / TOLERANCE.get(found[2], 0.1),
        )
        everyone: list[Any] = [worst] * dist.get_world_size()
        dist.all_gather_object(everyone, worst)
        largest, name, dtype = max(everyone, key=lambda found: found[0] / TOLERANCE.get(found[2], 0.1))
        text = f"the largest difference of a first gradient from the unsplit module's is {largest:.1e} ({name})"
        if largest > TOLERANCE.get(dtype, 0.1):
            raise DivergenceError(
                f"verify='first_step': {text}, relative to its norm. The step computes something else once it is split,"
                " or it draws random numbers (dropout) that differ: set its rate to 0 to tell the two apart."
            )
        rank_zero_info(f"verify='first_step': {text}.")

    def _difference(
        self, name: str, parameter: nn.Parameter, composed: Composed, group: dist.ProcessGroup, scale: float
    ) -> tuple[float, str, torch.dtype]:
        wanted = self.twin.get_parameter(name).grad
        mean = torch.zeros_like(self.twin.get_parameter(name)) if wanted is None else wanted
        dist.all_reduce(mean, group=group)
        mean = mean / dist.get_world_size(group)
        dtype = self._dtype(parameter)
        if parameter.grad is None:
            return float(mean.norm() > 0), name, dtype
        grad = composed.whole(parameter, parameter.grad)
        grad = (local(grad) / scale).to(mean)
        norm, difference = float(mean.norm()), float((grad - mean).norm())
        return (difference / norm if norm > 0 else difference), name, dtype

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        with self.context():
            device = parameter.device.type
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def _here(composed: Composed) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in composed.module.named_parameters() if not p.is_meta and p.requires_grad]
