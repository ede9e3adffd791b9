"""The steps of a placed module: unchanged, or as stages of a pipeline, with checks around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor

from lightning_3d.module.undo import UndoStack
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.pipeline.context import StepCallbacks
from lightning_3d.precision import Precision3D
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.strategy.step_checks import Args, StepCheck
from lightning_3d.strategy.window import EarlyGradients, Window

Call = Callable[..., Any]


class StepRunner(Protocol):
    """Runs the user's steps."""

    def train(self, call: Call, args: Args) -> Any:
        """Run a training step: `call(*args)` would call the user's own."""

    def evaluate(self, name: str, call: Call, args: Args) -> Any:
        """Run a validation, test or predict step."""

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...


class PlainRunner:
    """The user's step on the user's batch."""

    def __init__(self, parallel: ParallelModule, random: StepRandom, window: Window) -> None:
        self.data, self.random, self.window = parallel.data, random, window

    def train(self, call: Call, args: Args) -> Any:
        self.window.begin()
        self.data.gather()
        with self.random.step(), self.data.forbid_writes():
            return call(*args)

    def evaluate(self, name: str, call: Call, args: Args) -> Any:
        self.data.gather()
        with self.random.step():
            output = call(*args)
        self.data.finish_forward()
        return output

    def before_backward(self, loss: Tensor) -> None:
        self.data.before_backward(loss)

    def after_backward(self) -> None:
        self.data.after_backward()


class PipelineRunner:
    """The user's step on every microbatch, on every stage, in the order of a schedule.

    `train` runs forward and backward of the full batch. Lightning then zeroes the gradients and calls backward on the
    loss; that call gives the parameters their gradients.
    """

    def __init__(
        self, parallel: ParallelModule, random: StepRandom, window: Window, plugin: Precision3D, undo: UndoStack
    ) -> None:
        assert parallel.pipeline is not None
        self.parallel, self.data, self.random = parallel, parallel.data, random
        self.window, self.plugin = window, plugin
        self.early = EarlyGradients(parallel.module, window.zeroed)
        self.pipeline = parallel.pipeline
        hooks = StepCallbacks(
            begin=self._begin,
            reduce=self.data.reduce,
            grad_holder=self._grad_holder,
            peers=() if parallel.tensor is None else (parallel.tensor.mesh.get_group(),),
            evaluating=self._evaluating,
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
            return self.pipeline.eval_step(name, *args)

    def before_backward(self, loss: Tensor) -> None:
        self.early.give(self.window.first, self.window.last)

    def after_backward(self) -> None: ...

    def _begin(self) -> None:
        self.data.accumulate_only(True)
        self.data.gather()

    def _grad_holder(self, name: str) -> Tensor:
        located = self.data.grad_holder(name)
        return located if located is not None else self.parallel.module.get_parameter(name)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.data.gather()
        yield
        self.data.finish_forward()


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


def make_runner(
    parallel: ParallelModule, random: StepRandom, window: Window, plugin: Precision3D, undo: UndoStack
) -> StepRunner:
    """The runner for `parallel`. `undo` ends the run."""
    if parallel.pipeline is None:
        return PlainRunner(parallel, random, window)
    return PipelineRunner(parallel, random, window, plugin, undo)
