"""Checks around the steps of a placed module: equal samples on peers, and the checks of `verify`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import distributed as dist

from lightning_3d.activations.fit_budget import BudgetFit
from lightning_3d.data.same_samples import SampleCheck
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.pipeline.loss_mean import rounding_of
from lightning_3d.precision import Precision3D
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.strategy.window import Window
from lightning_3d.verify.first_step import FirstStep
from lightning_3d.verify.replicas import EVERY, ReplicaCheck
from lightning_3d.verify.same_loss import compare_first_loss

Args = tuple[Any, ...]


class StepCheck:
    """A check of every step. A subclass overrides the moments that it needs."""

    def before_train(self, args: Args) -> None: ...

    def around_train(self) -> AbstractContextManager[Any]:
        """The context of the step."""
        return nullcontext()

    def after_train(self, output: Any) -> None: ...

    def before_evaluate(self, name: str, args: Args, evaluation: int) -> Args:
        """The arguments for the step. `evaluation` counts runs of validation, test and predict."""
        return args

    def after_backward(self) -> None: ...

    def close(self) -> None: ...


class SamplesAgree(StepCheck):
    """Compare the batches of tensor and pipeline peers."""

    def __init__(self, samples: SampleCheck, trainer: Trainer) -> None:
        self.samples, self.trainer = samples, trainer

    def before_train(self, args: Args) -> None:
        self.samples.check("training_step", args, self.trainer.current_epoch)

    def before_evaluate(self, name: str, args: Args, evaluation: int) -> Args:
        loader = args[2:]  # after batch and batch_idx: its index, where there are several
        return self.samples.first_peers_batch(name, args, (evaluation, loader))  # type: ignore[no-any-return]


class LossesAgree(StepCheck):
    """Compare the first loss of tensor and context peers."""

    def __init__(self, layout: Layout, place: Coordinate, module: LightningModule, plugin: Precision3D) -> None:
        self.place, self.module, self.plugin = place, module, plugin
        several = layout.tensor_parallel_size > 1 or layout.context_parallel_size > 1
        self.due = several and module.automatic_optimization  # a step that returns its loss
        self.output: Any = None

    def after_train(self, output: Any) -> None:
        if self.due:
            self.due, self.output = False, output

    def after_backward(self) -> None:
        """Compare after the backward, whose errors name the reason where a step computes with shards."""
        if self.output is not None:
            output, self.output = self.output, None
            with self.plugin.forward_context():
                rounding = rounding_of(self.module) / 10  # peers run the same operations on the same numbers
            compare_first_loss(output, self.place, rounding)


class ReplicasAgree(StepCheck):
    """Compare the copies of parameters every `EVERY` training batches."""

    def __init__(self, replicas: ReplicaCheck) -> None:
        self.replicas, self.batches = replicas, 0

    def before_train(self, args: Args) -> None:
        if self.batches % EVERY == 0:
            self.replicas.check(self.batches)
        self.batches += 1


class ActivationsFit(StepCheck):
    """Keep the activations of as many blocks as a budget allows."""

    def __init__(self, fit: BudgetFit) -> None:
        self.fit = fit

    def before_train(self, args: Args) -> None:
        self.fit.before_batch()

    def around_train(self) -> AbstractContextManager[Any]:
        return self.fit.batch()


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
