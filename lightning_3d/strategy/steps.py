"""The steps of a placed module: unchanged, or as stages of a pipeline, with checks around them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.module.undo import UndoStack
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.pipeline.cut_module import StepCallbacks
from lightning_3d.precision import Precision3D
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.usercode.hooks import check_logs
from lightning_3d.verify.first_step import FirstStep
from lightning_3d.zero import DataParallel

# `Window`: the batches whose gradients one optimizer step adds up. `EarlyGradients`: those of a pipelined step.
#
# On one device Lightning runs a step, zeroes the gradients of the window before, and runs backward. Data ranks reduce
# gradients after the last batch only; until then each adds up its own, on the tensors that its backward gives them to.


@dataclass
class Window:
    """The accumulation window of the present batch."""

    trainer: Trainer
    module: LightningModule
    data: DataParallel
    last: bool = True
    """True on the last batch: gradients are reduced over the data ranks after it."""

    @property
    def first(self) -> bool:
        """True on the first batch, by Lightning's rule for zeroing gradients: an epoch may end within a window."""
        automatic: bool = self.module.automatic_optimization  # type: ignore[assignment]
        return automatic and self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0

    def scale(self, plugin: Precision3D) -> float | Tensor:
        """The factor on the loss of a batch before backward: its share of the window, times the loss scale."""
        return plugin.loss_factor() / self.trainer.accumulate_grad_batches

    def begin(self) -> None:
        """Begin a batch. The first discards gradients that no optimizer step followed and zeroing does not reach."""
        if self.first:
            self.data.discard_pending()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Batches inside only add gradients: none is the last of its window."""
        if not self.module.automatic_optimization:  # it may step before the next backward
            rank_zero_warn(
                "sync_grad=False has no effect (toggle_model): ranks average gradients in each backward, so that an"
                " optimizer can step behind any of them. Numbers are those of one device."
            )
            yield
            return
        self.last = False
        self.data.accumulate_only(True)
        try:
            yield
        finally:
            self.last = True
            self.data.accumulate_only(False)

    def zeroed(self) -> set[nn.Parameter]:
        """The parameters whose gradients Lightning zeroes unseen: those of optimizers, unless a hook comes before."""
        owners = self.module, *self.trainer.callbacks  # type: ignore[attr-defined]
        read = any(is_overridden("on_before_zero_grad", owner) for owner in owners)
        if read or is_overridden("optimizer_zero_grad", self.module):
            return set()
        return {p for optimizer in self.trainer.optimizers for group in optimizer.param_groups for p in group["params"]}


class EarlyGradients:
    """Gradients of a step that runs its own backward, before Lightning zeroes those of the window before.

    Old gradients of the parameters that are `zeroed` after the step are freed before it, to make room.
    """

    def __init__(self, module: nn.Module, zeroed: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.module, self.zeroed = module, zeroed
        self.new: dict[nn.Parameter, Tensor] = {}
        self.older: dict[nn.Parameter, Tensor] = {}
        """Gradients of earlier windows that may have to stay."""

    @contextmanager
    def computing(self, first: bool) -> Iterator[None]:
        """The context of a step. In the first of a window, old gradients are there again after it."""
        if first:
            zeroed = set(self.zeroed())
            self.older = {p: grad for p, grad in self._take_gradients().items() if p not in zeroed}
        yield
        if first:
            self.new = self._take_gradients()
            for parameter, grad in self.older.items():
                parameter.grad = grad

    def give(self, first: bool, last: bool) -> None:
        """Give the parameters their gradients, after the zeroing.

        Older ones that were not zeroed are added with the last batch of the window. Those of ties are summed already,
        and the new ones are not before.
        """
        if first:
            self.older = {parameter: parameter.grad for parameter in self.older if parameter.grad is not None}
            for parameter in self.older:
                parameter.grad = None
        _add(self.new)
        self.new = {}
        if last:
            _add(self.older)
            self.older = {}

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        taken = {parameter: parameter.grad for parameter in self.module.parameters() if parameter.grad is not None}
        for parameter in taken:
            parameter.grad = None
        return taken


def _add(gradients: dict[nn.Parameter, Tensor]) -> None:
    for parameter, grad in gradients.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class FirstStepAgrees(StepCheck):
    """Compare the gradients of the first optimizer step with those of the unsplit module."""

    def __init__(
        self,
        first: FirstStep,
        parallel: ParallelModule,
        data_group: dist.ProcessGroup,
        random: StepRandom,
        window: Window,
        plugin: Precision3D,
    ) -> None:
        self.first: FirstStep | None = first
        self.parallel, self.data_group, self.random = parallel, data_group, random
        self.window, self.plugin = window, plugin
        self.after_train(None)

    def before_train(self, args: Args) -> None:
        if self.first is not None:
            with self.random.step():
                self.first.add(self.parallel.module, args, self.window.scale(self.plugin))

    def after_train(self, output: Any) -> None:
        if self.first is not None:
            self.first.twin.look(self.parallel.module)

    def after_backward(self) -> None:
        if self.first is not None and self.window.last:
            first, self.first = self.first, None
            if first.compare(self.parallel, self.data_group, self.plugin.loss_scale()):
                self.first = first  # the scaler skips this step

    def close(self) -> None:
        if self.first is not None:
            self.first.close()


Call = Callable[..., Any]


class StepRunner:
    """Runs the user's step on the user's batch."""

    def __init__(self, parallel: ParallelModule, random: StepRandom, window: Window) -> None:
        self.data, self.random, self.window = parallel.data, random, window

    def train(self, call: Call, args: Args) -> Any:
        """Run a training step: `call(*args)` calls the user's own."""
        self.data.gather()
        with self.random.step(), self.data.forbid_writes():
            return call(*args)

    def evaluate(self, name: str, call: Call, args: Args) -> Any:
        with self._gathered(), self.random.step(), self.data.evaluating():
            return call(*args)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self.data.gather()
        yield
        self.data.finish_forward()

    def before_backward(self, loss: Tensor) -> None:
        self.window.begin()  # now: the step may have called a backward of its own, which Lightning zeroes
        self.data.before_backward(loss)

    def after_backward(self) -> None:
        self.data.after_backward()


class PipelineRunner(StepRunner):
    """The user's step on every microbatch, on every stage, in the order of a schedule.

    `train` runs forward and backward of the full batch. Lightning then zeroes the gradients and calls backward on the
    loss; that call gives the parameters their gradients.
    """

    def __init__(
        self, parallel: ParallelModule, random: StepRandom, window: Window, plugin: Precision3D, undo: UndoStack
    ) -> None:
        assert parallel.pipeline is not None
        super().__init__(parallel, random, window)
        self.parallel, self.plugin = parallel, plugin
        self.early = EarlyGradients(parallel.module, window.zeroed)
        self.pipeline = parallel.pipeline
        hooks = StepCallbacks(
            begin=self._begin,
            reduce=self.data.reduce,
            grad_holder=self._grad_holder,
            peers=() if parallel.tensor is None else (parallel.tensor.mesh.get_group(),),
            evaluating=self._gathered,
            rehearsing=self.data.gradients_stay,
            context=plugin.forward_context,
        )
        self.pipeline.open(hooks, undo)

    def train(self, call: Call, args: Args) -> Any:
        if self.window.first:
            self.data.reshard()  # after an evaluation weights are gathered, and the gradients to drop are on the shards
        self.window.begin()
        with self.random.step(), self.early.computing(self.window.first):
            return self.pipeline.training_step(*args, last=self.window.last, scale=self.window.scale(self.plugin))

    def evaluate(self, name: str, call: Call, args: Args) -> Any:
        with self.random.step():
            output = self.pipeline.eval_step(name, *args)
        check_logs(name, self.parallel.module)  # of a copy of a weight that a hook has kept
        return output

    def before_backward(self, loss: Tensor) -> None:
        self.early.give(self.window.first, self.window.last)

    def after_backward(self) -> None: ...

    def _begin(self) -> None:
        self.data.accumulate_only(True)
        self.data.gather()

    def _grad_holder(self, name: str) -> Tensor:
        located = self.data.grad_holder(name)
        return located if located is not None else self.parallel.module.get_parameter(name)


class CheckedSteps:
    """The steps of a run: a runner with checks around it, called by the strategy's hooks."""

    def __init__(self, runner: StepRunner, checks: Sequence[StepCheck], window: Window, random: StepRandom) -> None:
        self.runner, self.checks, self.window, self.random = runner, checks, window, random
        self.evaluations = 0
        """Runs of validation, test and predict so far."""

    def train(self, call: Call, args: Args) -> Any:
        for check in self.checks:
            check.before_train(args)
        with ExitStack() as stack:
            for check in self.checks:
                stack.enter_context(check.around_train())
            output = self.runner.train(call, args)
        for check in self.checks:
            check.after_train(output)
        return output

    def evaluate(self, name: str, call: Call, args: Args) -> Any:
        for check in self.checks:
            args = check.before_evaluate(name, args, self.evaluations)
        return self.runner.evaluate(name, call, args)

    def before_backward(self, loss: Tensor) -> None:
        self.runner.before_backward(loss)

    def after_backward(self) -> None:
        self.runner.after_backward()
        for check in self.checks:
            check.after_backward()

    def close(self) -> None:
        for check in self.checks:
            check.close()
