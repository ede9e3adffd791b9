"""Proofs on one simulated rank: the rehearsal of a pipeline, and tensor plans of large blocks.

In the rehearsal blocks of other stages run on this rank too, on shapes.

A tensor proof runs a block unsplit and in shards, forward and backward, several times. For a block of a 70B model that
takes minutes and tens of gigabytes on a laptop; the real job does it before it trains. A block of up to `PROVEN`
parameters is proven as in the real job, so the plan is the same. For larger ones the declared plan is tried on shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.module.forward import without_layers
from lightning_3d.module.torch_private import own_buffers, own_parameters
from lightning_3d.module.undo import replaced_entries
from lightning_3d.pipeline.rehearsal import Rehearsal, StepTrace
from lightning_3d.pipeline.wire import Spec, Wire
from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.record import Record, combine
from lightning_3d.sandbox.snapshot import isolated
from lightning_3d.sandbox.trees import detached, map_leaves, untrace
from lightning_3d.tensor import plan_module, proof, scratch
from lightning_3d.tensor.blocks import structure
from lightning_3d.tools.dryrun.cluster import World
from lightning_3d.tools.dryrun.fake_device import FakeDevice


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


@contextmanager
def _present(module: nn.Module, world: World) -> Iterator[None]:
    """Make `module` whole inside: fake parameters and buffers of full size.

    A tied weight is on this rank too: as a shard, while the bias next to it is on meta.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = [
        (held, name, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new)
        for owner in module.modules()
        for held in (own_parameters(owner), own_buffers(owner))
        for name, tensor in held.items()
        if tensor is not None and (tensor.is_meta or isinstance(tensor, DTensor))
        for new in [world.pretend.fake_like(tensor)]
    ]
    with replaced_entries(replaced):
        yield


PROVEN = 30_000_000
"""Largest block, in parameters, that is proven on real numbers."""


def plan_large(pretend: FakeDevice, plan_unit: Callable[..., Any]) -> Callable[..., Any]:
    """`plan_unit`, but the declared plan of a large block is tried on shapes."""

    def plan(unit: nn.Module, sample: Any, size: int, kinds: Any, ways: Any, *rest: Any) -> Any:
        count = sum(parameter.numel() for parameter in unit.parameters())
        if count <= PROVEN:
            return plan_unit(unit, sample, size, kinds, ways, *rest)
        if not ways:
            raise UnsupportedError(
                f"{type(unit).__name__} has {count:,} parameters, too many for a dry run to search for its tensor"
                f" plan (the limit is {PROVEN:,}). Write the plan with tensor_plan={{...}}, or use narrower blocks for"
                " the dry run."
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
