"""`Pipeline`: the user's own steps, run over the stages of one pipeline; the cut of a module, and its proof."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.errors import NO_PIPELINE, ConfigurationError, DivergenceError, Lightning3DError, PipelineSplitError
from lightning_3d.layout import Layout, stage_ranks
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.cut_module import CutModule, StepCallbacks, StepContext
from lightning_3d.pipeline.evaluation import Evaluations, EvaluationStep
from lightning_3d.pipeline.exchange import StageExchange, Ties
from lightning_3d.pipeline.first_pass import EvalDirector
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.prove import follow_second, trace_of
from lightning_3d.pipeline.rehearsal import StepTrace
from lightning_3d.pipeline.split import PipelineSplit, apply_split, restore
from lightning_3d.pipeline.stage import refuse_backward_hooks
from lightning_3d.pipeline.training_step import TrainingStep
from lightning_3d.ranks import agreement, random_streams
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.trees import detached, loss_of


@dataclass(eq=False, repr=False)
class Pipeline(CutModule):
    """Runs steps of a cut module, once it is opened."""

    evaluations: Evaluations = field(default_factory=Evaluations)

    def open(self, hooks: StepCallbacks, undo: UndoStack) -> None:
        super().open(hooks, undo)
        self.grad_holder = hooks.grad_holder or self.module.get_parameter
        self.ties = Ties(self.split, self.wire, self.stage_rank, self.grad_holder)

    def training_step(self, *args: Any, last: bool = True, scale: float | Tensor = 1.0) -> Any:
        """Run forward and backward of a full batch, which adds to the gradients; returns its output, on every rank.

        With the `last` batch of a window gradients of ties are summed and `hooks.reduce` is called. `scale` multiplies
        the loss before backward. That of the output needs gradients, as Lightning wants.
        """
        self.find_trained()
        self.recorder.find_metrics()
        self.hooks.begin()
        if self.by_step:
            self.traces.clear()
        step = StepContext(self, "training_step", args, random_streams.draw(), real=True)
        record, sizes = Record(), [1]
        with random_streams.restored_streams():
            if self.split.has_one_stage:
                output = self._solo(step, scale)
            else:
                running = TrainingStep(step, scale)
                output, record = running.run()
                sizes = running.sizes
                if last:
                    self._forget_unreached(running.traces)
        if last:
            self.ties.sum_gradients()
            self.hooks.reduce()
        self.recorder.replay(record, sizes)
        # Lightning backpropagates what a step returns, so the loss must need a gradient.
        loss = loss_of(output)
        if loss is not None:
            loss.requires_grad_()
        return output

    def eval_step(self, name: str, *args: Any) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on a batch of any size, on every rank.

        The user's own code runs on every rank with the real values of the full batch: its results, logs and attributes
        are the same everywhere. The stages compute the blocks before, on microbatches where that changes nothing.
        """
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it reads the parameters of absent blocks
        step = StepContext(self, name, args, random_streams.draw())
        try:
            with random_streams.restored_streams(), self.hooks.evaluating():
                return EvaluationStep(step, self.evaluations).run()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def _solo(self, step: StepContext, scale: float | Tensor) -> Any:
        """One stage owns all blocks: it runs the step on the full batch, and the others get its results."""
        with self.gates.directed(EvalDirector(step)), self.recorder.outside():
            output = step.call()
        loss = loss_of(output)
        if loss is not None and (self.owns_last or not loss.requires_grad):  # torch's own error, on every rank
            torch.autograd.backward(loss * scale)  # not the method: Lightning calls that once per step, and is counted
        return self.wire.share(detached(output), self.stage_rank[-1], "results")

    def prove(self, uncut: UncutRun) -> None:
        """Compare values and gradients with those of the module before it was cut.

        Where they differ and the user has hooks inside of blocks, what those take travels too, if that is right.
        """
        step = StepContext(self, uncut.step, uncut.args, uncut.seed)
        error = agreement.error_of(lambda: trace_of(step, uncut), PipelineSplitError)
        if error is not None and uncut.hooked:
            self.takes = self.gates.takes = True
            error = error if agreement.error_of(lambda: trace_of(step, uncut), PipelineSplitError) else None
        if error is not None:
            raise error
        if uncut.alike:
            follow_second(step, uncut.alike)
        self.rows = uncut.rows if uncut.batch else None  # the trainer has no loader yet
        if self.loss_scope == "batch" and uncut.batch:
            TrainingStep(replace(step, args=uncut.batch), 1.0).cut()  # a loss that has no head is refused before a step

    def forget(self) -> None:
        """Rehearse all shapes again: blocks now compute in another way."""
        self.traces, self.proven, self.in_one_piece, self.evaluations = {}, {}, set(), Evaluations()

    def _forget_unreached(self, traces: Sequence[StepTrace]) -> None:
        """Remove gradients of zeros of parameters that the loss does not depend on; on one device they have none.

        A gradient that is not zero stays: the loss may depend on more in some steps than in the rehearsal.
        """
        for name in frozenset.intersection(*(trace.unreached for trace in traces)):
            tensor = self.grad_holder(name)
            if tensor.grad is not None and not local(tensor.grad).any():
                tensor.grad = None


def apply_stages(
    module: nn.Module,
    split: PipelineSplit,
    layout: Layout,
    group: dist.ProcessGroup,
    device: torch.device,
    undo: UndoStack,
    before: Mapping[str, nn.Parameter],
) -> StageExchange:
    """Keep the stages of this rank. Parameters of other stages are replaced by meta tensors."""
    ranks = stage_ranks(layout.schedule, group.size(), split.num_stages // group.size())
    mine = split.stages_on(group.rank(), group.size(), layout.schedule)
    undo.collective(restore, module, apply_split(module, split, mine), group, ranks, before)
    return StageExchange(split, group, ranks, device)


def prove_stages(pipeline: Pipeline, uncut_run: UncutRun, hooks: StepCallbacks) -> None:
    """Compare one microbatch with what the uncut module computed. Collective; raises on every rank."""
    with UndoStack() as undo:
        pipeline.open(hooks, undo)
        agreement.together(lambda: _prove(pipeline, uncut_run))


def _prove(pipeline: Pipeline, uncut_run: UncutRun) -> None:
    try:
        pipeline.prove(uncut_run)
    except (ConfigurationError, DivergenceError):
        raise
    except Exception as error:
        agreement.raise_if_alone(error)
        known = isinstance(error, Lightning3DError) and error.rank is not None
        name = error if known else f"{type(error).__name__}: {error}"
        if any(text in str(error) for text in ("differentiated Tensor", "does not require grad")):  # autograd.grad's
            raise PipelineSplitError(
                f"{uncut_run.step} takes derivatives by itself (torch.autograd.grad: forces, a gradient penalty, a"
                " physics loss, an adversarial input). They go through blocks of other stages, and no rank of a"
                f" pipeline has the whole graph ({name}). Use {NO_PIPELINE}: data"
                " parallelism with any zero_stage and tensor parallelism train it."
            ) from error
        refuse_backward_hooks(error)
        raise PipelineSplitError(
            f"Cut into stages, the step fails, but uncut it does not ({name}). Does its code"
            " read from a block of another stage what only the rank of that stage has (a tensor kept on a module)?"
            " Let the block return it, or pass it from block to block. Code around blocks runs on every rank: an option"
            " that turns such a reading off helps. A block that reads from another may stand on its stage, by"
            " pipeline_split. Objects other than dataclasses, containers and tensors arrive on another stage as None."
            f" Otherwise use {NO_PIPELINE}."
        ) from error
