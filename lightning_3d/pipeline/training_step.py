"""One pipelined training step: its microbatches, the schedule, outputs and logs of the last stage.

With `loss_scope="batch"`, the head runs once on the full batch; `choose_head` finds the call where it begins.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PipelineSplitError, UnsupportedError
from lightning_3d.module.graph_private import LAYOUT_KINDS, factors_of, inputs_of, kind_of, labels_of
from lightning_3d.pipeline.cut_module import CutModule, StepContext
from lightning_3d.pipeline.executor import Execution
from lightning_3d.pipeline.loss_mean import Mixing
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch
from lightning_3d.pipeline.prove import trace_of
from lightning_3d.pipeline.rehearsal import Carried, StagePart, StepTrace
from lightning_3d.pipeline.schedule import actions
from lightning_3d.pipeline.stage import play
from lightning_3d.pipeline.traced_tensor import refuse_placeholders
from lightning_3d.sandbox.fingerprint import differ, fingerprint
from lightning_3d.sandbox.interceptor import Interceptor, storage
from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.record import Record, combine
from lightning_3d.sandbox.silence import OwnGenerators
from lightning_3d.sandbox.snapshot import Changes, isolated, plain_attributes, put_buffers, put_changes, sendable
from lightning_3d.sandbox.trees import detached, join_outputs, loss_of, tensors_in
from lightning_3d.sandbox.trial import trial


@dataclass
class TrainingStep:
    """A batch on its way through the stages of this rank."""

    step: StepContext
    """On the full batch."""
    scale: float | Tensor
    sizes: list[int] = field(default_factory=list)
    microbatches: list[StepContext] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    full_trace: StepTrace | None = None
    """With the loss on the full batch: the trace of the step on it."""
    head: int = 0
    """Index of the head that runs."""
    dims: list[int | None] = field(default_factory=list)
    """The dimension along which each input of the head joins, None for one that all microbatches share."""
    outputs: list[Any] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    reduced: dict[float, Counter[Any]] = field(default_factory=dict)
    """By the part of a microbatch: the operations of its loss with one value as result, each with what enters it, and
    the numbers by which code multiplies."""
    changes: list[Changes] = field(default_factory=list)
    """Changes of the module's attributes, by each run of the last stage."""

    @property
    def pipeline(self) -> CutModule:
        return self.step.pipeline

    def run(self) -> tuple[Any, Record]:
        """Run the step; return the output and the logs of the full batch, on every rank."""
        self.cut()
        pipeline = self.pipeline
        execution = Execution(pipeline, self.traces, self._forward, self._head if self.full_trace else None)
        schedule = "fill_and_drain" if self.full_trace else pipeline.schedule
        if pipeline.clock is not None:
            pipeline.clock.begin_step(schedule, len(self.sizes))
        execution.run(actions(schedule, *pipeline.placement, len(self.sizes))[pipeline.wire.rank])
        return self._results()

    def cut(self) -> None:
        """Cut the batch into microbatches, and rehearse those of new shapes."""
        batch, *rest = self.step.args or (None,)
        self.pipeline.check_shapes(self.step.key)
        rows = self.pipeline.rows_of(batch)
        self.sizes = microbatch_sizes(batch, self.pipeline.num_microbatches, self.pipeline.wire.size, rows)
        pieces = split_batch(batch, self.sizes, rows) if self.step.args else []
        self.pipeline.left_out.check(pieces, self.sizes)
        self.microbatches = [
            replace(self.step, args=(piece, *rest), seed=self.step.seed ^ (index * 0x9E3779B1))
            for index, piece in enumerate(pieces)
        ] or [self.step]
        self.traces = [trace_of(microbatch) for microbatch in self.microbatches]
        if self.pipeline.loss_scope == "batch" and len(self.sizes) > 1:
            self.full_trace = trace_of(self.step)
            self.head, self.dims = choose_head(self.full_trace, self.traces, self.pipeline.mixing)
            self.traces = [trace.with_head(self.head) for trace in self.traces]

    def _forward(self, stage: int, index: int, received: list[Tensor]) -> list[Tensor]:
        trace, record, title = self.traces[index], Record(), f"stage {stage}, microbatch {index}"
        with isolated(self.pipeline.module) as changes:
            result = play(self.microbatches[index], trace, trace.parts[stage], title, received, record)
        if trace.parts[stage].stop < len(trace.calls):
            return result
        return self._finish(result, record, changes, self.sizes[index] / sum(self.sizes))

    def _finish(self, output: Any, record: Record, changes: Changes, weight: float) -> list[Tensor]:
        """Keep the output of a step; return the loss that backward starts from."""
        refuse_placeholders(list(changes.values()))
        loss = loss_of(output)
        if loss is not None and loss.ndim and loss.numel() == 1:  # Lightning takes it: no row of an output
            loss = loss.squeeze()
            output = loss if isinstance(output, Tensor) else {**output, "loss": loss}
        self.outputs.append(detached(output))
        self.changes.append(changes)
        self.records.append(record)
        if self.pipeline.is_mean and self.pipeline.acts_as_rank_zero and loss is not None:
            self._note_form(loss, weight)
        self.pipeline.ends.clear()
        return [] if loss is None else [loss * (self.scale * weight)]

    def _note_form(self, loss: Tensor, weight: float) -> None:
        """Warn once where a loss is computed in another way than that of the first batch, known to be a mean.

        So do microbatches of equal size that reduce unequal numbers of values, or have other factors: code has left
        out rows of one, or has counted something in it.
        """
        assert loss.grad_fn is not None
        kinds, reduced, seen, waiting = set[str](), Counter[Any](), set(self.pipeline.ends), [(loss.grad_fn, 1)]
        while waiting:
            node, count = waiting.pop()
            if node not in seen:
                seen.add(node)
                before = inputs_of(node, count == 1)  # beyond the reductions it would take five times as long
                kinds.add(kind := kind_of(node))
                reduced.update(factors_of(node))
                if count == 1:
                    reduced[kind, tuple(number for _, number in before)] += 1
                    labels = labels_of(node)
                    if labels is not None and storage(labels) not in map(storage, tensors_in(self.step.args)):
                        kinds.add("labels that it computes")
                waiting += before
        first, known = self.pipeline.losses.setdefault(self.pipeline.trained, (self.traces, set()))
        if first is not self.traces and (new := sorted(kinds - known - LAYOUT_KINDS)):
            warnings.warn(_OTHER_LOSS.format(", ".join(new)), stacklevel=2)
        if self.reduced.setdefault(weight, reduced) != reduced and _UNEQUAL not in known:
            warnings.warn(_UNEQUAL, stacklevel=2)
            known.add(_UNEQUAL)
        known |= kinds

    def _head(self, activations: list[list[Tensor]]) -> list[list[Tensor | None]]:
        """Run head and loss on the full batch; return the gradients of each microbatch's activations."""
        assert self.full_trace is not None
        part, dims, record = self.full_trace.heads[self.head], self.dims, Record()
        columns = list(zip(*activations, strict=True))
        joined = join(columns, dims)
        for tensor, carried in zip(joined, part.before, strict=True):
            tensor.requires_grad_(carried.spec.requires_grad)
        if self.full_trace.drawn <= part.start and self.full_trace.pattern not in self.pipeline.checked_heads:
            self._refuse_earlier_draws(part, joined)
            self.pipeline.checked_heads.add(self.full_trace.pattern)
        with isolated(self.pipeline.module) as changes:
            output = play(self.step, self.full_trace, part, "head", joined, record)
        for loss in self._finish(output, record, changes, 1.0):
            torch.autograd.backward(loss)
        self.sizes = [sum(self.sizes)]
        self.full_trace.note_ends("head", joined)
        return self._chunks(columns, dims, joined)

    def _refuse_earlier_draws(self, part: StagePart, joined: list[Tensor]) -> None:
        """Raise where the head uses random numbers that the step draws before it.

        The microbatches have drawn their own. The head runs on the full batch and would draw others, for example
        another noise than that of the inputs. This is seen from runs of the head, with other seeds for the code
        before it. Two seeds may give a choice between two ways (mix this batch or not) the same result. A generator of
        the step's own, which it may seed alike each time, is replaced by the default one.
        """
        assert self.full_trace is not None
        outputs = []
        for number in range(6):
            again = replace(self.step, real=False, earlier=self.step.seed ^ number)
            with trial(self.pipeline.module, gradients=True, logs=False), Interceptor(OwnGenerators()):
                received = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in joined]
                output = play(again, self.full_trace, part, "head", received, Record())
                outputs.append(fingerprint(loss_of(output)))
        if any(differ(outputs[0], output) for output in outputs[1:]):
            raise UnsupportedError(
                "training_step draws random numbers before or between its blocks, and its loss depends on them (mixup,"
                " noise that is the target as well). With the loss on the full batch (loss_scope='batch') it would be"
                " given other numbers than the inputs of the microbatches. Draw them in the dataset or in"
                " on_before_batch_transfer; or use num_microbatches=1, which runs the full batch at once."
            )

    def _chunks(self, columns: list[Any], dims: list[int | None], joined: list[Tensor]) -> list[list[Tensor | None]]:
        grads: list[list[Tensor | None]] = [[] for _ in self.traces]
        for column, dim, tensor in zip(columns, dims, joined, strict=True):
            grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            if dim is None:  # all share it. Autograd begins a scalar without a gradient with 1, so the others get zeros
                pieces: Sequence[Tensor] = [grad, *(torch.zeros_like(grad) for _ in grads[1:])]
            else:
                pieces = grad.split([item.shape[dim] for item in column], dim)
            for found, piece in zip(grads, pieces, strict=True):
                found.append(piece)
        return grads

    def _results(self) -> tuple[Any, Record]:
        mine, last = None, self.pipeline.owns_last
        if last:
            record = combine(self.records, self.sizes)
            before, alike = plain_attributes(self.pipeline.module), self.pipeline.alike
            changes = sendable(join_changes(self.changes, self.sizes, before, alike))
            mine = (join_outputs(self.outputs, self.sizes), record.calls, self._buffers(), changes)
        output, calls, buffers, changes = self.pipeline.wire.share(mine, self.pipeline.stage_rank[-1], "results")
        if not last:
            put_buffers(self.pipeline.module, buffers)
        put_changes(self.pipeline.module, changes)
        return output, Record(calls)

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers that the step changes, after the step."""
        names = dict.fromkeys(name for trace in self.traces for name in trace.changed)
        return {name: self.pipeline.module.get_buffer(name) for name in names}


_OTHER_LOSS = (
    "training_step computes its loss by operations that the first batch did not show ({}). That the loss is a mean over"
    " samples was found with the first batch. Where it is none now (pairs of samples, the hardest ones, a root), a mean"
    " over microbatches trains otherwise than one device: loss_scope='batch' computes it on the full batch."
)
_UNEQUAL = (
    "training_step computes the losses of two microbatches of one step from unequal numbers of values, or with unequal"
    " factors: code counts something, or leaves out rows. If each is a mean of what is left, their mean is not that of"
    " the batch: loss_scope='batch' computes the loss on the full batch."
)
_CONSTANT, _MIXED = -1, -2


def choose_head(
    full: StepTrace, traces: Sequence[StepTrace], mixing: Mixing | None = None
) -> tuple[int, list[int | None]]:
    """Find the last call of the last stage from which on the step can run on the full batch: its index in `heads`.

    The inputs of the head must be rows that join, or be the same for every batch. A first term of the loss is neither:
    then the head begins at the call before it. The head also has the call `mixing`. Each input comes with the
    dimension along which it joins, None where all have the same.
    """
    if mixing is not None and mixing.call < full.heads[-1].start:
        raise UnsupportedError(mixing.text.format(unit=full.calls[mixing.call].unit))
    for index, head in enumerate(full.heads):
        if mixing is None or head.start <= mixing.call:
            dims = joined_dims(head.before, [trace.heads[index].before for trace in traces])
            if dims is not None:
                return index, dims
    earliest = zip(full.heads[-1].before, *(trace.heads[-1].before for trace in traces), strict=False)
    at, _ = next((each.node for each, *parts in earliest if _joined_dim(each, parts) == _MIXED), (0, 0))
    instead = f"Begin the last stage with that block, pipeline_split=[..., {full.calls[at - 1].unit!r}], or use"
    raise PipelineSplitError(
        "The loss cannot be computed on the full batch (loss_scope='batch', or what 'auto' chose): the last stage"
        " begins with a value that each microbatch computes from its own rows (a mean, the first rows), so that it does"
        f" not join to the value of the full batch{f': it is {full.origin((at, 0))}. {instead}' if at else '. Use'}"
        " num_microbatches=1, which runs the full batch at once. Cut sequences to the longest one in the collate_fn or"
        " in on_after_batch_transfer."
    )


def joined_dims(full: Sequence[Carried], parts: Sequence[Sequence[Carried]]) -> list[int | None] | None:
    """The dimension along which each tensor of the microbatches joins, None for one that all of them share.

    None where the tensors do not join to those of the full batch.
    """
    if any(len(part) != len(full) for part in parts):
        return None
    dims = [_joined_dim(carried, [part[at] for part in parts]) for at, carried in enumerate(full)]
    return None if _MIXED in dims else [None if dim == _CONSTANT else dim for dim in dims]


def join(columns: Sequence[Sequence[Tensor]], dims: Sequence[int | None]) -> list[Tensor]:
    """The tensors of the full batch; `columns` has those of all microbatches for each."""
    pairs = zip(columns, dims, strict=True)
    return [torch.cat([item.detach() for item in column], dim) if dim is not None else column[0].detach()
            for column, dim in pairs]  # fmt: skip


def _joined_dim(full: Carried, parts: Sequence[Carried]) -> int:
    shapes, shape = [part.spec.shape for part in parts], full.spec.shape
    if all(part == shape for part in shapes):
        return _CONSTANT if all(part.mark == full.mark for part in parts) else _MIXED
    if any(len(part) != len(shape) for part in shapes):
        return _MIXED
    for dim in range(len(shape)):
        others = {(*part[:dim], *part[dim + 1 :]) for part in (shape, *shapes)}
        if len(others) == 1 and sum(part[dim] for part in shapes) == shape[dim]:
            return dim
    return _MIXED
