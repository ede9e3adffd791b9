"""Runs the part of the user's step that belongs to one stage, on one microbatch."""

import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, UnsupportedError, is_meta_error
from lightning_3d.module.graph_private import nodes_made
from lightning_3d.module.operation_count import ShownOperations
from lightning_3d.module.torch_private import version_of
from lightning_3d.pipeline.cut_module import StepContext
from lightning_3d.pipeline.rehearsal import StagePart, StepTrace
from lightning_3d.pipeline.traced_tensor import StepTape, TracedTensor, not_a_view, refuse_missing, refuse_placeholders
from lightning_3d.pipeline.wire import Spec
from lightning_3d.ranks import random_streams
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.fingerprint import differ, fingerprint
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import isolated_buffers
from lightning_3d.sandbox.trees import leaves, map_leaves, tensors_in, untrace


class Cut(BaseException):
    """Ends a step at the first call that belongs to a later stage, or behind the last call of an evaluation.

    Not an Exception: users' handlers let it pass.
    """


_PIECES = (
    "training_step computes on this stage",
    "A pipeline runs it for each microbatch, and a mean or a norm over samples is not that of the batch",
    "use num_microbatches=1",
)


class StagePlay(StepTape):
    """Plays one part of a step: earlier units return placeholders, its own run, the first later one ends the step."""

    def __init__(
        self, context: StepContext, trace: StepTrace, part: StagePart, name: str, received: list[Tensor]
    ) -> None:
        self.parts, pairs = context.pipeline.wire.parts, zip(part.before, received, strict=True)
        super().__init__(
            {carried.node: self.parts.joined(not_a_view(value), carried.spec) for carried, value in pairs},
            frozenset(carried.node for carried in part.after),
        )
        self.context, self.step_trace, self.part, self.name = context, trace, part, name
        self.device = context.pipeline.wire.device
        self.skipping, self.start = False, nodes_made()
        self.final = part.stop == len(trace.calls) and not part.after

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._refresh_arguments(args, kwargs)
        self.skipping = not self._begin(unit)
        if self.skipping:
            return (), {}
        self._refuse_absent(unit, args, kwargs)
        if self.call == 1 and self.context.real and self.context.pipeline.given is not False:
            self._note_given((args, kwargs))
        args, kwargs = self.plain(args), self.plain(kwargs)
        self._check(unit, args, kwargs)
        return args, kwargs

    def _note_given(self, given: Any) -> None:
        """Warn once where the first block got a tensor of the batch in the first step, and gets none in this one."""
        pipeline, batch = self.context.pipeline, set(map(id, tensors_in(self.context.args)))
        own = pipeline.num_microbatches != 1 and not batch.isdisjoint(map(id, tensors_in(given)))
        if pipeline.given and not own:
            warnings.warn(_LATE_INPUT, stacklevel=2)
        pipeline.given = own

    def leave(self, unit: str, output: Any) -> Any:
        if self.skipping:
            return self._placeholder()
        self._restart(2 * self.call - 1)
        self.tracing = not self.final
        if self.final and self.context.real:  # else the graph of a rehearsal would live on
            pipeline, made = self.context.pipeline, tensors_in(output)
            pipeline.is_mean &= all(type(leaf) is Tensor for leaf in made)  # the graph of a part is another one
            pipeline.ends.update(leaf.grad_fn for leaf in made if leaf.grad_fn is not None)
        output = self.trace(output, absent=False) if self.tracing else output
        if self.call == len(self.step_trace.calls):
            if not self.final:
                raise Cut
            if self.context.pipeline.loss_scope != "batch":  # else the full batch runs here
                self.note(tensors_in(output))
        return output

    def note(self, results: list[Tensor]) -> None:
        """Warn of operations in the calls of this part, and between them, that its first steps did not show."""
        pipeline = self.context.pipeline
        if self.context.real and pipeline.num_microbatches != 1:
            known = pipeline.shown.get(self.part.start)
            shown = pipeline.shown[self.part.start] = known or ShownOperations(pipeline.module, *_PIECES, beside=False)
            if shown.are_new(self.start):
                shown.note(self.start, results)

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self._refresh_arguments(args, kwargs)
        self._begin(unit)
        return self._placeholder()

    def requires_grad(self, tensor: TracedTensor) -> bool:
        """True where it was in the rehearsal, for a tensor that this stage does not have."""
        if tensor.absent and tensor.node not in self.values:
            return tensor.node in self.step_trace.differentiable
        return super().requires_grad(tensor)

    def on_written(self, inputs: list[TracedTensor], missing: list[TracedTensor]) -> None:
        if self.final:
            refuse_missing(missing)

    def to_send(self, value: Any) -> Any:
        """Before this part begins, a received tensor has what the message of an earlier stage has changed already."""
        if self.call > self.part.start:
            return self.usable(value)
        return map_leaves(lambda leaf: self._again(leaf) if isinstance(leaf, TracedTensor) else leaf, value)

    def _again(self, leaf: TracedTensor) -> Tensor:
        plain: Tensor = self.usable(leaf)
        return plain.clone() if leaf.node in self.received else plain

    def usable(self, value: Any) -> Any:
        return self.parts.whole(self.plain(value))

    def _trace(self, leaf: Any, absent: bool) -> Any:
        part: Any = self.values.get((self.call, self.index)) if absent else leaf
        if not (isinstance(leaf, Tensor) and self.parts.is_part(part)):
            return super()._trace(leaf, absent)
        node = self._number()  # blocks get the part, other code a tensor that it is computed for
        self.values[node] = part
        self.on_made(node, part)
        stand_in = torch.zeros((), dtype=part.dtype, device=self.device).expand(part.shape)
        return self._handle(stand_in, node, absent=True)

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
        return [self.parts.own(self.made[carried.node], carried.spec) for carried in self.part.after]

    def _check_shape(self, spec: Spec, tensor: Tensor, origin: str) -> None:
        """Raise on another shape than in the rehearsal, or a new need of a gradient: the next stage knows the old."""
        if tensor.requires_grad and not spec.requires_grad:
            raise PipelineSplitError(
                f"{self.name}: a tensor that goes to the next stage needs a gradient ({origin}), and needed none in the"
                " rehearsal. The next stage sends none, so blocks before it would not train. Where the step freezes the"
                " first blocks (torch.no_grad), call requires_grad_(False) in on_train_batch_start instead. Blocks that"
                " are left out at random (LayerDrop) may add their result times 0."
            )
        if tuple(tensor.shape) != spec.shape:
            raise PipelineSplitError(OTHER_SHAPE.format(self.name, tuple(tensor.shape), origin, spec.shape))

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
        step = self.context
        if not step.draws and random_streams.drawn_since_restart():
            raise PipelineSplitError("it draws random numbers, and each microbatch would draw the same ones")
        begun = moment >= 2 * self.part.start
        random_streams.restart(step.seed if begun or step.earlier is None else step.earlier, moment)
        if step.earlier is not None and moment == 2 * self.part.start:
            random_streams.restart_python(step.seed)

    def _refuse_absent(self, unit: str, args: Any, kwargs: Any) -> None:
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, TracedTensor) and leaf.absent and leaf.node not in self.values:
                origin = self.step_trace.origin(leaf.node)
                raise PipelineSplitError(
                    f"{self.name}: {unit!r} needs a tensor that was not carried to it ({origin}). {_DIFFERENT}"
                )

    def _check(self, unit: str, args: Any, kwargs: Any) -> None:
        expected, rounding = self.context.expected, self.context.pipeline.rounding
        if expected is not None and differ(fingerprint((args, kwargs)), expected.get(self.call - 1, []), rounding):
            raise PipelineSplitError(
                f"{self.name}: cut into stages, {unit!r} gets other inputs than in the uncut step. Something"
                " that it needs comes from an earlier stage in a way that the rehearsal cannot record (a tensor"
                " changed in place through a view, or kept on a module between calls). Pass it from block to block."
            )

    def _zeros(self, spec: Spec) -> Tensor:
        """Zeros for every block and microbatch, until code between blocks writes into them."""
        made, key = self.step_trace.zeros, (spec.shape, spec.dtype)
        with torch.inference_mode(False):  # kept for later calls, which may need gradients
            if key not in made or version_of(made[key]):
                made[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            return made[key].detach()


_SHAPES = (
    "Between blocks a shape must not depend on values (sequences cut to the longest one, x[mask], a packed sequence)."
    " Cut sequences in the collate_fn or in on_after_batch_transfer, pad them, or select inside of a block or behind"
    " the last one."
)
OTHER_SHAPE = (
    "{}: a tensor that goes to the next stage has shape {} ({}), and had {} with another batch of the same shapes."
    f" {_SHAPES}"
)
OTHER_SIZES = (
    "{}: code between blocks fails on results of blocks that do not run here. They have the shapes of an earlier batch"
    f" ({{}}). {_SHAPES} With num_microbatches=1 the last stage may compute any shapes."
)
_LATE_INPUT = (
    "training_step gives its first block a tensor that it computes from the batch, and gave it one of the batch itself"
    " in the first step. That microbatches train as the batch does was found with the first batch. Where samples are"
    " mixed or normalized over the batch from now on (mixup, a mean), each microbatch has its own."
    " num_microbatches=1 runs the full batch at once."
)
_DIFFERENT = (
    "The step ran differently than in its rehearsal on the same shapes: which blocks run, and in which order, must"
    " depend on the shapes of the batch only, not on batch_idx, the epoch or values. Run the same blocks in every step"
    f" and multiply what is not to count by 0, or use {NO_PIPELINE}."
)


def play(
    context: StepContext, trace: StepTrace, part: StagePart, title: str, received: list[Tensor], record: Record
) -> Any:
    """Run one part of a step. Returns what crosses the cut behind it, of the last part the output of the step."""
    pipeline, player = context.pipeline, StagePlay(context, trace, part, title, received)
    undo = () if player.final else trace.changed
    ends = refuse_placeholders if player.final else None
    speaks = context.real and player.final and pipeline.acts_as_rank_zero
    recording = pipeline.recorder.recording(record, ends, speaks=speaks)
    with isolated_buffers(pipeline.module, undo), player, pipeline.gates.directed(player), recording, rank_local():
        try:
            output = context.call()
        except Cut:
            player.note(outputs := player.outputs())
            return outputs
        except (RuntimeError, TypeError, IndexError) as error:
            if is_meta_error(error):
                raise _absent(title, str(error)) from error
            refuse_backward_hooks(error)
            if context.real and player.computes_absent:
                raise PipelineSplitError(OTHER_SIZES.format(title, error)) from error
            raise
    if not player.final:
        raise PipelineSplitError(
            f"{title}: the step ended before it reached a block of a later stage, which in its rehearsal on the same"
            " shapes it called. Which blocks run must not depend on batch_idx, the epoch or values (`return None` for"
            " some batches): leave these batches out of the loader, multiply their loss by 0, or use"
            f" {NO_PIPELINE}, with which Lightning still refuses None on several devices."
        )
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(output)) and player.device.type != "meta":
        raise _absent(title, "its output has no values")
    refuse_placeholders(output)
    return untrace(output)


def refuse_backward_hooks(error: Exception) -> None:
    """Raise in other words where `error` is torch's about a hook on a block that this stage has no values for."""
    if "setting up backward hooks" in str(error):
        raise UnsupportedError(
            "A block has a hook for its backward (register_full_backward_hook), which stages that do not own it cannot"
            f" set up. Hook the tensor that goes in, in training_step (x.register_hook), or use {NO_PIPELINE}."
        ) from error


def _absent(title: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{title}: the step reads a weight or buffer of a block that another stage owns, which it did not before"
        f" training ({why}): does a penalty, or a log of weights, begin after some batches? Compute it in"
        " every step, multiplied by 0 until then, so that this stage has it too; for a penalty use the optimizer's"
        f" weight_decay; or use {NO_PIPELINE}."
    )
