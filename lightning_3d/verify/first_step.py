"""The comparisons of `Strategy3D(verify=...)` in training."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.errors import DivergenceError, UnsupportedError
from lightning_3d.launch.lightning_private import runs_of, trainer_of
from lightning_3d.module.torch_private import grad_hooks, version_of
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import random_streams, talk
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import Watched, put_changes
from lightning_3d.sandbox.trees import copied, copies_of_computed, loss_of
from lightning_3d.tensor.overlap import autocast_dtype

_ELSE = "Use verify='replicas', or no verify."


class UnsplitCopy:
    """Made before `module` is placed. The user's hooks are not run for it: it copies what they change.

    It does not copy weights: other checks compare those of shards.
    """

    def __init__(self, module: LightningModule) -> None:
        known = [*runs_of(module), module.device_mesh]
        memo = {id(each): each for each in known if each is not None}
        memo.update(copies_of_computed(module))
        try:
            self.module: Any = copy.deepcopy(module, memo)
        except Exception as error:
            raise UnsupportedError(
                f"verify='first_step' needs a copy of the module, and {type(module).__name__} cannot be copied"
                f" ({type(error).__name__}: {error}). Remove what cannot be copied (a lock, an open file) from its"
                f" attributes. {_ELSE}"
            ) from error
        self.module.trainer = trainer_of(module)  # no copy of a LightningModule has one, whatever memo deepcopy gets
        self.originals = list(module.modules())
        self.hooked: set[int] = set()
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Remember the state of `module`. What differs at the next `follow` was changed by its hooks."""
        self.attributes = Watched(module)
        self.buffers = {name: (buffer, version_of(buffer)) for name, buffer in module.named_buffers()}

    def follow(self, module: nn.Module) -> None:
        """Copy the changes of `module`, which trains, since the last look."""
        put_changes(self.module, copied(self.attributes.changes()))
        modes = {name: part.training for name, part in module.named_modules()}
        buffers = dict(module.named_buffers())
        for name, part in self.module.named_modules():
            part.training = modes.get(name, part.training)
        for name, buffer in self.module.named_buffers():
            self._follow_buffer(name, buffer, buffers.get(name))
        for name, parameter in module.named_parameters():
            mine = self.module.get_parameter(name)
            mine.requires_grad_(parameter.requires_grad)
            for key, hook in grad_hooks(parameter).items():
                if key not in self.hooked:
                    self.hooked.add(key)
                    mine.register_hook(hook)

    def _follow_buffer(self, name: str, mine: Tensor, now: Tensor | None) -> None:
        seen, version = self.buffers.get(name, (None, 0))
        if now is None or now.is_meta or now.shape != mine.shape:  # another stage's, or a part
            return
        if now is not seen or version_of(now) != version:
            with torch.no_grad():
                mine.copy_(now)

    def loss(self, args: tuple[Any, ...]) -> Tensor | None:
        """The loss of a step on a copy of the batch, which a step may change."""
        handles = [part.register_forward_pre_hook(_refuse) for part in self.originals]
        try:
            return loss_of(self.module.training_step(*copied(args)))
        except Exception as error:
            raise UnsupportedError(
                f"verify='first_step' also runs training_step on a copy of the module, where it failed"
                f" ({type(error).__name__}: {error}). If it does not fail without verify, a lambda or an inner function"
                f" uses the original module instead of the copy: make it a method. {_ELSE}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()


def _refuse(part: nn.Module, _: Any) -> None:
    raise RuntimeError(f"it called {type(part).__name__} of the module itself")


Verify = Literal["first_step", "replicas"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a gradient, relative to its norm; in smaller types rounding allows 0.1."""
NOTHING = 1e-3
"""Gradients whose elements are smaller than this, relative to those of others, may be rounding errors only."""


class Compared(NamedTuple):
    """The gradient of one parameter, compared with the unsplit module's."""

    name: str
    dtype: torch.dtype
    difference: float
    """Infinite where only one of the two is finite, NaN where neither is."""
    norm: float = 0.0
    size: int = 0

    def relative(self, typical: float) -> "Compared":
        """With the difference relative to the norm, or to `typical` elements where the norm is almost zero.

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

    Made before the module is placed: it keeps an unsplit copy on this rank's device until that step is over.
    """

    def __init__(self, module: LightningModule, context: Callable[[], AbstractContextManager[Any]]) -> None:
        if not module.automatic_optimization:
            raise UnsupportedError(
                f"verify='first_step' also runs training_step on a copy of the module, and {type(module).__name__}"
                " optimizes manually: its copy would step too. Use verify='replicas', or automatic optimization."
            )
        self.twin = UnsplitCopy(module)
        self.context = context
        self.overflows = 0

    def add(self, module: Any, args: tuple[Any, ...], scale: float | Tensor) -> None:
        """Gradients of one more batch of the window. Random numbers are drawn as the real step will draw them.

        `scale` is the share of the batch, times the loss scale: what is too small for fp16 would vanish without.
        """
        self.twin.follow(module)
        with random_streams.restored_streams(), LogRecorder(self.twin.module).recording(Record()), torch.enable_grad():
            with self.context():
                loss = self.twin.loss(args)
            if loss is not None:
                scaled = loss * torch.as_tensor(scale, dtype=torch.float64, device=loss.device)  # in fp16: infinite
                self.twin.module.backward(scaled)

    def compare(self, parallel: ParallelModule, group: dist.ProcessGroup, scale: float) -> bool:
        """Raise on every rank if a gradient differs from the unsplit module's by more than rounding. Collective.

        True where the loss was scaled too far for that: the scaler will skip this step, and the next one is the first.
        """
        peers = Group(group)
        if peers.simulated:
            return False
        here = [(n, p) for n, p in parallel.module.named_parameters() if not p.is_meta and p.requires_grad]
        found = [self._compared(name, parameter, parallel, peers, scale) for name, parameter in here]
        # The size of an element of all gradients: the root of the mean square.
        parts = talk.gather((sum(each.norm**2 for each in found), sum(each.size for each in found)))
        squares, sizes = map(sum, zip(*parts, strict=True))
        typical = math.sqrt(squares / max(sizes, 1))
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
        """Warn where training ended before anything was compared."""
        if self.overflows:
            rank_zero_warn(
                f"verify='first_step' has compared nothing: gradients overflowed in all {self.overflows} steps. Train"
                " for more steps, or start with a smaller loss scale."
            )

    def _compared(
        self, name: str, parameter: nn.Parameter, parallel: ParallelModule, peers: Group, scale: float
    ) -> Compared:
        mine = self.twin.module.get_parameter(name)
        mean = torch.zeros_like(mine) if mine.grad is None else mine.grad.to_dense()
        peers.all_reduce(mean)
        mean = mean / (peers.size * scale)
        held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # others may have one
        grad = (local(parallel.parameters.full(parameter, held)).to_dense() / scale).to(mean)
        finite = [bool(each.isfinite().all()) for each in (grad, mean)]
        if not all(finite):
            return Compared(name, self._dtype(parameter), math.inf if any(finite) else math.nan)
        return Compared(name, self._dtype(parameter), _norm(grad - mean), _norm(mean), mean.numel())

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        with self.context():
            return autocast_dtype(parameter)


def _worst(found: list[Compared]) -> tuple[Compared | None, Compared | None]:
    """The parameter that differs most, and one whose gradients are finite on neither side."""
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
        f"verify='first_step': {text}. Either the divided step computes something else, or it draws other random"
        " numbers (dropout): set its rate to 0 to see which. Weights that a hook changes between setup and the first"
        " batch (on_train_start) differ too: change them in setup."
    )


def _norm(tensor: Tensor) -> float:
    """In fp64, where it does not overflow."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float64)))
