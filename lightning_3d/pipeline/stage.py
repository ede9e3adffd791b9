"""One stage's part of the user's step on one microbatch."""

from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PipelineSplitError
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.microbatch import leaves, map_leaves
from lightning_3d.pipeline.rehearsal import Trace, differ, fingerprint
from lightning_3d.pipeline.traced import Tape, Traced, not_a_view
from lightning_3d.pipeline.wire import Spec


class Cut(BaseException):
    """Ends a step at the first call that belongs to a later stage. Not an Exception: users' handlers let it pass."""


class StagePlay(Tape):
    """Plays one stage: earlier units give stand-ins, its own run, the first later one ends the step."""

    def __init__(
        self, trace: Trace, stage: int, received: list[Tensor], seed: int, device: torch.device, last: bool
    ) -> None:
        before = trace.carried[stage - 1] if stage else ()
        after = () if last else trace.carried[stage]
        super().__init__(
            {carried.node: not_a_view(value) for carried, value in zip(before, received, strict=True)},
            frozenset(carried.node for carried in after),
        )
        self.trace_of_step, self.stage, self.seed, self.device, self.last = trace, stage, seed, device, last
        self.expected: dict[int, list[list[float]]] | None = None
        """In the rehearsal's check: fingerprints of what own units must be called with."""

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = self._begin(unit)
        if call == self.stage:
            self._refuse_absent(unit, args, kwargs)
        args, kwargs = self.plain(args), self.plain(kwargs)
        if self.expected is not None and call == self.stage:
            self._check(unit, args, kwargs)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        seeds.restart(self.seed, 2 * self.call - 1)
        if self.trace_of_step.calls[self.call - 1].stage < self.stage:
            return self.trace(output, absent=True)
        self.tracing = not self.last
        return self.trace(output, absent=False) if self.tracing else output

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self._begin(unit)
        seeds.restart(self.seed, 2 * self.call - 1)
        output = self.trace_of_step.calls[self.call - 1].output
        zeros = map_leaves(lambda leaf: self._zeros(leaf) if isinstance(leaf, Spec) else leaf, output)
        return self.trace(zeros, absent=True)

    def outputs(self) -> list[Tensor]:
        """What crosses the cut behind this stage."""
        wanted = [carried.node for carried in self.trace_of_step.carried[self.stage]]
        missing = [node for node in wanted if node not in self.made]
        if missing:
            origin = self.trace_of_step.origin(missing[0])
            raise PipelineSplitError(f"Stage {self.stage}: a tensor that a later stage needs was not made ({origin}). {_DIFFERENT}")
        return [self.made[node] for node in wanted]

    def _begin(self, unit: str) -> int:
        call = self.next_call()
        calls = self.trace_of_step.calls
        if call >= len(calls) or calls[call].unit != unit:
            expected = calls[call].unit if call < len(calls) else "no further block"
            raise PipelineSplitError(f"Stage {self.stage}: the step calls {unit!r} where {expected!r} was expected. {_DIFFERENT}")
        if calls[call].stage > self.stage:
            raise Cut
        seeds.restart(self.seed, 2 * call)
        return calls[call].stage

    def _refuse_absent(self, unit: str, args: Any, kwargs: Any) -> None:
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Traced) and leaf.absent and leaf.node not in self.values:
                origin = self.trace_of_step.origin(leaf.node)
                raise PipelineSplitError(f"Stage {self.stage}: {unit!r} needs a tensor that was not carried to it ({origin}). {_DIFFERENT}")

    def _check(self, unit: str, args: Any, kwargs: Any) -> None:
        assert self.expected is not None
        if differ(fingerprint((args, kwargs)), self.expected.get(self.call - 1, [])):
            raise PipelineSplitError(
                f"Stage {self.stage}: cut into stages, {unit!r} gets other inputs than in the whole step. Something"
                " that it needs comes from an earlier stage in a way that was not seen (a tensor changed in place"
                " through a view, or kept on a module between calls). Pass it from block to block."
            )

    def _zeros(self, spec: Spec) -> Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)


_DIFFERENT = (
    "The step ran differently than in its rehearsal on the same shapes: which blocks run, and in which order, must"
    " depend on the shapes of the batch only."
)
