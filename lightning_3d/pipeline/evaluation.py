"""Evaluation in stages: the blocks of a validation, test or predict step on microbatches, forward only.

The stages compute the first pass of the step, each its own blocks, on microbatches. Its results are joined and sent to
every rank, and every rank runs the rest of the step on the full batch: see `first_pass`.

That is right only where the blocks compute each row by itself. So batches of a shape run in three ways, one after the
other. The first shows which blocks run, and the second which tensors the rest needs. Both give every rank the output of
every block, as all batches of a step do that cannot be cut. Then the stages compute the second batch again, on
microbatches. From the third on they compute alone, if that gave the same tensors. After 4, 16, 64, ... such batches one
is computed in both ways again.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import Lightning3DError, PipelineSplitError, UnsupportedError
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.pipeline.cut_module import StepContext
from lightning_3d.pipeline.executor import Execution
from lightning_3d.pipeline.first_pass import EvalDirector, PassRehearsal, RestOfStep, first_pass
from lightning_3d.pipeline.gates import users_hooks
from lightning_3d.pipeline.microbatch import Rows, microbatch_sizes, signature, split_batch
from lightning_3d.pipeline.rehearsal import StepTrace
from lightning_3d.pipeline.schedule import forwards
from lightning_3d.pipeline.stage import Cut, play
from lightning_3d.pipeline.traced_tensor import refuse_placeholders
from lightning_3d.pipeline.training_step import join, joined_dims
from lightning_3d.ranks import agreement, random_streams, talk
from lightning_3d.sandbox.fingerprint import differ, fingerprint
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import Watched, changed, isolated, marks, open_buffers, own
from lightning_3d.sandbox.trees import copied
from lightning_3d.sandbox.trial import holders, trial

_SHAPES_KEPT = 256
_OTHER_VALUES = "blocks compute other values for a row in a microbatch than in the full batch, as with batch statistics"
_DRAWS = (
    "{} draws random numbers (noise, a bootstrap). Steps of a pipeline have random streams of their own, so results are"
    " those of another seed than on one device. Numbers are equal behind torch.manual_seed in torch.random.fork_rng(),"
    " with no block between."
)


@dataclass(frozen=True)
class StagedPass:
    """The first pass of a step, in stages, for batches of one shape."""

    rows: Rows
    sizes: tuple[int, ...]
    trace: StepTrace
    """Of the full batch."""
    pieces: tuple[StepTrace, ...]
    """One per microbatch; the last stage ends behind the pass."""
    dims: tuple[int | None, ...]
    """The dimension along which each tensor of the rest joins, None for one that all microbatches share."""


@dataclass
class Evaluations:
    """The known shapes of the batches of evaluation steps."""

    shapes: dict[Any, "tuple[str, ...] | StagedPass | None"] = field(default_factory=dict)
    """By step and shape: the units of the first pass, then the way to run it. None where it cannot be cut."""
    batches: Counter[Any] = field(default_factory=Counter)
    """By step and shape: the batches that the stages have computed alone."""
    warned: set[str] = field(default_factory=set)
    """Steps that cannot be cut."""
    drawing: set[str] = field(default_factory=set)
    """Steps that are known to draw random numbers."""

    def put(self, key: Any, found: "tuple[str, ...] | StagedPass | None") -> None:
        while len(self.shapes) >= _SHAPES_KEPT:
            del self.shapes[next(iter(self.shapes))]
        self.shapes[key] = found

    def is_due(self, key: Any) -> bool:
        """Count a batch; return True if it is to be computed in both ways: the 4th, 16th, 64th and so on."""
        self.batches[key] += 1
        power = self.batches[key].bit_length() - 1
        return power >= 2 and power % 2 == 0 and self.batches[key] == 1 << power


@dataclass
class EvaluationStep:
    """A batch on its way through a validation, test or predict step."""

    step: StepContext
    known: Evaluations
    problem: Exception | None = None
    """The first error in microbatches on this rank."""
    results: dict[int, list[Tensor]] = field(default_factory=dict)
    """On the last stage, by microbatch: the tensors that the rest uses."""
    draws: bool = False
    """True where the step has drawn random numbers."""

    def __post_init__(self) -> None:
        self.pipeline, self.name, self.args = self.step.pipeline, self.step.name, self.step.args

    def run(self) -> Any:
        """The result of the step on the full batch, with its logs and metrics, on every rank."""
        random_streams.restart_python(self.step.seed)  # as the step does where it begins
        plain = random_streams.plain_print()
        output = self._result()
        self.draws |= random_streams.drawn_since_restart() or plain != random_streams.plain_print()
        if self.draws and self.name not in self.known.drawing:
            self.known.drawing.add(self.name)
            rank_zero_warn(_DRAWS.format(self.name))
        return output

    def _result(self) -> Any:
        module, known = self.pipeline.module, self.known
        trainer = trainer_of(module)
        sanity = trainer is not None and trainer.sanity_checking
        key = (self.name, module.training, sanity, repr(self.args[2:]), signature(self.args[:1]))
        self.pipeline.check_shapes(key)
        if key not in known.shapes:
            director = EvalDirector(self.step)
            output = self._unsplit(director)
            known.put(key, first_pass(director.units, self.pipeline.split) if self._is_cut() else None)
            return output
        found = known.shapes[key]
        if isinstance(found, StagedPass) and known.is_due(key):
            return self._learn(key, tuple(call.unit for call in found.trace.calls), again=True)
        if isinstance(found, StagedPass):
            received = self._run_stages(found)
            if received is not None:
                return self._run_rest(found, received)
            self._give_up(key, self._first(self.problem))
        return self._learn(key, found) if isinstance(found, tuple) else self._unsplit(EvalDirector(self.step))

    def _unsplit(self, director: EvalDirector) -> Any:
        with self.pipeline.gates.directed(director), self.pipeline.recorder.outside():
            output = self.step.call()
        self.draws = director.draws
        return output

    def _run_rest(self, staged: StagedPass, received: list[Tensor]) -> Any:
        rest = RestOfStep(self.step, staged.trace, received)
        pipeline = self.pipeline
        try:
            with rest, pipeline.gates.directed(rest), pipeline.recorder.outside(refuse_placeholders):
                output = self.step.call()
                refuse_placeholders(output)
                return output
        except PipelineSplitError as error:
            raise PipelineSplitError(
                f"{self.name} uses a result of an early block that it did not use in an earlier batch of these shapes,"
                " as code for some batches only does (`if batch_idx == 0`). The stages compute the blocks on"
                " microbatches and send on what is used. Use that result in every batch, or set num_microbatches=1,"
                " with which evaluation runs one block after the other on full batches."
            ) from error

    def _is_cut(self) -> bool:
        """True where the batch has rows for several microbatches, and several ranks have blocks."""
        if self.pipeline.wire.peers.silent or self.pipeline.split.has_one_stage or not self.args:
            return False
        try:
            return len(self._rows_and_sizes()[1]) > 1
        except UnsupportedError:  # samples that are no rows
            return False

    def _rows_and_sizes(self) -> tuple[Rows, tuple[int, ...]]:
        pipeline = self.pipeline
        rows = Rows.of(self.args[0], None, pipeline.module)
        return rows, tuple(microbatch_sizes(self.args[0], pipeline.num_microbatches, pipeline.wire.size, rows))

    def _learn(self, key: Any, units: tuple[str, ...], *, again: bool = False) -> Any:
        """Run the step unsplit, and find out whether the stages would have computed the same.

        Where they have computed alone `again` and again, and would have been wrong now, that is an error.
        """
        pipeline, batch = self.pipeline, copied(self.args[0])
        buffers = marks(pipeline.module, open_buffers(pipeline.module, list(pipeline.split.holders)))
        rehearsal = PassRehearsal(self.step, units)
        with rehearsal, pipeline.gates.directed(rehearsal), pipeline.recorder.outside(rehearsal.use_at_end):
            output = self.step.call()
            kept = holders(pipeline.module.modules())
            rehearsal.use_at_end((output, [list(own(holder).values()) for holder in kept]))
        self.args = (batch, *self.args[1:])  # as it was before the step
        passes, found = list[StepTrace](), list[StagedPass]()
        attempts = (
            lambda: passes.append(self._trace_of_pass(rehearsal, buffers)),
            lambda: found.append(self._plan(rehearsal, passes[0])),
            lambda: self._prove(found[0], rehearsal),
        )
        problem = None
        with _no_graph():
            for attempt in attempts:
                # memory may not suffice on one rank; `_give_up` reports the problem on every rank
                problem = problem or self._first(agreement.error_of(attempt))
        if problem is None:
            self.known.put(key, found[0])
        elif again and problem == _OTHER_VALUES:
            raise UnsupportedError(
                f"{self.name} ran in stages, on microbatches, and {problem}. This was not so in the first batches of"
                " these shapes, so results of the batches since then may be wrong. num_microbatches=1 evaluates full"
                " batches, one block after the other."
            )
        else:
            self._give_up(key, problem)
        return output

    def _first(self, problem: Exception | None) -> str | None:
        """The first problem of all ranks that run this batch: they must go on in the same way."""
        for group in (self.pipeline.wire.group, *self.pipeline.hooks.peers):
            problem = agreement.first_error(problem, group=group, local=True)
        return None if problem is None else _text(problem)

    def _give_up(self, key: Any, problem: str | None) -> None:
        self.known.put(key, None)
        if self.name not in self.known.warned:
            self.known.warned.add(self.name)
            rank_zero_warn(
                f"{self.name} runs one block after the other over the stages, on full batches: in microbatches it would"
                f" not compute the same, or not at all ({problem}). The results of the step are right, but a pipeline"
                " is no faster than one device in it."
            )

    def _trace_of_pass(self, rehearsal: PassRehearsal, buffers: Any) -> StepTrace:
        """The trace of the full batch. Raises where the pass cannot be cut, perhaps on the rank of one block alone."""
        if users_hooks(self.pipeline.module, list(self.pipeline.split.holders)):
            raise PipelineSplitError("blocks have forward hooks, which would be called for each microbatch")
        return replace(rehearsal.trace_of_pass(), changed=changed(self.pipeline.module, buffers))

    def _plan(self, rehearsal: PassRehearsal, trace: StepTrace) -> StagedPass:
        """The pass in stages. Raises where it cannot be cut. Collective."""
        rows, sizes = self._rows_and_sizes()
        pieces: dict[Any, StepTrace] = {}
        each = []
        for piece in split_batch(self.args[0], list(sizes), rows):
            shape = signature(piece)
            if shape not in pieces:
                pieces[shape] = self._rehearse(piece, trace, rehearsal.units)
            each.append(pieces[shape])
        dims = joined_dims(trace.tail, [piece.tail for piece in each])
        if dims is None:
            raise PipelineSplitError("results of its blocks do not join to those of the full batch")
        return StagedPass(rows, sizes, trace, tuple(piece.without_tail() for piece in each), tuple(dims))

    def _rehearse(self, piece: Any, full: StepTrace, units: tuple[str, ...]) -> StepTrace:
        """The trace of a microbatch. Every rank runs the step up to the end of the pass, as a trial."""
        pipeline = self.pipeline
        rehearsal = PassRehearsal(self.step, units, stops=True)
        with (
            trial(pipeline.module, gradients=False, logs=False),
            rehearsal,
            pipeline.gates.directed(rehearsal),
            pipeline.recorder.recording(Record()),
            rehearsal.agreed(),
        ):
            try:
                self._of(piece).call()
            except Cut:
                return rehearsal.trace_like(full)
            raise PipelineSplitError("on a microbatch it ends before its last block")

    def _prove(self, staged: StagedPass, rehearsal: PassRehearsal) -> None:
        """Compare the results of the stages with those of the full batch. Collective."""
        module = self.pipeline.module
        with trial(module, gradients=False, logs=False):
            kept = [(holder, Watched(holder)) for holder in holders(module.modules()) if holder is not module]
            buffers = marks(module, [name for name, buffer in module.named_buffers() if not buffer.is_meta])
            received = self._run_stages(staged)
            for holder, watched in kept:
                for name, *_ in watched.changes():
                    raise PipelineSplitError(
                        f"{type(holder).__name__} keeps {name!r} for later, and only the ranks of its stage have it:"
                        " return it from the block instead"
                    )
            for name in changed(module, buffers):
                raise PipelineSplitError(f"a block changes the buffer {name!r}")
        if received is None:
            raise self.problem or PipelineSplitError("another stage fails")
        rounding = self.pipeline.rounding
        own_outputs = {(len(staged.trace.calls), at): full for at, full in enumerate(rehearsal.last_output)}
        for carried, tensor in zip(staged.trace.tail, received, strict=True):
            full = own_outputs.get(carried.node)
            other = differ(fingerprint(tensor), carried.mark, rounding)
            if other if full is None else not _alike(tensor, full, rounding):
                raise PipelineSplitError(_OTHER_VALUES)

    def _run_stages(self, staged: StagedPass) -> list[Tensor] | None:
        """The tensors that the rest needs, of the full batch, on every rank. None where a rank has a problem."""
        pipeline, count = self.pipeline, len(staged.sizes)
        if users_hooks(pipeline.module, list(pipeline.split.holders)):
            self.problem = PipelineSplitError("blocks have new forward hooks")
        with _no_graph():
            pieces = split_batch(self.args[0], list(staged.sizes), staged.rows)
            pipeline.recorder.find_metrics()

            def forward(stage: int, index: int, received: list[Tensor]) -> list[Tensor]:
                return self._forward(staged.pieces[index], stage, index, pieces[index], received)

            execution = Execution(pipeline, staged.pieces, forward, trains=False)
            execution.run(forwards(*pipeline.placement, count)[pipeline.wire.rank])
            problems = talk.PendingMax([int(self.problem is not None)], pipeline.wire.group)
            if any(problems.wait()):
                return None
            mine = None
            if pipeline.owns_last:
                mine = join(list(zip(*(self.results[index] for index in range(count)), strict=True)), staged.dims)
            return pipeline.wire.share(mine, pipeline.stage_rank[-1], (self.name, "results"))

    def _forward(self, trace: StepTrace, stage: int, index: int, piece: Any, received: list[Tensor]) -> list[Tensor]:
        """The part of a stage on a microbatch; zeros once there is a problem, so that no rank waits in vain."""
        part, title = trace.parts[stage], f"stage {stage}, microbatch {index}"

        def compute() -> None:
            step = replace(self._of(piece), draws=False)
            with isolated(self.pipeline.module):
                self.results[index] = play(step, trace, part, title, received, Record())

        self.problem = self.problem or agreement.error_of(compute)
        if self.problem is not None:
            return [carried.spec.empty(self.pipeline.wire.device).zero_() for carried in part.after]
        return self.results[index] if stage == len(trace.parts) - 1 else self.results.pop(index)

    def _of(self, piece: Any) -> StepContext:
        return replace(self.step, args=(copied(piece), *self.args[1:]))


@contextmanager
def _no_graph() -> Iterator[None]:
    """Without gradients; not in inference mode, whose tensors do not say that they were written to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _alike(tensor: Tensor, full: Tensor, rounding: float) -> bool:
    if tensor.shape != full.shape or tensor.dtype != full.dtype:
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor.equal(full)
    sizes = full.float().nan_to_num(posinf=0.0, neginf=0.0).abs()
    # a mask of -1e9 is no scale for the other values
    scale = min(float(sizes.max()), 10 * float(sizes[sizes > 0].median())) if sizes.any() else 0.0
    return tensor.allclose(full, rtol=rounding, atol=rounding * scale, equal_nan=True)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, Lightning3DError) else f"{type(error).__name__}: {error}"
