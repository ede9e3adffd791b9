"""The safety net: what `Strategy3D(verify=...)` compares while training."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_3d import talk
from lightning_3d.compose import Composed
from lightning_3d.errors import DivergenceError, UnsupportedError
from lightning_3d.layout import DATA_AXIS, TENSOR_AXIS, Layout
from lightning_3d.local import local
from lightning_3d.mesh import SHARD_AXIS
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.records import Record
from lightning_3d.twin import Twin

Verify = Literal["first_step", "replicas"]
EVERY = 25
"""Training batches between two comparisons of replicas."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a gradient, relative to its norm; in smaller types rounding allows 0.1."""
NOTHING = 1e-3
"""Gradients whose elements are smaller than this beside those of others may be rounding errors altogether."""
CHUNK = 16 * 65521
"""Bytes that are digested at once, as integers of eight bytes. A multiple of the period of their weights."""


class ReplicaCheck:
    """Whether what several ranks hold a copy of is the same, bit by bit, on all of them."""

    def __init__(self, composed: Composed, layout: Layout, device: torch.device) -> None:
        self.composed, self.layout, self.device = composed, layout, device
        self.buffers = [name for name, _ in composed.module.named_buffers()]
        """Those that all ranks know of: some are made while a stage trains."""

    def check(self, step: int) -> None:
        """Raise on every rank, naming the first parameter or buffer that is not. Collective over the world."""
        named: list[tuple[str, Tensor | None]] = list(self.composed.module.named_parameters())
        parameters, buffers = len(named), dict(self.composed.module.named_buffers())
        named += [(name, buffers.get(name)) for name in self.buffers]
        mine = torch.tensor([[digest(t), _axes(t)] for _, t in named], device=self.device)
        world = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(world, mine)
        for index, (name, _) in enumerate(named):
            first: dict[tuple[int, ...], tuple[int, int]] = {}
            for rank, table in enumerate(world):
                mark, axes = table[index].tolist()
                if axes < 0:
                    continue  # another stage's
                part = self._part(rank, axes) if index < parameters else self._peers(rank)
                holder, expected = first.setdefault(part, (rank, mark))
                if mark != expected:
                    raise DivergenceError(
                        f"before training batch {step}, {name} is not the same on ranks {holder} and {rank}, which hold"
                        " copies of it. Something changed it on one rank only: look for code that depends on the rank,"
                        " or a gradient that is not reduced."
                    )

    def _peers(self, rank: int) -> tuple[int, ...]:
        """What only tensor ranks have in common: batches, of which statistics are kept, and the stage that saw them."""
        place = self.layout.coordinate(rank)
        return place.data, place.pipeline

    def _part(self, rank: int, axes: int) -> tuple[int, ...]:
        """Which part of a parameter that is split over `axes` a rank holds."""
        place = self.layout.coordinate(rank)
        shard = self.layout.zero_shard_size or self.layout.data_parallel_size
        return (place.data % shard if axes & 1 else 0), (place.tensor if axes & 2 else 0)


def _axes(parameter: Tensor | None) -> int:
    """1 if split over data ranks, 2 over tensor ranks, 3 both; -1 if it is not here."""
    if _absent(parameter):
        return -1
    if not isinstance(parameter, DTensor):
        return 0
    names = parameter.device_mesh.mesh_dim_names or ()
    split = {n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)}
    return bool(split & {DATA_AXIS, SHARD_AXIS}) + 2 * (TENSOR_AXIS in split)


def _absent(tensor: Tensor | None) -> bool:
    """Whether there is nothing to compare. The bits of a sparse buffer (a graph) are in several tensors."""
    return tensor is None or tensor.is_meta or tensor.layout != torch.strided


@torch.no_grad()
def digest(parameter: Tensor | None) -> int:
    """A number that depends on every bit of what this rank holds of `parameter`, and on where."""
    if parameter is None or _absent(parameter):
        return 0
    held = local(parameter.detach()).contiguous().reshape(-1).view(torch.uint8)
    weights = torch.arange(min(held.numel(), CHUNK), device=held.device) % 65521 + 1
    total = torch.zeros((), dtype=torch.long, device=held.device)
    for chunk in held.split(CHUNK):
        total += (chunk * weights[: chunk.numel()]).sum()
    return int(total)


class Compared(NamedTuple):
    """The gradient of one parameter beside the unsplit module's."""

    name: str
    dtype: torch.dtype
    difference: float
    """Infinite where only one of the two is finite, NaN where neither is."""
    norm: float = 0.0
    size: int = 0

    def relative(self, typical: float) -> "Compared":
        """With the difference relative to the norm, or beside `typical` elements where that is almost zero.

        A gradient that is exactly zero (the bias of a key, or before a batch norm) is nothing but rounding errors.
        """
        scale = max(self.norm, NOTHING * typical * math.sqrt(self.size))
        return self._replace(difference=self.difference / scale if scale > 0 else self.difference)

    @property
    def excess(self) -> float:
        """The difference in units of what rounding allows."""
        return self.difference / TOLERANCE.get(self.dtype, 0.1)


class FirstStep:
    """The gradients of the first optimizer step again, by the unsplit module on the same samples.

    Made before the module is placed: it keeps a whole copy on this rank's device until that step is over.
    """

    def __init__(self, module: LightningModule, context: Callable[[], AbstractContextManager[Any]]) -> None:
        if not module.automatic_optimization:
            raise UnsupportedError(
                f"verify='first_step' also runs training_step on a copy of the module, and {type(module).__name__}"
                " optimizes manually: its copy would step the optimizers too. Use verify='replicas', or automatic"
                " optimization."
            )
        self.twin = Twin(module)
        self.context = context
        self.overflows = 0

    def add(self, module: Any, args: tuple[Any, ...], scale: float) -> None:
        """Gradients of one more batch of the window. Random numbers are drawn as the real step will draw them.

        Args:
            module: the one that trains, by now.
            args: of the step.
            scale: the share of the batch, times the loss scale: what is too small for fp16 would vanish without.
        """
        self.twin.follow(module)
        with seeds.set_aside(), LogTap(self.twin.module).recording(Record()), torch.enable_grad():
            with self.context():
                loss = self.twin.loss(args)
            if loss is not None:
                scaled = loss * torch.tensor(scale, dtype=torch.float64, device=loss.device)  # in fp16: infinite
                self.twin.module.backward(scaled)

    def compare(self, composed: Composed, group: dist.ProcessGroup, scale: float) -> bool:
        """Raise on every rank if a gradient differs from the unsplit module's by more than rounding. Collective.

        True where the loss was scaled too far for that: the scaler will skip this step, and the next one is the first.
        """
        found = [self._compared(name, parameter, composed, group, scale) for name, parameter in _here(composed)]
        typical = _typical(found)
        worst, unknown = _worst([each.relative(typical) for each in found])
        everyone = talk.gather([each for each in (worst, unknown) if each is not None])
        worst, unknown = _worst([each for some in everyone for each in some])
        if scale > 1 and (unknown is not None or (worst is not None and math.isinf(worst.difference))):
            self.overflows += 1
            self.twin.module.zero_grad()
            return True
        if worst is not None:
            _judge(worst)
        if unknown is not None:
            rank_zero_warn(
                f"verify='first_step': the first gradient of {unknown.name} is not finite, and neither is the unsplit"
                " module's: such gradients are not compared."
            )
        return False

    def close(self) -> None:
        """Tell where training ended before anything could be compared."""
        if self.overflows:
            rank_zero_warn(
                f"verify='first_step' has compared nothing: gradients overflowed in all {self.overflows} steps. Train"
                " for more steps, or start with a smaller loss scale."
            )

    def _compared(
        self, name: str, parameter: nn.Parameter, composed: Composed, group: dist.ProcessGroup, scale: float
    ) -> Compared:
        mine = self.twin.module.get_parameter(name)
        mean = torch.zeros_like(mine) if mine.grad is None else mine.grad.to_dense()
        dist.all_reduce(mean, group=group)
        mean = mean / (dist.get_world_size(group) * scale)
        held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # others may have one
        grad = (local(composed.whole(parameter, held)).to_dense() / scale).to(mean)
        finite = [bool(each.isfinite().all()) for each in (grad, mean)]
        if not all(finite):
            return Compared(name, self._dtype(parameter), math.inf if any(finite) else math.nan)
        return Compared(name, self._dtype(parameter), _norm(grad - mean), _norm(mean), mean.numel())

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        with self.context():
            device = parameter.device.type
            return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


def _worst(found: list[Compared]) -> tuple[Compared | None, Compared | None]:
    """What differs most, and one whose gradients are finite on neither side."""
    known = [each for each in found if not math.isnan(each.difference)]
    unknown = [each for each in found if math.isnan(each.difference)]
    return max(known, key=lambda each: each.excess, default=None), next(iter(unknown), None)


def _judge(worst: Compared) -> None:
    difference = f"the largest difference of a first gradient from the unsplit module's is {worst.difference:.1e}"
    if worst.excess <= 1:
        rank_zero_info(f"verify='first_step': {difference} ({worst.name}).")
        return
    text = f"{difference} ({worst.name}), relative to its norm"
    if math.isinf(worst.difference):
        text = f"of the first gradient of {worst.name} and that of the unsplit module only one is finite"
    raise DivergenceError(
        f"verify='first_step': {text}. The step computes something else once it is split, or it draws random numbers"
        " (dropout) that differ: set its rate to 0 to tell the two apart. Weights that a hook changes between setup and"
        " the first batch (on_train_start) differ too: change them in setup."
    )


def _typical(found: list[Compared]) -> float:
    """How large an element of all gradients is: the root of the mean square."""
    parts = talk.gather((sum(each.norm**2 for each in found), sum(each.size for each in found)))
    squares, sizes = map(sum, zip(*parts, strict=True))
    return math.sqrt(squares / max(sizes, 1))


def _norm(tensor: Tensor) -> float:
    """In fp64, where it does not overflow."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float64)))


def _here(composed: Composed) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in composed.module.named_parameters() if not p.is_meta and p.requires_grad]
