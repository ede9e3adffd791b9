"""What one rank alone does where it would hear from others: the only place where a dry run departs from a real one.

The process group is torch's fake one, which does nothing; whatever computes on what arrives runs as it is, since only
shapes count. Listed here is the code of ours and of Lightning that looks at values that arrive, or at numbers that fake
tensors do not have. It is replaced for good: a simulated rank is a process of its own that ends with its report.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor, nn
from torch import distributed as dist

# private to torch, read in 2.13
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d import auto, communication, data, numbers, peers, place, processes, samples, stages, verify
from lightning_3d.comm import replicate, ring
from lightning_3d.comm.engine import Engine, Handle, Job
from lightning_3d.dryrun import rehearsal
from lightning_3d.dryrun.decision import Decision, plan_on_numbers
from lightning_3d.dryrun.proof import plan_large
from lightning_3d.dryrun.world import World, apply_to_fakes
from lightning_3d.local import local
from lightning_3d.pipeline import prints, rehearse, relay, runner, stage, traced, whole, wire
from lightning_3d.pipeline import rehearsal as pipeline_rehearsal
from lightning_3d.pipeline.microbatch import leaves, split_batch
from lightning_3d.pipeline.traced import Traced
from lightning_3d.tensor import infer, sample
from lightning_3d.tensor.record import record_calls
from lightning_3d.tensor.sample import plain_tensor, working_dtype


def stand_alone(world: World, strategy: Any) -> None:
    """Make this process one rank that has no peers."""
    pretend, decision = world.pretend, Decision(world.decisions, world.pretend.memory)
    sizes = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        sizes(storage, size)
        pretend.memory.resize(storage)
        return storage

    def share(wire_: wire.Wire, value: Any, source: int, site: Any) -> Any:
        mine = wire_.rank == source
        return wire_._share_mine(value, site) if mine else rehearsal.results(wire_, value, site)

    def empty(spec: wire.Spec, device: torch.device) -> Tensor:
        return pretend.made(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    replacements: Sequence[tuple[Any, str, Any]] = [
        (torch.UntypedStorage, "resize_", resize),
        (nn.Module, "_apply", apply_to_fakes(nn.Module._apply)),
        (dist, "broadcast_object_list", _nothing),  # what this rank would have sent is what it gets
        (data_connector, "_InfiniteBarrier", nullcontext),  # is a gloo group of its own
        (processes.Processes, "from_rank_zero", _decide),
        (processes.Processes, "_streams", property(lambda _: world.streams)),
        (peers, "all_failed", lambda: False),
        (peers, "meet", _nothing),
        (stages.Stages, "with_gradient", lambda *_: set()),
        (numbers.Numbers, "shared", _any_number),
        (communication, "Engine", InlineEngine),
        (data.SampleCheck, "check", _nothing),
        (verify.FirstStep, "compare", _nothing),
        (verify.ReplicaCheck, "check", _nothing),
        (replicate, "exchange", _everyone_says_mine),
        (ring, "_turn", _count_only),
        (ring, "_small", _none_small),
        (strategy, "_resume", None),  # nothing is loaded, and no run is left for a later start to find
        (strategy, "training_step", _in_step(pretend, strategy.training_step)),
        (samples, "record_calls", _in_step(pretend, record_calls)),
        (auto, "cluster_here", lambda *_, **__: world.cluster),
        (auto, "decide", decision.decide),
        (auto, "plan_tensor", plan_on_numbers),
        (place, "make_plans", decision.make_plans),
        (place, "plan_tensor", plan_on_numbers),
        (place, "compare_first_batch", _nothing),
        (samples, "unlike_its_mean", _as_large_as_two),
        (samples, "unlike_joined", _nothing),
        (samples, "unlike_in_buffers", _nothing),
        (infer, "_plan_unit", plan_large(pretend, infer._plan_unit)),
        (sample, "plain_tensor", _without_values),
        (runner, "rehearse", _beside_the_step(pretend, rehearse.rehearse)),
        (rehearse, "_run_whole", rehearsal.run_whole(world)),
        (rehearse, "differ", _same),
        (rehearse, "unlike", _nothing),
        (relay, "differ", _same),
        (stage, "differ", _same),
        *((where, "fingerprint", _no_prints) for where in (rehearse, pipeline_rehearsal, relay, stage, whole)),
        *((where, "grad_print", _no_prints) for where in (relay, whole)),
        (wire.Wire, "share", share),
        (wire.Spec, "empty", empty),
        (traced, "as_kind", _as_kind),
    ]
    for owner, name, replacement in replacements:
        if not hasattr(owner, name):
            raise AttributeError(f"a dry run replaces {name} of {owner}, which is no longer there")
        setattr(owner, name, replacement)


class InlineEngine(Engine):
    """Runs jobs at once: what would be sent in the background is only counted, and fake tensors know one thread."""

    def __init__(self, *, threaded: bool = True) -> None:
        super().__init__(threaded=False)
        self._says_threaded = threaded

    @property
    def threaded(self) -> bool:
        return self._says_threaded

    def submit(self, job: Job) -> Handle:
        handle = Handle(job)
        self._run(handle)
        return handle


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _any_number(numbers: Any, value: Tensor, *_: Any) -> Tensor:
    return torch.zeros((), dtype=value.dtype) if value.is_meta else value


def _decide(strategy: Any, decide: Callable[[], Any]) -> Any:
    return decide()


def _everyone_says_mine(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    return message.expand(group.size(), *message.shape)


def _none_small(pieces: Sequence[Tensor]) -> tuple[Sequence[int], Sequence[int]]:
    """Packed copies are made and dropped in the background, beside what is counted."""
    return (), range(len(pieces))


def _count_only(
    flats: Sequence[Tensor], owns: Sequence[Tensor], hops: range, group: Any, average: bool, segment_bytes: int
) -> int:
    """The bytes that the ring would send: a large one has more messages than a dry run has time for."""
    return len(hops) * sum(own.numel() * own.element_size() for own in owns)


def _same(*_: Any) -> bool:
    return False


def _no_prints(value: Any) -> list[list[float]]:
    """Only for the memory that they take."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            prints.sums(local(leaf))
    return []


def _as_large_as_two(look: Callable[[Any, int], Any], batch: Any, sizes: list[int], _: float) -> None:
    """Two microbatches at once, for the memory that they take: losses without values are all alike."""
    if len(sizes) > 1:
        look(split_batch(batch, [sizes[0] + sizes[1], *sizes[2:]])[0], 0)


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


class _TracedFake(Traced, FakeTensor):
    """torch has one class for each tensor; the class of a fake one can only be changed afterwards."""


def _as_kind(tensor: Tensor, kind: type[Tensor]) -> Any:
    if not isinstance(tensor, FakeTensor):
        return tensor.as_subclass(kind)  # type: ignore[arg-type]
    same = torch.ops.aten.alias(tensor)
    same.__class__ = _TracedFake if kind is Traced else FakeTensor
    return same
