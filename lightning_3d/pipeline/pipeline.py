"""`Pipeline`: the user's own steps, run over the stages of one pipeline."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.axes.ledger import Ledger
from lightning_3d.layout import stage_ranks
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.context import StepCallbacks
from lightning_3d.pipeline.evaluation import Evaluations, EvaluationStep
from lightning_3d.pipeline.first_pass import EvalDirector
from lightning_3d.pipeline.gates import Gates
from lightning_3d.pipeline.loss_mean import Mixing
from lightning_3d.pipeline.microbatch import Rows, signature
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.pass_clock import PassClock
from lightning_3d.pipeline.prove import rehearse
from lightning_3d.pipeline.rehearsal import StepTrace
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.ties import Ties
from lightning_3d.pipeline.training_step import TrainingStep
from lightning_3d.pipeline.unsupported import check_supported
from lightning_3d.pipeline.wire import Wire
from lightning_3d.ranks import random_streams
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.first_batch import loader_batch_size
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.trees import detached, loss_of, unshared

_TRACES_KEPT = 256


class Pipeline:
    """Runs steps of a module that `apply_split` has cut, once it is opened."""

    def __init__(
        self,
        module: Any,
        split: PipelineSplit,
        group: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | Literal["auto"] = "auto",
        loss_scope: Literal["microbatch", "batch"] = "microbatch",
        mixing: Mixing | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """
        Args:
            module: the LightningModule, after `apply_split`.
            split: the plan it was cut by.
            group: the ranks of this pipeline, in order.
            device: where activations live.
            schedule: order of forwards and backwards.
            num_microbatches: pieces of a batch; fewer where a batch has fewer rows.
            loss_scope: "batch" computes head and loss once on the full batch, for losses that are no mean over
                samples. All forwards run before all backwards then, whatever `schedule` says.
            mixing: the first call of a block that a microbatch gives other values for. With "batch" the head must have
                it.
            ledger: counts the bytes that this rank sends along the pipeline.
        """
        check_supported(module)
        self.module, self.split, self.schedule = module, split, schedule
        self.num_microbatches, self.loss_scope, self.mixing = num_microbatches, loss_scope, mixing
        self.wire = Wire(group, device or torch.device("cpu"), ledger)
        self.per_rank = stages_per_rank(schedule, split.num_stages // group.size())
        self.stage_rank = stage_ranks(schedule, group.size(), self.per_rank)
        self.my_stages = split.stages_on(group.rank(), group.size(), schedule)
        self.rows: Rows | None = None
        self.traces: dict[Any, StepTrace] = {}
        self.trained = self._trained()
        """For each parameter, True where it gets a gradient: callbacks freeze and unfreeze them between steps."""
        self.in_one_piece: set[int] = set()
        """Stages whose backward must not run in two halves."""
        self.proven: dict[Any, frozenset[str]] = {}
        """By pattern of a proven trace: the parameters that the loss does not depend on."""
        self.evaluations = Evaluations()
        self.clock: PassClock | None = None
        """Times the passes of training steps, where somebody asks for them."""
        self.checked_heads: set[Any] = set()
        """Patterns of traces whose head is known to use no random numbers that are drawn before it."""

    def open(self, hooks: StepCallbacks, undo: UndoStack) -> None:
        """Put the gates on the module until `undo` closes. Tensor layers and FSDP put their hooks on it before.

        Args:
            hooks: of the ZeRO and precision layers.
            undo: takes the way back.
        """
        self.hooks, units = hooks, list(self.split.holders)
        absent = [unit for unit in units if not set(self.split.holders[unit]) & set(self.my_stages)]
        self.gates = Gates(self.module, units, absent, undo)
        self.recorder = LogRecorder(self.module, self.gates.inside_block)
        self.grad_holder = hooks.grad_holder or self.module.get_parameter
        self.ties = Ties(self.split, self.wire, self.stage_rank, self.grad_holder)

    @property
    def owns_last(self) -> bool:
        return self.stage_rank[-1] == self.wire.rank

    @property
    def acts_as_rank_zero(self) -> bool:
        """True on the rank that does what a step does on rank 0 only: the last stage of the pipeline of rank 0."""
        return self.owns_last and dist.get_global_rank(self.wire.group, 0) == 0

    def training_step(self, *args: Any, last: bool = True, scale: float | Tensor = 1.0) -> Any:
        """Run forward and backward of a full batch, which adds to the gradients.

        Args:
            args: of the step: the batch, its index ...
            last: True for the last batch of a window: gradients of ties are summed and `hooks.reduce` is called.
            scale: multiplies the loss before backward: 1 / accumulate_grad_batches, times a loss scale.

        Returns:
            The output of the step for the full batch, on every rank. Its loss needs gradients, as Lightning wants.
        """
        self.trained = self._trained()
        self.recorder.find_metrics()
        self.hooks.begin()
        seed = random_streams.draw()
        record, sizes = Record(), [1]
        with random_streams.restored_streams():
            if self.split.solo:
                output = self._solo(args, seed, scale)
            else:
                running = TrainingStep(self, args, seed, scale)
                output, record = running.run()
                sizes = running.sizes
                if last:
                    self._forget_unreached(running.traces)
        if last:
            self.ties.sum_gradients()
            self.hooks.reduce()
        self.recorder.replay(record, sizes)
        return _with_loss(output)

    def eval_step(self, name: str, *args: Any) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on a batch of any size, on every rank.

        The user's own code runs on every rank with the real values of the full batch: its results, logs and attributes
        are the same everywhere. The stages compute the blocks before, on microbatches where that changes nothing.
        """
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it reads the parameters of absent blocks
        seed = random_streams.draw()
        try:
            with random_streams.restored_streams(), self.hooks.evaluating():
                return EvaluationStep(self, name, args, seed).run()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def call(self, name: str, args: Sequence[Any], seed: int) -> Any:
        """The module's own method, with random streams at the start of a microbatch."""
        random_streams.restart_python(seed)
        random_streams.restart(seed, -1)
        if name == "training_step":  # it runs again on the same batch, here or for the rehearsal
            args = unshared(args)
        with self.hooks.context():
            return getattr(self.module, name)(*args)

    def _solo(self, args: tuple[Any, ...], seed: int, scale: float | Tensor) -> Any:
        """One stage owns all blocks: it runs the step on the full batch, and the others get its results."""
        with self.gates.directed(EvalDirector(self.split, self.wire, self.stage_rank, seed)), self.recorder.outside():
            output = self.call("training_step", args, seed)
        loss = loss_of(output)
        if loss is not None and (self.owns_last or not loss.requires_grad):  # torch's own error, on every rank
            torch.autograd.backward(loss * scale)  # not the method: Lightning calls that once per step, and is counted
        return self.wire.share(detached(output), self.stage_rank[-1], "results")

    def trace(self, step: str, args: tuple[Any, ...], seed: int) -> StepTrace:
        """The trace of `step` on microbatches of this shape, rehearsed on first use."""
        key = self._key(step, args)
        if key not in self.traces:
            while len(self.traces) >= _TRACES_KEPT:
                del self.traces[next(iter(self.traces))]
            self.traces[key] = rehearse(self, step, args, seed)
        return self.traces[key]

    def prove(self, uncut: UncutRun) -> None:
        """Compare values and gradients with those of the module before it was cut."""
        self.traces[self._key(uncut.step, uncut.args)] = rehearse(self, uncut.step, uncut.args, uncut.seed, uncut)

    def forget(self) -> None:
        """Rehearse all shapes again: blocks now compute in another way."""
        self.traces, self.proven, self.in_one_piece, self.evaluations = {}, {}, set(), Evaluations()

    def rows_of(self, batch: Any) -> Rows:
        """The places of the samples in a batch, decided on the first batch, which is full."""
        if self.rows is None:
            trainer = getattr(self.module, "_trainer", None)
            expected = None if trainer is None else loader_batch_size(trainer)
            self.rows = Rows.of(batch, expected, self.module)
        return self.rows

    def _key(self, step: str, args: tuple[Any, ...]) -> Any:
        return step, self.module.training, self.trained, signature(args[0] if args else None)

    def _trained(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self.module.parameters())

    def stage_parameters(self, stage: int) -> list[Tensor]:
        """The tensors that get gradients on a stage."""
        found: dict[int, Tensor] = {}
        for unit in (unit for unit, stages in self.split.holders.items() if stage in stages):
            found |= {id(item): item for item in self.module.get_submodule(unit).parameters() if item.requires_grad}
        for name in self.split.everywhere:
            parameter = self.module.get_parameter(name)
            if parameter.requires_grad:
                found[id(parameter)] = parameter
        return list(found.values())

    def _forget_unreached(self, traces: Sequence[StepTrace]) -> None:
        """Remove gradients of zeros of parameters that the loss does not depend on; on one device they have none.

        A gradient that is not zero stays: the loss may depend on more in some steps than in the rehearsal.
        """
        for name in frozenset.intersection(*(trace.unreached for trace in traces)):
            tensor = self.grad_holder(name)
            if tensor.grad is not None and not local(tensor.grad).any():
                tensor.grad = None


def _with_loss(output: Any) -> Any:
    """Lightning backpropagates what a step returns, so the loss must need a gradient."""
    loss = loss_of(output)
    if loss is not None:
        loss.requires_grad_()
    return output
