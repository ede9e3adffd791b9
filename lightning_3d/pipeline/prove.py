"""Learning and proving how a step is cut, on one microbatch, before any of that shape is trained on.

One microbatch through the stages, one after the other: forward, and back again for the gradients.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import (
    NO_PIPELINE,
    ConfigurationError,
    DivergenceError,
    Lightning3DError,
    PipelineSplitError,
    UnsupportedError,
    is_meta_error,
)
from lightning_3d.layout import HALVED_BACKWARD
from lightning_3d.pipeline.backward import gradients, halves_agree, leaves_below, recomputes_reentrantly
from lightning_3d.pipeline.cut_module import CutModule, StepContext
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.rehearsal import Rehearsal, StepTrace
from lightning_3d.pipeline.stage import OTHER_SHAPE, play
from lightning_3d.ranks import agreement
from lightning_3d.ranks.users_group_private import alone
from lightning_3d.sandbox.fingerprint import Print, differ, fingerprint, grad_print, unlike
from lightning_3d.sandbox.first_batch import second_step
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.silence import OwnGenerators
from lightning_3d.sandbox.snapshot import changed, isolated, marks, open_buffers
from lightning_3d.sandbox.trees import loss_of, untrace
from lightning_3d.sandbox.trial import trial

_TRACES_KEPT = 256
_BY_STEP = (
    "training_step runs other blocks in its second step than in its first one, or uses other values of early blocks (it"
    " chooses by batch_idx, say). A pipeline rehearses every step then: one microbatch, forward, through all stages in"
    " turn. The same blocks in every step, multiplied by 0 where they do not count, need none."
)


def trace_of(step: StepContext, uncut: UncutRun | None = None) -> StepTrace:
    """The trace of the step on microbatches of this shape, rehearsed on first use, and always where `uncut` is given.

    Gradients are compared too then, with those of `uncut`, the run of the same step before the module was cut.
    """
    traces, key = step.pipeline.traces, step.key
    if uncut is not None or key not in traces:
        while len(traces) >= _TRACES_KEPT:
            del traces[next(iter(traces))]
        traces[key] = rehearse(step, uncut)
    return traces[key]


def follow_second(step: StepContext, alike: Sequence[tuple[Any, ...]]) -> None:
    """Rehearse a second step, on arguments of shapes alike: it may choose by its number, or by values.

    Where other blocks run or other tensors cross, every step is rehearsed. Raises where those have other shapes.
    """
    pipeline = step.pipeline
    try:
        first = trace_of(replace(step, args=alike[0]))
        with second_step(pipeline.module):
            second = rehearse(replace(step, args=alike[1]), None)
    except (ConfigurationError, DivergenceError):
        raise
    except Exception as error:  # of a state that a first step leaves, or of too few rows
        agreement.raise_if_alone(error)
        return
    lost = {item.node for part in first.parts for item in part.after} - second.made  # code that logs in some steps
    renumbered, unmade = map(any, zip(*pipeline.wire.agree((first.made != second.made, bool(lost))), strict=True))
    pipeline.by_step = unmade or [call.unit for call in first.calls] != [call.unit for call in second.calls]
    if pipeline.by_step and pipeline.mixing is not None:  # it is known by its place in the first step alone
        raise UnsupportedError(pipeline.mixing.text.format(unit=first.calls[pipeline.mixing.call].unit))
    for one, other in zip(first.parts, second.parts, strict=True):
        specs = {(item.node, item.spec.requires_grad): item.spec.shape for item in one.after}
        for item in other.after:
            shape = specs.get((item.node, item.spec.requires_grad))
            if shape not in (None, item.spec.shape) and not (pipeline.by_step or renumbered):
                raise PipelineSplitError(OTHER_SHAPE.format(step.name, item.spec.shape, first.origin(item.node), shape))
            pipeline.by_step |= shape != item.spec.shape
    if pipeline.by_step:
        rank_zero_warn(_BY_STEP)


def rehearse(step: StepContext, uncut: UncutRun | None) -> StepTrace:
    """Run the step once on all ranks together, then in stages, and compare; in stages once for shapes of one pattern.

    Every rank of the pipeline calls this with the same microbatch. The runs are trials: their effects are undone.
    """
    pipeline = step.pipeline
    with trial(pipeline.module, gradients=True, logs=False):
        rehearsal, trace, result = _run_together(step)
    _agree(pipeline, trace, step.seed)
    key = (step.name, trace.pattern, pipeline.trained)
    if uncut is not None or key not in pipeline.proven:
        pipeline.proven[key] = _run_in_stages(step, rehearsal, trace, result, uncut)
    return replace(trace, unreached=pipeline.proven[key])


def _run_in_stages(
    step: StepContext, rehearsal: Rehearsal, trace: StepTrace, result: Any, uncut: UncutRun | None
) -> frozenset[str]:
    relay, pipeline = StageRelay(step.pipeline, trace), step.pipeline
    with trial(pipeline.module, gradients=True, logs=False):
        relay.forward(replace(step, real=False, expected=rehearsal.arguments), result)
        if uncut is not None:
            relay.compare(uncut, rehearsal, result)
    pipeline.wire.meet("the forward in stages", relay.problem)
    unreached = relay.unreached()
    if (uncut is not None and uncut.grads) or pipeline.schedule in HALVED_BACKWARD:
        with alone(), pipeline.hooks.rehearsing():
            mine = relay.backward()
        stages = [grads for rank in pipeline.wire.agree(mine) for grads in rank]
        pipeline.wire.meet("the backward in stages", relay.problem)
        if uncut is not None:
            _compare_gradients(stages, uncut)
    return unreached


def _run_together(step: StepContext) -> tuple[Rehearsal, StepTrace, Any]:
    pipeline = step.pipeline
    rehearsal = Rehearsal(pipeline.split, pipeline.wire, pipeline.stage_rank, step.seed)
    record = Record()
    before = marks(pipeline.module, open_buffers(pipeline.module, list(pipeline.split.holders)))
    with rehearsal, pipeline.gates.directed(rehearsal), pipeline.recorder.recording(record, rehearsal.use_at_end):
        with rehearsal.agreed(), Interceptor(OwnGenerators(rehearsal.note_draw)):
            with isolated(pipeline.module) as changes:
                result = _call(step)
            loss_of(result)  # where it has none: the error of the user's step, and not of its stages
            rehearsal.use_at_end((result, list(changes.values())))
            trace = replace(rehearsal.trace_of_step(), changed=changed(pipeline.module, before))
    return rehearsal, trace, fingerprint(untrace(result))


def _call(step: StepContext) -> Any:
    try:
        return step.call()
    except (RuntimeError, TypeError) as error:
        if not is_meta_error(error):
            raise
        raise PipelineSplitError(
            f"{step.name} reads a parameter or a buffer of a block that another stage owns, outside of that block"
            f" ({error}). A stage has the buffers of its own blocks alone, and of other parameters those that the first"
            " step read, where that ran ahead of training. Call a block by block(x), not layers of it one by one. Keep"
            " a buffer that other blocks need on the module around them. Read a parameter in every step, multiplied by"
            f" 0 until it counts; compute with it in its block; or use {NO_PIPELINE}."
        ) from error


def _agree(pipeline: CutModule, trace: StepTrace, seed: int) -> None:
    """Raise unless all ranks have the same trace: else messages would not match."""
    text = repr([trace.changed, *([(item.node, item.spec) for item in part.after] for part in trace.parts)])
    seeds, texts = map(set, zip(*pipeline.wire.agree((seed, text)), strict=True))
    if len(seeds) > 1:
        raise DivergenceError(
            f"The ranks of a pipeline drew {len(seeds)} different random seeds for one step. Seed torch's default"
            " generator alike on all of them: they run the same step on the same batch."
        )
    if len(texts) > 1:
        raise PipelineSplitError(
            "Different tensors cross the cuts on the ranks of a pipeline in the rehearsal. All ranks must have the same"
            " batch, and the step must not depend on the rank."
        )


def _unlike_uncut(uncut: UncutRun, rehearsal: Rehearsal, result: Any) -> str | None:
    """Describe the first difference from the module before it was cut."""
    for at, unit in enumerate(uncut.calls):
        if at in rehearsal.arguments and differ(rehearsal.arguments[at], uncut.arguments[at], uncut.rounding):
            return f"{unit!r} gets other inputs once the module is cut. {_BESIDE}"
    if differ(result, uncut.result, uncut.rounding):
        return f"The step returns another result once the module is cut. {_BESIDE}"
    return None


def _compare_gradients(stages: list[dict[str, Print]], uncut: UncutRun) -> None:
    name = unlike(uncut.grads, stages, uncut.rounding)
    if name is None:
        return
    differs = f"Cut into stages, the step gives {name!r} another gradient than the whole module does"
    if uncut.hooked:
        nearest = max(uncut.hooked, key=lambda inner: len(inner) if name.startswith(f"{inner}.") else 0)
        raise PipelineSplitError(
            f"{differs}: {nearest!r}, which is inside of a block, has a forward hook. Values that a hook takes there"
            " are missing in the loss on every other stage (the router's loss of Hugging Face's mixtures of experts"
            f" uses such values: output_router_logits=True). Return them from the block, or use {NO_PIPELINE}."
        )
    raise PipelineSplitError(
        f"{differs}, from the same outputs. Code between the blocks changes gradients in a way that the rehearsal"
        " cannot record. Move a hook on a node of the graph into a block, or hook the tensor. Give a checkpoint that is"
        f" called with a block use_reentrant=False. Otherwise (a reversible network) use {NO_PIPELINE}."
    )


def _other_buffer(pipeline: CutModule, uncut: UncutRun) -> str | None:
    """Describe a difference in buffers of this rank's blocks, and on the last stage in those around blocks."""
    outside = set(open_buffers(pipeline.module, list(pipeline.split.holders)))
    for name, buffer in pipeline.module.named_buffers():
        mine = not buffer.is_meta and (name not in outside or pipeline.owns_last)
        if mine and name in uncut.buffers and differ(fingerprint(buffer), uncut.buffers[name], uncut.rounding):
            return (
                f"Cut into stages, the step leaves another value in the buffer {name!r} than on the uncut module. Give"
                " the module that owns it a parameter, or change it behind the last block."
            )
    return None


_BESIDE = (
    "A block before it must pass it a value in another way than by arguments (kept on a module or class, or taken by a"
    " hook inside of a block), or the step draws from a random generator of its own, or changes its batch in place, or"
    " drops values of a result that is not contiguous (of an LSTM with batch_first). Pass it from block to block, or"
    " keep both on one stage with pipeline_split; draw from torch's default generator; write dropout(x.contiguous()) or"
    f" x = x * 2 instead of x.mul_(2). Otherwise use {NO_PIPELINE}."
)


@dataclass
class StageRelay:
    """The stages of this rank on one microbatch."""

    pipeline: CutModule
    trace: StepTrace
    received: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """The tensors that crossed the cut behind each stage; for the last stage its loss, if it has one."""
    problem: Exception | None = None
    """The first error on this rank."""

    def compare(self, uncut: UncutRun, rehearsal: Rehearsal, result: Any) -> None:
        """Note the first difference from the module before it was cut."""
        other = _unlike_uncut(uncut, rehearsal, result)
        if other is None and self.problem is None:
            other = _other_buffer(self.pipeline, uncut)
        self.problem = self.problem if other is None else PipelineSplitError(other)

    def forward(self, step: StepContext, result: Any) -> None:
        """Run every stage in turn; compare its inputs and outputs with those of the full step."""
        arriving: list[Tensor] = []
        for stage in range(self.pipeline.last_stage + 1):
            if stage in self.pipeline.my_stages:
                self.received[stage] = arriving
                self.outputs[stage] = self._play(stage, step, result)
            if stage < self.pipeline.last_stage:
                specs = self.trace.specs(stage)
                what = f"stage {stage + 1}: rehearsal, microbatch 0, receiving activations from stage {stage}"
                tensors = self._move(self.outputs.get(stage), specs, stage, stage + 1, stage, what)
                arriving = [each.requires_grad_(spec.requires_grad) for each, spec in zip(tensors, specs, strict=False)]

    def _play(self, stage: int, step: StepContext, result: Any) -> list[Tensor]:
        try:
            part, title = self.trace.parts[stage], f"stage {stage}"
            output = play(step, self.trace, part, title, self.received[stage], Record())
            if stage < self.pipeline.last_stage:
                return list(output)
            if differ(fingerprint(untrace(output)), result, self.pipeline.rounding):
                raise PipelineSplitError(f"Cut into stages, the step returns another result than uncut. {_BESIDE}")
            loss = loss_of(output)
            return [] if loss is None else [loss]
        except Exception as error:  # raised on every rank, where they meet
            agreement.raise_if_alone(error)
            self.problem = self.problem or _of_stage(error, stage)
            specs = self.trace.specs(stage) if stage < self.pipeline.last_stage else []
            return [spec.empty(self.pipeline.wire.device).zero_() for spec in specs]

    def _move(
        self, tensors: list[Tensor] | None, specs: list[Any], source: int, target: int, tag: int, what: str
    ) -> list[Tensor]:
        """`tensors` of stage `source` on the rank of stage `target`; nothing elsewhere."""
        wire, ranks = self.pipeline.wire, self.pipeline.stage_rank
        given = [tensor.detach() for tensor in tensors or []]
        if ranks[source] == ranks[target]:
            return given
        if wire.rank == ranks[source]:
            wire.send(given, ranks[target], tag, what)
            wire.finish()
        return wire.start_receive(specs, ranks[source], tag, what).wait() if wire.rank == ranks[target] else []

    def backward(self) -> list[dict[str, Print]]:
        """Run the backward of every stage in turn; return fingerprints of gradients, by parameter, of stages here.

        Nothing is added to any `.grad`.
        """
        arriving: list[Tensor] = []
        found = []
        for stage in reversed(range(self.pipeline.last_stage + 1)):
            back: list[Tensor] | None = None
            if stage in self.pipeline.my_stages:
                back, grads = self._try_to_differentiate(stage, arriving)
                found.append(grads)
            if stage:
                specs = [spec for spec in self.trace.specs(stage - 1) if spec.requires_grad]
                what = f"stage {stage - 1}: rehearsal, microbatch 0, receiving gradients from stage {stage}"
                arriving = self._move(back, specs, stage, stage - 1, self.pipeline.last_stage + stage, what)
        return found

    def _try_to_differentiate(self, stage: int, arriving: list[Tensor]) -> tuple[list[Tensor], dict[str, Print]]:
        try:
            return self._differentiate(stage, arriving)
        except Exception as error:  # raised on every rank, where they meet
            agreement.raise_if_alone(error)
            self.problem = PipelineSplitError(
                f"stage {stage}: the backward fails when other stages' blocks are absent ({type(error).__name__}:"
                f" {error}). What is recomputed in backward must not reach over a cut: put cuts at the borders of"
                " checkpointed regions with pipeline_split, or recompute block by block, with use_reentrant=False. Call"
                " a function of autograd by its class (`Function.apply`), so that it is seen."
            )
            return [torch.zeros_like(tensor) for tensor in self.received[stage] if tensor.requires_grad], {}

    def unreached(self) -> frozenset[str]:
        """Parameters of this rank that the loss does not depend on, found by following the graph from stage to stage.

        On one device they get no gradient, and optimizers skip them. Here a later stage sends back zeros for tensors
        that it computes from them.
        """
        pipeline, run, found = self.pipeline, set[int](), set[int]()
        used: list[bool] | None = None
        for stage in reversed(range(self.pipeline.last_stage + 1)):
            if stage in self.outputs:
                outputs = self.outputs[stage]
                run |= leaves_below(outputs)
                wanted = [True] * len(outputs) if used is None else used
                below = leaves_below([output for output, is_used in zip(outputs, wanted, strict=True) if is_used])
                found |= below
                used = [id(tensor) in below for tensor in self.received[stage]]
            used = pipeline.wire.share(used, pipeline.stage_rank[stage], ("reached", stage))
        # the gathered parameters themselves: `grad_holder` would start an accumulation in mixed precision
        return frozenset(name for name, parameter in pipeline.module.named_parameters() if id(parameter) in run - found)

    def _differentiate(self, stage: int, arriving: list[Tensor]) -> tuple[list[Tensor], dict[str, Print]]:
        """Gradients of the tensors that a stage received, and fingerprints of the gradients of its parameters."""
        owned = {id(tensor) for tensor in self.pipeline.stage_parameters(stage)}
        mine = {name: item for name, item in self.pipeline.module.named_parameters() if id(item) in owned}
        entering = [tensor for tensor in self.received[stage] if tensor.requires_grad]
        pairs = list(self._pairs(stage, arriving))
        if not pairs:
            return [torch.zeros_like(tensor) for tensor in entering], {}
        outputs, seeds = [output for output, _ in pairs], [grad for _, grad in pairs]
        wanted, halved = [*entering, *mine.values()], self.pipeline.schedule in HALVED_BACKWARD
        piecewise = halved or recomputes_reentrantly(outputs)
        with _printed({} if piecewise else mine) as prints:
            grads = gradients(outputs, seeds, wanted, again=halved)
        if halved and not halves_agree(outputs, seeds, self.received[stage], list(mine.values()), grads):
            self._keep_in_one_piece(stage)
        back = [
            torch.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(entering, grads[: len(entering)], strict=True)
        ]
        own = zip(mine, grads[len(entering) :], strict=True)
        return back, prints | {name: grad_print(grad) for name, grad in own if grad is not None and name not in prints}

    def _keep_in_one_piece(self, stage: int) -> None:
        if stage not in self.pipeline.in_one_piece:
            self.pipeline.in_one_piece.add(stage)
            warnings.warn(
                f"schedule={self.pipeline.schedule!r}: on stage {stage} gradients of weights cannot be computed"
                " separately from those of inputs (a weight used at two depths, a hook on a gradient, recomputation)."
                " Its backwards run in one piece: the numbers are right, some idle time is not filled.",
                stacklevel=2,
            )

    def _pairs(self, stage: int, arriving: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Outputs that are differentiated, with their gradients; the loss has none."""
        if stage == self.pipeline.last_stage:
            yield from ((output, None) for output in self.outputs[stage] if output.requires_grad)
            return
        waiting = iter(arriving)
        for output, spec in zip(self.outputs[stage], self.trace.specs(stage), strict=True):
            if spec.requires_grad:
                grad = next(waiting)
                if output.requires_grad:
                    yield output, grad


@contextmanager
def _printed(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Print]]:
    """Replace gradients inside by their fingerprints, one after the other: all would be as large as the stage."""
    found: dict[str, Print] = {}

    def note(name: str, grad: Tensor) -> Tensor:
        found[name] = grad_print(grad)
        return grad.new_zeros(()).expand(grad.shape)

    with ExitStack() as stack:
        for name, item in parameters.items():
            if item.requires_grad:
                stack.callback(item.register_hook(partial(note, name)).remove)
        yield found


def _of_stage(error: Exception, stage: int) -> Lightning3DError:
    if isinstance(error, Lightning3DError):
        return error
    return PipelineSplitError(
        f"stage {stage}: the step fails when other stages' blocks are absent ({type(error).__name__}: {error}). Code"
        " outside of the blocks must not need more of a block than what it returns, or sizes that its values decide: a"
        f" block that packs sequences unpacks them too (pad_packed_sequence). Or use {NO_PIPELINE}."
    )
