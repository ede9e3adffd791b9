"""The code that one simulated rank runs in place of code that needs other ranks, or values of tensors.

The process group is torch's fake one. Most code runs as it is, since only shapes count. `Group` and
`ranks.talk` do nothing then. Code that compares values asks `Group.simulated` first. The rest is replaced here by name,
for good: a simulated rank is a process of its own that ends with its report.

`LoneRehearsal`: the rehearsal of a pipeline, in which blocks of other stages run on this rank too, on shapes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from lightning_3d.context.find_cuts import plan_context
from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.module.forward import without_layers
from lightning_3d.module.torch_private import FakeTensor, own_tensors, without_modes
from lightning_3d.module.undo import do_nothing, replaced_entries
from lightning_3d.parallel import parallel_plan
from lightning_3d.pipeline import observe_batch, prove, traced_tensor, wire
from lightning_3d.pipeline.loss_mean import MEAN, LossMean
from lightning_3d.pipeline.rehearsal import Rehearsal, StepTrace
from lightning_3d.pipeline.traced_tensor import TracedTensor
from lightning_3d.pipeline.wire import Spec, Wire
from lightning_3d.sandbox import deferred
from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.record import Record, combine
from lightning_3d.sandbox.snapshot import isolated
from lightning_3d.sandbox.trees import detached, map_leaves, untrace
from lightning_3d.tensor import block_calls, late_operations, plan_module, proof, sample, scratch
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.blocks import structure
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.sample import plain_tensor, working_dtype
from lightning_3d.tools import auto_layout
from lightning_3d.tools.dryrun.cluster import Decision, World, apply_to_fakes
from lightning_3d.tools.dryrun.fake_device import DeferredFake, FakeDevice

PROVEN = 30_000_000
"""Largest block, in parameters, that is proven on real numbers."""


def become_lone_rank(world: World, strategy: Any) -> None:
    """Make this process a rank without peers: replace what needs them."""
    pretend, decision = world.pretend, Decision(world)
    sizes = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        sizes(storage, size)
        pretend.memory.resize(storage)
        return storage

    def share(wire_: wire.Wire, value: Any, source: int, site: Any) -> Any:
        mine = wire_.rank == source
        return wire_._share_mine(value, site) if mine else results(wire_, value, site)

    def empty(spec: wire.Spec, device: torch.device) -> Tensor:
        return pretend.fake_like(torch.empty(spec.sent, dtype=spec.dtype, device="meta"))

    in_step = pretend.step()
    with_values = without_modes()  # proofs make real tensors of their own
    deferred.KINDS[FakeTensor] = DeferredFake
    late_operations.WEIGHTS.add(FakeTensor)
    replacements: Sequence[tuple[Any, str, Any]] = [
        (strategy, "_in_parts", _uncounted(pretend, strategy)),
        (torch.UntypedStorage, "resize_", resize),
        (nn.Module, "_apply", apply_to_fakes(nn.Module._apply)),
        (dist, "broadcast_object_list", do_nothing),  # each rank keeps its own objects
        (data_connector, "_InfiniteBarrier", nullcontext),  # it opens a gloo group
        (type(strategy), "_divides", property(lambda self: self.world_size > 1)),
        (type(strategy), "_streams", property(lambda _: world.streams)),
        # loads no checkpoint, and writes no note of the run
        (strategy, "settings", replace(strategy.settings, quiet=True, resume=None)),
        (strategy, "training_step", in_step(strategy.training_step)),
        (strategy, "backward", in_step(strategy.backward)),  # which makes the gradients' shards
        (block_calls, "record_calls", in_step(record_calls)),
        (block_calls, "check_same", do_nothing),  # losses without values are all alike
        (auto_layout, "decide", decision.decide),
        (auto_layout, "plan_tensor", with_values(plan_tensor)),
        (parallel_plan, "make_plan", decision.make_plan),
        (parallel_plan, "plan_tensor", with_values(plan_tensor)),
        (parallel_plan, "plan_context", with_values(plan_context)),
        (parallel_plan, "plan_experts", with_values(plan_experts)),
        (observe_batch, "checksum", do_nothing),
        (observe_batch, "compare_parts", _largest_run),
        (observe_batch, "find_mixing", _largest_run),
        (plan_module, "plan_unit", plan_large(pretend, plan_module.plan_unit)),
        (sample, "plain_tensor", _without_values),
        (prove, "rehearse", _outside_step(pretend, prove.rehearse)),
        (prove, "_run_together", run_together(world)),
        (wire.Wire, "share", share),
        (wire.Spec, "empty", empty),
        (traced_tensor, "as_kind", _as_kind),
        (_fsdp_param, "_chunk_with_empty", _ChunksOnUse),
    ]
    for owner, name, replacement in replacements:
        if not hasattr(owner, name):
            raise AttributeError(f"a dry run replaces {name} of {owner}, which is no longer there")
        setattr(owner, name, replacement)


class _ChunksOnUse:
    """The chunks of a parameter for all ranks. FSDP2 uses two; a fake tensor for each of 4096 would take a minute."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, rank: int) -> Tensor:
        start = rank * self._size
        rest = self._tensor.shape[self._dim] - start
        if rest <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, rest))


def _largest_run(run: Callable[[Any, int, bool], Any], batch: Any, sizes: list[int], *_: Any, **__: Any) -> LossMean:
    """The run on the full batch, for its memory: losses without values are all alike, and taken for means."""
    if len(sizes) > 1:
        run(batch, 3, False)
    return MEAN


def _uncounted(pretend: Any, strategy: Any) -> Any:
    """Build modules in parts whose memory counts once it is used. A real rank has one parameter at a time."""
    in_parts = strategy._in_parts

    @contextmanager
    def building() -> Iterator[None]:
        with pretend.aside(), in_parts():
            yield
        for built in strategy._built:
            pretend.memory.add_unused(built.deferred)

    return building


def _outside_step(pretend: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave FLOPs, messages and peak of the rehearsal out of the step's: it happens once, in the first step."""

    def inside(step: Any, *args: Any) -> Any:
        flops = pretend.flops
        with step.pipeline.wire.ledger.aside():
            trace = function(step, *args)
        pretend.flops = flops
        if pretend.thrifty:  # in a step, not when the pipeline is set up
            pretend.memory.restart()
        return trace

    return inside


def _without_values(tensor: Tensor) -> Tensor:
    """An argument of a block for the proof, which gives activations random numbers anyway."""
    if not isinstance(tensor, FakeTensor):
        return plain_tensor(tensor)
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=working_dtype(tensor.dtype), device="meta")
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class _TracedFake(TracedTensor, FakeTensor):
    """A fake TracedTensor. A tensor has one class, and the class of a fake one can only be changed afterwards."""


def _as_kind(tensor: Tensor, kind: type[Tensor]) -> Any:
    if not isinstance(tensor, FakeTensor):
        return tensor.as_subclass(kind)  # type: ignore[arg-type]
    same = torch.ops.aten.alias(tensor)
    same.__class__ = _TracedFake if kind is TracedTensor else FakeTensor
    return same


class LoneRehearsal(Rehearsal):
    """Runs blocks of other stages on shapes, with temporary fake parameters."""

    pipeline: Any
    world: World

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self._use((args, kwargs), self.call + 1)
        self._begin(unit)
        args, kwargs, module = untrace(args), untrace(kwargs), self.pipeline.module.get_submodule(unit)
        key = (structure(module), repr(map_leaves(_spec, (args, kwargs))))
        if key not in self.seen:
            self.seen[key] = map_leaves(_spec, self._run(module, args, kwargs))
        return self._share(map_leaves(self._received, self.seen[key]))

    @cached_property
    def seen(self) -> dict[object, Any]:
        """Structure and arguments of a block -> its output. Most blocks of a module are alike."""
        return {}

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with self.world.pretend.aside(), _present(module, self.world), without_layers(module):
            return module.forward(*args, **kwargs)

    def _received(self, leaf: Any) -> Any:
        """A tensor like the one that a real rank receives: no view, and without a graph."""
        if not isinstance(leaf, Spec):
            return leaf
        return leaf.empty(self.wire.device).requires_grad_(leaf.requires_grad)


def _spec(leaf: Any) -> Any:
    return Spec.of(leaf) if isinstance(leaf, Tensor) else leaf


def run_together(world: World) -> Callable[..., tuple[Rehearsal, StepTrace, Any]]:
    """The part of `rehearse` in which a real rank runs its own blocks and receives outputs of the others."""

    def run(step: Any) -> tuple[Rehearsal, StepTrace, Any]:
        pipeline, record = step.pipeline, Record()
        rehearsal = LoneRehearsal(pipeline.split, pipeline.wire, pipeline.stage_rank, step.seed)
        rehearsal.pipeline, rehearsal.world = pipeline, world
        recording = pipeline.recorder.recording(record, rehearsal.use_at_end)
        with isolated(pipeline.module) as changes, rehearsal, pipeline.gates.directed(rehearsal), recording:
            with torch.enable_grad():
                result = step.call()
            rehearsal.use_at_end(result)
        kept = join_changes([changes], [1], {})
        pipeline.wire.rehearsed = (detached(untrace(result)), combine([record], [1]).calls, {}, kept)
        return rehearsal, rehearsal.trace_of_step(), []

    return run


def results(wire: Wire, value: Any, site: Any) -> Any:
    """The value shared by another rank: at the end of a step that of its rehearsal, else this rank's own."""
    if site != "results":
        return value
    if not hasattr(wire, "rehearsed"):
        raise UnsupportedError(
            f"a dry run cannot simulate a pipeline that has all blocks on one stage. Use {NO_PIPELINE}, which"
            " does the same work with less memory."
        )
    return wire.rehearsed


def _present(module: nn.Module, world: World) -> AbstractContextManager[None]:
    """Make `module` whole inside: fake parameters and buffers of full size.

    A tied weight is on this rank too: as a shard, while the bias next to it is on meta.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = [
        (held, name, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new)
        for held, name, tensor in own_tensors(module)
        if tensor.is_meta or isinstance(tensor, DTensor)
        for new in [world.pretend.fake_like(tensor)]
    ]
    return replaced_entries(replaced)


def plan_large(pretend: FakeDevice, plan_unit: Callable[..., Any]) -> Callable[..., Any]:
    """`plan_unit`, but the declared plan of a large block is tried on shapes.

    A proof runs a block unsplit and in shards, forward and backward, several times. For a block of a 70B model that
    takes minutes and tens of gigabytes on a laptop; the real job does it before it trains. A block of up to `PROVEN`
    parameters is proven as in the real job, so the plan is the same.
    """

    def plan(unit: nn.Module, sample: Any, size: int, kinds: Any, ways: Any, *rest: Any) -> Any:
        count = sum(parameter.numel() for parameter in unit.parameters())
        if count <= PROVEN:
            return plan_unit(unit, sample, size, kinds, ways, *rest)
        if not ways:
            raise UnsupportedError(
                f"{type(unit).__name__} has {count:,} parameters, too many for a dry run to search for its tensor"
                f" plan (the limit is {PROVEN:,}). Write the plan with tensor_plan={{...}}, or narrower blocks."
            )
        with _on_shapes(pretend):
            return plan_unit(unit, sample, size, kinds, ways, *rest)

    return plan


@contextmanager
def _on_shapes(pretend: FakeDevice) -> Iterator[None]:
    """Make scratch copies fake, compare shapes only, and try one call in place of two of different sizes."""

    def made(name: str, parameter: Tensor, terms: int, generator: torch.Generator) -> Tensor:
        return pretend.fake_like(parameter)

    one = partial(plan_module._samples, most=1)
    with patch.object(scratch, "_random", made), patch.object(plan_module, "_samples", one):
        with patch.object(proof, "_size", lambda _: 0.0):
            yield
