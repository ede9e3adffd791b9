"""What one rank alone does where it would hear from others: the only place where a dry run departs from a real one.

The process group is torch's fake one, which does nothing; whatever computes on what arrives runs as it is, since only
shapes count. Listed here is the code of ours and of Lightning that looks at values that arrive, or at numbers that fake
tensors do not have. It is replaced for good: a simulated rank is a process of its own that ends with its report.

What is decided on the whole module before it is placed: found out by one simulated rank, for all.
"""

import fcntl
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor, nn
from torch import distributed as dist

# private to torch, read in 2.13
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d import auto_layout, parallelize
from lightning_3d.auto_layout import Decided, Situation, decide
from lightning_3d.dryrun import lone_proof
from lightning_3d.dryrun.cluster import World, apply_to_fakes
from lightning_3d.dryrun.fake_device import Memory
from lightning_3d.dryrun.lone_proof import plan_large
from lightning_3d.parallelize import ParallelPlan, make_plan
from lightning_3d.pipeline import observe, prove, traced_tensor, wire
from lightning_3d.pipeline import pipeline as runner
from lightning_3d.pipeline.traced_tensor import TracedTensor
from lightning_3d.ranks import talk
from lightning_3d.tensor import block_calls, plan_module, sample
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.sample import plain_tensor, working_dtype


def become_lone_rank(world: World, strategy: Any) -> None:
    """Make this process one rank that has no peers."""
    pretend, decision = world.pretend, Decision(world.decisions, world.pretend.memory)
    sizes = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        sizes(storage, size)
        pretend.memory.resize(storage)
        return storage

    def share(wire_: wire.Wire, value: Any, source: int, site: Any) -> Any:
        mine = wire_.rank == source
        return wire_._share_mine(value, site) if mine else lone_proof.results(wire_, value, site)

    def empty(spec: wire.Spec, device: torch.device) -> Tensor:
        return pretend.made(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    replacements: Sequence[tuple[Any, str, Any]] = [
        (torch.UntypedStorage, "resize_", resize),
        (nn.Module, "_apply", apply_to_fakes(nn.Module._apply)),
        (dist, "broadcast_object_list", _nothing),  # what this rank would have sent is what it gets
        (data_connector, "_InfiniteBarrier", nullcontext),  # is a gloo group of its own
        (type(strategy), "_streams", property(lambda _: world.streams)),
        (talk, "failed_everywhere", _no),
        (talk, "meet", _nothing),
        (strategy, "_resume", None),  # nothing is loaded, and no run is left for a later start to find
        (strategy, "training_step", _in_step(pretend, strategy.training_step)),
        (block_calls, "record_calls", _in_step(pretend, record_calls)),
        (auto_layout, "cluster_here", lambda *_, **__: world.cluster),
        (auto_layout, "decide", decision.decide),
        (auto_layout, "plan_tensor", plan_with_values),
        (parallelize, "make_plan", decision.make_plan),
        (parallelize, "plan_tensor", plan_with_values),
        (observe, "loss_is_no_mean", _largest_run),
        (plan_module, "_plan_unit", plan_large(pretend, plan_module._plan_unit)),
        (sample, "plain_tensor", _without_values),
        (runner, "rehearse", _beside_the_step(pretend, prove.rehearse)),
        (prove, "_run_whole", lone_proof.run_whole(world)),
        (wire.Wire, "share", share),
        (wire.Spec, "empty", empty),
        (traced_tensor, "as_kind", _as_kind),
    ]
    for owner, name, replacement in replacements:
        if not hasattr(owner, name):
            raise AttributeError(f"a dry run replaces {name} of {owner}, which is no longer there")
        setattr(owner, name, replacement)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no(in_step: bool) -> bool:
    return False


def _largest_run(run: Callable[[Any, int], Any], batch: Any, sizes: list[int], *_: Any) -> None:
    """The run on the full batch, for its memory: losses without values are all alike."""
    if len(sizes) > 1:
        run(batch, 3)


def _in_step(pretend: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with pretend.step():
            return function(*args, **kwargs)

    return inside


def _beside_the_step(pretend: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The rehearsal happens once, in the first step, and is no part of what a step takes."""

    def inside(pipeline: Any, *args: Any) -> Any:
        flops = pretend.flops
        with pipeline.wire.ledger.aside():
            trace = function(pipeline, *args)
        pretend.flops = flops
        if pretend.thrifty:  # in a step, not when the pipeline is set up
            pretend.memory.restart()
        return trace

    return inside


def _without_values(tensor: Tensor) -> Tensor:
    """An argument of a block as the proof takes it: an activation gets random numbers there anyway."""
    if not isinstance(tensor, FakeTensor):
        return plain_tensor(tensor)
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=working_dtype(tensor.dtype), device="meta")
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class _TracedFake(TracedTensor, FakeTensor):
    """torch has one class for each tensor; the class of a fake one can only be changed afterwards."""


def _as_kind(tensor: Tensor, kind: type[Tensor]) -> Any:
    if not isinstance(tensor, FakeTensor):
        return tensor.as_subclass(kind)  # type: ignore[arg-type]
    same = torch.ops.aten.alias(tensor)
    same.__class__ = _TracedFake if kind is TracedTensor else FakeTensor
    return same


class Decision:
    """What the first simulated rank that comes decides. The others wait for it, as real ranks do for rank 0.

    Every rank runs the whole module on a batch to find out what its blocks do. That takes longer than training its own
    stage, and is alike on all of them.
    """

    def __init__(self, path: str, memory: Memory) -> None:
        self.path, self.memory = path, memory

    def make_plan(self, *args: Any) -> ParallelPlan:
        return self._once("plan", lambda: make_plan(*args))

    def decide(self, situation: Situation) -> Decided:
        """Under `layout="auto"`."""
        return self._once("layout", lambda: decide(situation))

    def _once(self, what: str, find: Callable[[], Any]) -> Any:
        with open(self.path, "r+b") as file:  # closed, and so unlocked, at the end
            fcntl.flock(file, fcntl.LOCK_EX)
            decided = _decisions(file.read())
            if what not in decided:
                found, taken = self._measured(find)
                file.seek(0)
                file.write(_pickled({**decided, what: (found, taken)}))
                return found
        found, taken = decided[what]
        self.memory.peak = max(self.memory.peak, self.memory.live + taken)  # it takes that memory on every real rank
        return found

    def _measured(self, find: Callable[[], Any]) -> tuple[Any, int]:
        """What is found, and the memory that it takes to find it."""
        before, live = self.memory.restart(), self.memory.live
        found = find()
        peak = self.memory.peak
        self.memory.peak = max(before, peak)
        return found, peak - live


def chosen_layout(path: str) -> Decided | None:
    """What the ranks that were simulated have chosen, if they came so far."""
    with open(path, "rb") as file:
        found: tuple[Decided, int] | None = _decisions(file.read()).get("layout")
    return None if found is None else found[0]


def plan_with_values(*args: Any, **kwargs: Any) -> Any:
    """The plan for tensor ranks, on real numbers: the proof makes its own."""
    with _disable_current_modes():
        return plan_tensor(*args, **kwargs)


def _decisions(raw: bytes) -> dict[str, Any]:
    return pickle.loads(raw) if raw else {}


def _pickled(decisions: dict[str, Any]) -> bytes:
    """Without what cannot be sent to another process, such as parts of a batch: every rank decides that for itself."""
    while decisions:
        try:
            return pickle.dumps(decisions)
        except (pickle.PicklingError, TypeError, AttributeError):
            decisions = dict(list(decisions.items())[:-1])
    return b""
