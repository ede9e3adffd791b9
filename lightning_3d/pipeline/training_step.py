"""One pipelined training step: microbatches, the schedule, what the last stage returns and logs.

Where the head begins that runs once on the whole batch, with `loss_scope="batch"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.errors import PipelineSplitError
from lightning_3d.pipeline.executor import Execution
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch
from lightning_3d.pipeline.play import play
from lightning_3d.pipeline.rehearsal import Carried, Trace
from lightning_3d.pipeline.schedule import actions
from lightning_3d.pipeline.traced_tensor import refuse_placeholders
from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.record import Record, combine
from lightning_3d.sandbox.snapshot import Changes, isolated, plain_attributes, put_buffers, put_changes, sendable
from lightning_3d.sandbox.trees import detached, join_outputs, loss_of

if TYPE_CHECKING:
    from lightning_3d.pipeline.pipeline import Pipeline


@dataclass
class TrainingStep:
    """A batch on its way through the stages of this rank."""

    name = "training_step"
    pipeline: "Pipeline"
    args: tuple[Any, ...]
    seed: int
    scale: float
    sizes: list[int] = field(default_factory=list)
    microbatches: list[tuple[Any, ...]] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    whole: Trace | None = None
    """With the loss on the whole batch: the trace of the step on it."""
    head: int = 0
    """Which of its heads runs, and along which dimension each tensor joins that it goes on with."""
    dims: list[int | None] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    changes: list[Changes] = field(default_factory=list)
    """Of the module's attributes, by each run of the last stage."""

    def run(self) -> tuple[Any, Record]:
        """What the whole batch's step would have returned and logged, on every rank."""
        self._cut_batch()
        pipeline = self.pipeline
        execution = Execution(
            pipeline.wire, pipeline.stage_rank, self.traces, self._forward, pipeline.stage_parameters,
            self._head if self.whole else None, pipeline.unsplit,
        )  # fmt: skip
        schedule = "fill_and_drain" if self.whole else pipeline.schedule
        placement = (pipeline.schedule, pipeline.wire.size, pipeline.per_rank)
        execution.run(actions(schedule, *placement, len(self.sizes))[pipeline.wire.rank])
        return self._results()

    def _cut_batch(self) -> None:
        batch, rest = (self.args[0], self.args[1:]) if self.args else (None, ())
        self.sizes = microbatch_sizes(batch, self.pipeline.num_microbatches, self.pipeline.wire.size)
        self.microbatches = [(piece, *rest) for piece in split_batch(batch, self.sizes)] if self.args else [()]
        self.traces = [
            self.pipeline.trace(self.name, args, self._mark(index)) for index, args in enumerate(self.microbatches)
        ]
        if self.pipeline.loss_scope == "batch" and len(self.sizes) > 1:
            self.whole = self.pipeline.trace(self.name, self.args, self.seed)
            self.head, self.dims = choose_head(self.whole, self.traces)
            self.traces = [trace.with_head(self.head) for trace in self.traces]

    def _mark(self, index: int) -> int:
        """The random seed of a microbatch."""
        return self.seed ^ (index * 0x9E3779B1)

    def _forward(self, stage: int, index: int, received: list[Tensor]) -> list[Tensor]:
        trace = self.traces[index]
        record = Record()
        with isolated(self.pipeline.module) as changes:
            result = play(
                self.pipeline, trace, trace.parts[stage], f"stage {stage}, microbatch {index}", self.name,
                self.microbatches[index], self._mark(index), received, record, real=True,
            )  # fmt: skip
        if trace.parts[stage].stop < len(trace.calls):
            return result
        return self._finish(result, record, changes, self.sizes[index] / sum(self.sizes))

    def _finish(self, output: Any, record: Record, changes: Changes, weight: float) -> list[Tensor]:
        """Keep what a step returned; what backward starts from."""
        refuse_placeholders(list(changes.values()))
        self.outputs.append(detached(output))
        self.changes.append(changes)
        self.records.append(record)
        loss = loss_of(output)
        return [] if loss is None else [loss * (self.scale * weight)]

    def _head(self, activations: list[list[Tensor]]) -> list[list[Tensor | None]]:
        """Head and loss on the whole batch: the gradients of each microbatch's activations."""
        assert self.whole is not None
        part, dims, record = self.whole.heads[self.head], self.dims, Record()
        columns = list(zip(*activations, strict=True))
        joined = [torch.cat([item.detach() for item in column], dim) if dim is not None else column[0].detach()
                  for column, dim in zip(columns, dims, strict=True)]  # fmt: skip
        for tensor, carried in zip(joined, part.before, strict=True):
            tensor.requires_grad_(carried.spec.requires_grad)
        with isolated(self.pipeline.module) as changes:
            output = play(
                self.pipeline, self.whole, part, "head", self.name, self.args, self.seed, joined, record, real=True
            )
        for loss in self._finish(output, record, changes, 1.0):
            torch.autograd.backward(loss)
        self.sizes = [sum(self.sizes)]
        return self._chunks(columns, dims, joined)

    def _chunks(self, columns: list[Any], dims: list[int | None], joined: list[Tensor]) -> list[list[Tensor | None]]:
        grads: list[list[Tensor | None]] = [[] for _ in self.traces]
        for column, dim, tensor in zip(columns, dims, joined, strict=True):
            grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            pieces = grad.split([item.shape[dim] for item in column], dim) if dim is not None else None
            for index in range(len(grads)):
                first_only = grad if index == 0 else None
                grads[index].append(pieces[index] if pieces else first_only)
        return grads

    def _results(self) -> tuple[Any, Record]:
        mine, last = None, self.pipeline.holds_last
        if last:
            record = combine(self.records, self.sizes)
            changes = sendable(join_changes(self.changes, self.sizes, plain_attributes(self.pipeline.module)))
            mine = (join_outputs(self.outputs, self.sizes), record.calls, self._buffers(), changes)
        output, calls, buffers, changes = self.pipeline.wire.share(mine, self.pipeline.stage_rank[-1], "results")
        if not last:
            put_buffers(self.pipeline.module, buffers)
        put_changes(self.pipeline.module, changes)
        return output, Record(calls)

    def _buffers(self) -> dict[str, Tensor]:
        """What the step made of the buffers that it changes."""
        names = dict.fromkeys(name for trace in self.traces for name in trace.changed)
        return {name: self.pipeline.module.get_buffer(name) for name in names}


_CONSTANT, _MIXED = -1, -2


def choose_head(whole: Trace, traces: Sequence[Trace]) -> tuple[int, list[int | None]]:
    """The last call of the last stage from which on the step can go on with the whole batch.

    What it goes on with must either be rows that join, or be the same whatever the batch. A first term of the loss,
    say, is neither: then the call before it is where the head begins.

    Returns:
        Index into `Trace.heads`, and the dimension along which each tensor joins, None where all have the same.
    """
    for index, head in enumerate(whole.heads):
        parts = [trace.heads[index].before for trace in traces]
        if any(len(part) != len(head.before) for part in parts):
            continue
        dims = [_joined_dim(carried, [part[at] for part in parts]) for at, carried in enumerate(head.before)]
        if _MIXED not in dims:
            return index, [None if dim == _CONSTANT else dim for dim in dims]
    raise PipelineSplitError(
        "loss_scope='batch': the last stage begins with values that each microbatch has computed from its own rows"
        " (a mean, say), so that they do not join to what the whole batch would give. Name a cut before them with"
        " pipeline_split, or use loss_scope='microbatch'."
    )


def _joined_dim(whole: Carried, parts: Sequence[Carried]) -> int:
    shapes, shape = [part.spec.shape for part in parts], whole.spec.shape
    if all(part == shape for part in shapes):
        return _CONSTANT if all(part.mark == whole.mark for part in parts) else _MIXED
    if any(len(part) != len(shape) for part in shapes):
        return _MIXED
    return next((dim for dim in range(len(shape)) if sum(part[dim] for part in shapes) == shape[dim]), _MIXED)
