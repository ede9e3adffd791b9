"""The part of the user's step that belongs to one stage, on one microbatch."""

from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PipelineSplitError
from lightning_3d.pipeline.rehearsal import StagePart, StepTrace
from lightning_3d.pipeline.traced_tensor import StepTape, TracedTensor, not_a_view, refuse_missing
from lightning_3d.pipeline.wire import Spec
from lightning_3d.ranks import random_streams
from lightning_3d.sandbox.fingerprint import differ, fingerprint
from lightning_3d.sandbox.trees import leaves, map_leaves


class Cut(BaseException):
    """Ends a step at the first call that belongs to a later stage, or behind the last call of an evaluation.

    Not an Exception: users' handlers let it pass.
    """


class StagePlay(StepTape):
    """Plays one part of a step: earlier units return placeholders, its own run, the first later one ends the step."""

    def __init__(
        self, trace: StepTrace, part: StagePart, name: str, received: list[Tensor], seed: int, device: torch.device,
        earlier: int | None = None, *, draws: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            {carried.node: not_a_view(value) for carried, value in zip(part.before, received, strict=True)},
            frozenset(carried.node for carried in part.after),
        )
        self.step_trace, self.part, self.name, self.seed, self.device = trace, part, name, seed, device
        self.earlier, self.draws = earlier, draws
        self.skipping = False
        self.final = part.stop == len(trace.calls) and not part.after
        self.expected: dict[int, list[list[float]]] | None = None
        """In the proof: fingerprints of the arguments that this part's units must get."""

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._refresh_arguments(args, kwargs)
        self.skipping = not self._begin(unit)
        if self.skipping:
            return (), {}
        self._refuse_absent(unit, args, kwargs)
        args, kwargs = self.plain(args), self.plain(kwargs)
        if self.expected is not None:
            self._check(unit, args, kwargs)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        if self.skipping:
            return self._placeholder()
        self._restart(2 * self.call - 1)
        self.tracing = not self.final
        output = self.trace(output, absent=False) if self.tracing else output
        if not self.final and self.call == len(self.step_trace.calls):
            raise Cut
        return output

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self._refresh_arguments(args, kwargs)
        self._begin(unit)
        return self._placeholder()

    def on_written(self, inputs: list[TracedTensor], missing: list[TracedTensor]) -> None:
        if self.final:
            refuse_missing(missing)

    def to_send(self, value: Any) -> Any:
        """Before this part begins, a received tensor has what the message of an earlier stage has changed already."""
        if self.call > self.part.start:
            return self.plain(value)
        return map_leaves(lambda leaf: self._again(leaf) if isinstance(leaf, TracedTensor) else leaf, value)

    def _again(self, leaf: TracedTensor) -> Tensor:
        plain: Tensor = self.plain(leaf)
        return plain.clone() if leaf.node in self.received else plain

    def _refresh_arguments(self, args: Any, kwargs: Any) -> None:
        self.refresh([leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TracedTensor)])

    def _placeholder(self) -> Any:
        self._restart(2 * self.call - 1)
        output = self.step_trace.calls[self.call - 1].output
        zeros = map_leaves(lambda leaf: self._zeros(leaf) if isinstance(leaf, Spec) else leaf, output)
        return self.trace(zeros, absent=True)

    def outputs(self) -> list[Tensor]:
        """The tensors that cross the cut behind this part."""
        wanted = [carried.node for carried in self.part.after]
        missing = [node for node in wanted if node not in self.made]
        if missing:
            origin = self.step_trace.origin(missing[0])
            raise PipelineSplitError(
                f"{self.name}: a tensor that a later stage needs was not computed ({origin}). {_DIFFERENT}"
            )
        for carried in self.part.after:
            self._check_shape(carried.spec, self.made[carried.node], self.step_trace.origin(carried.node))
        return [self.made[node] for node in wanted]

    def _check_shape(self, spec: Spec, tensor: Tensor, origin: str) -> None:
        """Raise on another shape than in the rehearsal: the next stage waits for as many numbers as then."""
        if tuple(tensor.shape) != spec.shape:
            raise PipelineSplitError(
                f"{self.name}: a tensor that goes to the next stage has shape {tuple(tensor.shape)} ({origin}), and had"
                f" {spec.shape} in the rehearsal with another batch of the same shapes. Between blocks a shape must not"
                " depend on values (x[mask], a packed sequence): pad instead, or select inside of a block or behind the"
                " last one."
            )

    def _begin(self, unit: str) -> bool:
        """Count a call; return True if it belongs to this part."""
        call = self.next_call()
        calls = self.step_trace.calls
        if call >= len(calls) or calls[call].unit != unit:
            expected = calls[call].unit if call < len(calls) else "no further block"
            raise PipelineSplitError(
                f"{self.name}: the step calls {unit!r} where {expected!r} was expected. {_DIFFERENT}"
            )
        if call >= self.part.stop:
            raise Cut
        self._restart(2 * call)
        return call >= self.part.start

    def _restart(self, moment: int) -> None:
        """Restart the random streams at a moment of the step: 2 * calls where a call begins, one less after it."""
        if not self.draws and random_streams.drawn_since_restart():
            raise PipelineSplitError("it draws random numbers, and each microbatch would draw the same ones")
        begun = moment >= 2 * self.part.start
        random_streams.restart(self.seed if begun or self.earlier is None else self.earlier, moment)
        if self.earlier is not None and moment == 2 * self.part.start:
            random_streams.restart_python(self.seed)

    def _refuse_absent(self, unit: str, args: Any, kwargs: Any) -> None:
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, TracedTensor) and leaf.absent and leaf.node not in self.values:
                origin = self.step_trace.origin(leaf.node)
                raise PipelineSplitError(
                    f"{self.name}: {unit!r} needs a tensor that was not carried to it ({origin}). {_DIFFERENT}"
                )

    def _check(self, unit: str, args: Any, kwargs: Any) -> None:
        assert self.expected is not None
        if differ(fingerprint((args, kwargs)), self.expected.get(self.call - 1, [])):
            raise PipelineSplitError(
                f"{self.name}: cut into stages, {unit!r} gets other inputs than in the uncut step. Something"
                " that it needs comes from an earlier stage in a way that the rehearsal cannot record (a tensor"
                " changed in place through a view, or kept on a module between calls). Pass it from block to block."
            )

    def _zeros(self, spec: Spec) -> Tensor:
        """Zeros for every block and microbatch, until code between blocks writes into them."""
        made, key = self.step_trace.zeros, (spec.shape, spec.dtype)
        with torch.inference_mode(False):  # kept for later calls, which may need gradients
            if key not in made or made[key]._version:
                made[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            return made[key].detach()


_DIFFERENT = (
    "The step ran differently than in its rehearsal on the same shapes: which blocks run, and in which order, must"
    " depend on the shapes of the batch only, not on batch_idx, the epoch or values. Run the same blocks in every step"
    " and multiply what is not to count by 0, or use pipeline_parallel_size=1."
)
