"""An evaluation step around its first pass through the blocks: the pass is cut into stages, the rest runs unsplit.

The *first pass* is the calls of units up to the last unit. If the step calls an earlier block again before that, the
first pass ends there. The *rest* of the step follows: losses, metrics, logs, more calls of blocks. Every rank runs it
on the full batch, so that metrics, logs and predictions are those of one device.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, UnsupportedError
from lightning_3d.pipeline.cut_module import StepContext
from lightning_3d.pipeline.rehearsal import Carried, Rehearsal, StagePart, StepTrace
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.stage import Cut, StagePlay
from lightning_3d.pipeline.traced_tensor import StepTape, TracedTensor, refuse_placeholders
from lightning_3d.pipeline.wire import Spec
from lightning_3d.ranks import random_streams
from lightning_3d.sandbox.trees import tensors_in, untrace


def first_pass(units: Sequence[str], split: PipelineSplit) -> tuple[str, ...]:
    """The leading calls of `units` whose stages follow each other."""
    reached = 0
    for at, unit in enumerate(units):
        later = [stage for stage in split.holders[unit] if stage >= reached]
        if not later:
            return tuple(units[:at])
        reached = later[0]
    return tuple(units)


class EvalDirector:
    """A `Director` that gives every rank the real output of every unit."""

    skipping = False

    def __init__(self, context: StepContext, calls: int = 0, reached: int = 0) -> None:
        self.pipeline, self.seed, self.calls, self.reached = context.pipeline, context.seed, calls, reached
        self.units: list[str] = []
        self.step = context.name
        self.draws = False
        """True where code before the last unit has drawn random numbers."""

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.draws |= random_streams.drawn_since_restart()
        random_streams.restart(self.seed, 2 * self.calls)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        return self._share(unit, output)

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self.draws |= random_streams.drawn_since_restart()
        return self._share(unit, None)

    def _share(self, unit: str, output: Any) -> Any:
        if torch.is_grad_enabled() and not self.pipeline.split.has_one_stage:
            raise UnsupportedError(
                f"{self.step} calls {unit!r} with gradients enabled (torch.enable_grad). Under a pipeline the blocks of"
                " an evaluation step run on several ranks, and no graph crosses these. So a backward would reach the"
                f" blocks of one stage alone. Train in training_step, or use {NO_PIPELINE}."
            )
        holders = self.pipeline.split.holders[unit]
        self.reached = next((stage for stage in holders if stage >= self.reached), holders[-1])
        self.calls += 1
        self.units.append(unit)
        rank = self.pipeline.stage_rank[self.reached]
        shared = self.pipeline.wire.share(output, rank, ("call", self.calls))
        random_streams.restart(self.seed, 2 * self.calls - 1)
        return shared


class _Released(StepTape):
    """A tape whose tensors are ordinary ones afterwards: the user may keep them for a later batch."""

    def _trace(self, leaf: Any, absent: bool) -> Any:
        traced = super()._trace(leaf, absent)
        if isinstance(traced, TracedTensor):
            self.__dict__.setdefault("handles", []).append(weakref.ref(traced))
        return traced

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self.__dict__.pop("handles", ()):
            if (traced := handle()) is not None:
                traced.__class__ = Tensor


class PassRehearsal(_Released, Rehearsal):
    """The full step on every rank by an `EvalDirector`, to the end of the last of `stops`. Notes uses of tensors."""

    divides = False

    def __init__(self, context: StepContext, units: tuple[str, ...], *, stops: bool = False) -> None:
        pipeline = context.pipeline
        super().__init__(pipeline.split, pipeline.wire, pipeline.stage_rank, context.seed)
        self.context, self.units, self.stops = context, units, stops
        self.rest: EvalDirector | None = None
        """Runs what follows the pass."""
        self.last_output: list[Tensor] = []
        """The tensors that the last unit of the pass has returned."""

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if rest := self._behind_pass(unit):
            self._use((args, kwargs), self.call)
            return rest.enter(unit, untrace(args), untrace(kwargs))
        return super().enter(unit, args, kwargs)

    def leave(self, unit: str, output: Any) -> Any:
        return self.rest.leave(unit, output) if self.rest else self._passed(super().leave(unit, output))

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        if rest := self._behind_pass(unit):
            self._use((args, kwargs), self.call)
            return rest.foreign(unit, args, kwargs)
        return self._passed(super().foreign(unit, args, kwargs))

    def _behind_pass(self, unit: str) -> EvalDirector | None:
        at = len(self.calls)
        if self.rest is None and self.units[at : at + 1] != (unit,):
            self.rest = EvalDirector(self.context, at, self.calls[-1].stage if self.calls else 0)
            self.tracing = False
        return self.rest

    def _check_recomputed(self, unit: str, stage: int) -> None:
        """Allow any: an evaluation has no backward."""

    def _passed(self, output: Any) -> Any:
        if len(self.calls) < len(self.units):
            return output
        self.tracing = False
        if self.stops:
            raise Cut
        plain = untrace(output)
        self.last_output = [leaf.detach().clone() for leaf in tensors_in(plain)]
        return plain

    def trace_of_pass(self) -> StepTrace:
        """The trace of the pass, with the tensors that the rest uses. Raises where the pass cannot be cut."""
        count = len(self.units)
        if len(self.calls) < count:
            raise PipelineSplitError("other blocks run than in an earlier batch of these shapes")
        trace = self.trace_of_step()
        nodes = [(count, at) for at in range(len(self.last_output))]
        nodes += [node for node, when in self.last_use.items() if node[0] < count <= when]
        trace = replace(trace, tail=tuple(map(self.carried, sorted(nodes))))
        crossing = [item for part in trace.parts for item in part.after]
        if not trace.tail or any(item.spec.requires_grad for item in (*crossing, *trace.tail)):
            raise PipelineSplitError("the step uses no result of its blocks, or differentiates them")
        return trace

    def trace_like(self, full: StepTrace) -> StepTrace:
        """The trace of the pass, cut as `full` is, with the shapes of this run."""

        def here(items: tuple[Carried, ...]) -> tuple[Carried, ...]:
            missing = [item.node for item in items if item.node not in self.specs]
            if missing:
                raise PipelineSplitError(f"a microbatch computes other tensors ({full.origin(missing[0])})")
            return tuple(self.carried(item.node) for item in items)

        parts = tuple(replace(part, before=here(part.before), after=here(part.after)) for part in full.parts)
        return replace(full, calls=tuple(self.calls), parts=parts, heads=(), tail=here(full.tail))


class RestOfStep(_Released, StagePlay):
    """The full step with the results of its first pass, which the stages have computed, in place of the pass."""

    def __init__(self, context: StepContext, trace: StepTrace, received: list[Tensor]) -> None:
        self.count = len(trace.calls)
        part = StagePart(self.count, self.count, trace.tail, ())
        super().__init__(context, trace, part, "behind the blocks", received)
        self.rest = EvalDirector(context, self.count, trace.calls[-1].stage)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().run(func, args, kwargs)
        if self.call == self.count:
            refuse_placeholders(result)
        return result

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.call < self.count:
            return super().enter(unit, args, kwargs)
        self.skipping = False
        self._refuse_absent(unit, args, kwargs)
        return self.rest.enter(unit, self.plain(args), self.plain(kwargs))

    def leave(self, unit: str, output: Any) -> Any:
        return self._passed(super().leave(unit, output)) if self.skipping else self.rest.leave(unit, output)

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        if self.call < self.count:
            return self._passed(super().foreign(unit, args, kwargs))
        return self.rest.foreign(unit, args, kwargs)

    def _passed(self, output: Any) -> Any:
        if self.call < self.count:
            return output
        self.tracing = False
        return self.plain(output)

    def _zeros(self, spec: Spec) -> Tensor:
        if self.call < self.count:
            return super()._zeros(spec)
        # the received tensor takes the place of this one
        return torch.zeros((), dtype=spec.dtype, device=self.device).expand(spec.shape)
