"""Steps with checks around them: that peers have the same samples, and what `verify` asks for."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import distributed as dist

from lightning_3d.compose import Composed
from lightning_3d.data import SampleCheck
from lightning_3d.randomness import StepRandom
from lightning_3d.steps import Call, PlacedSteps
from lightning_3d.verify import EVERY, FirstStep, ReplicaCheck


class CheckedSteps:
    """`steps`, checked.

    Args:
        steps: what runs.
        samples: compares the batches of peers.
        replicas: compares copies of parameters every so many training batches.
        first: compares the gradients of the first optimizer step.
        composed: the module.
        group: the data ranks.
        random: the stream of steps.
        loss_scale: by which gradients are too large.
        window: batches that are accumulated.
        epoch: the epoch of training.
        evaluation: how many evaluations have begun.
    """

    def __init__(
        self,
        steps: PlacedSteps,
        samples: SampleCheck,
        replicas: ReplicaCheck | None,
        first: FirstStep | None,
        *,
        composed: Composed,
        group: dist.ProcessGroup,
        random: StepRandom,
        loss_scale: Callable[[], float],
        window: Callable[[], int],
        epoch: Callable[[], int],
        evaluation: Callable[[], int],
    ) -> None:
        self.steps, self.samples, self.replicas, self.first = steps, samples, replicas, first
        self.composed, self.group, self.random = composed, group, random
        self.loss_scale, self.window = loss_scale, window
        self.epoch, self.evaluation = epoch, evaluation
        self.batches, self.held = 0, False
        if first is not None:
            first.twin.look(composed.module)

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        self.samples.check("training_step", args, self.epoch())
        if self.replicas is not None and self.batches % EVERY == 0:
            self.replicas.check(self.batches)
        self.batches += 1
        if self.first is not None:
            with self.random.step():
                self.first.add(self.composed.module, args, self.loss_scale() / self.window())
        output = self.steps.train(call, args)
        if self.first is not None:
            self.first.twin.look(self.composed.module)
        return output

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        run = (self.evaluation(), args[2:])  # after batch and batch_idx: the loader, where there are several
        return self.steps.evaluate(name, call, self.samples.settle(name, args, run))

    def before_backward(self, loss: Tensor) -> None:
        self.steps.before_backward(loss)

    def after_backward(self) -> None:
        self.steps.after_backward()
        if self.first is not None and not self.held:
            first, self.first = self.first, None
            if first.compare(self.composed, self.group, self.loss_scale()):
                self.first = first

    def hold(self, held: bool) -> None:
        self.held = held
        self.steps.hold(held)

    def close(self) -> None:
        if self.first is not None:
            self.first.close()
        self.steps.close()
