"""How the module's steps run once it is placed: as they are, or as stages of a pipeline.

Steps with checks around them: that peers have the same samples, and what `verify` asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.data.same_samples import SampleCheck
from lightning_3d.errors import ConfigurationError, PipelineSplitError, RunError
from lightning_3d.parallelize import ParallelModule, ParallelPlan
from lightning_3d.pipeline.context import Hooks
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import talk
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.verify.first_step import FirstStep
from lightning_3d.verify.replicas import EVERY, ReplicaCheck

Call = Callable[..., Any]


class StepRunner(Protocol):
    """What the strategy's hooks call."""

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        """Run a training step: `call(*args)` would call the user's own."""

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        """Run a validation, test or predict step."""

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def hold(self, held: bool) -> None:
        """While held, batches only add to an accumulation window."""

    def close(self) -> None:
        """Leave the module as it was placed."""


class PlacedRunner(StepRunner, Protocol):
    """The same on a placed module."""

    random: StepRandom


class UnplacedRunner:
    """Nothing but the user's own step: while the module is not placed, before `setup` and after `teardown`."""

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        return call(*args)

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        return call(*args)

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def hold(self, held: bool) -> None: ...

    def close(self) -> None: ...


class PlainRunner:
    """The user's step on the user's batch.

    Args:
        opens: whether the batch is the first of an accumulation window, which may not be the end of the one before.
    """

    def __init__(self, composed: ParallelModule, random: StepRandom, opens: Callable[[], bool]) -> None:
        self.data, self.random, self.opens = composed.data, random, opens

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        if self.opens():
            self.data.discard_pending()
        self.data.gather()
        with self.random.step(), self.data.forbid_writes():
            return call(*args)

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        self.data.gather()
        with self.random.step():
            output = call(*args)
        self.data.finish_forward()
        return output

    def before_backward(self, loss: Tensor) -> None:
        self.data.before_backward(loss)

    def after_backward(self) -> None:
        self.data.after_backward()

    def hold(self, held: bool) -> None:
        self.data.accumulate_only(held)

    def close(self) -> None: ...


class PipelineRunner:
    """The user's step on every microbatch, on every stage, in the order of a schedule.

    Forward and backward of the whole batch happen in `train`; Lightning then clears gradients and calls backward on the
    loss, which is when the gradients are put in place.

    Args:
        opens: as for `PlainRunner`.
        make: builds the pipeline around hooks.
        scale: what the loss is multiplied with before backward: 1 / accumulated batches, times a loss scale.
        autocast: the precision plugin's context for a step.
    """

    def __init__(
        self,
        composed: ParallelModule,
        random: StepRandom,
        opens: Callable[[], bool],
        make: Callable[[Hooks], Pipeline],
        scale: Callable[[], float],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.composed, self.data, self.random, self.scale = composed, composed.data, random, scale
        self.opens, self.held = opens, False
        self.pipeline = make(
            Hooks(
                begin=self._begin,
                reduce=self.data.reduce,
                locate=self._locate,
                evaluating=self._evaluating,
                context=autocast,
            )
        )

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        first = self.opens()
        if first:
            self.data.reshard()  # what an evaluation gathered: the gradients to drop are those of the shards
            self.data.discard_pending()
        with self.random.step():
            return self.pipeline.training_step(*args, first=first, last=not self.held, scale=self.scale())

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        with self.random.step():
            return self.pipeline.eval_step(name, *args)

    def prove(self, whole: UncutRun) -> None:
        """`prove` with gathered parameters. Collective; raises on every rank."""
        self.data.accumulate_only(True)
        self.data.gather()
        prove(self.pipeline, whole)
        self.data.finish_forward()
        self.data.reshard()
        self.data.accumulate_only(False)

    def before_backward(self, loss: Tensor) -> None:
        self.pipeline.backward(loss)

    def after_backward(self) -> None: ...

    def hold(self, held: bool) -> None:
        self.held = held

    def close(self) -> None:
        self.pipeline.close()

    def _begin(self) -> None:
        self.data.accumulate_only(True)
        self.data.gather()

    def _locate(self, name: str) -> Tensor:
        located = self.data.grad_holder(name)
        return located if located is not None else self.composed.module.get_parameter(name)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.data.gather()
        yield
        self.data.finish_forward()


def _differentiates(error: Exception) -> bool:
    """Whether it is torch's about `autograd.grad`: in the rehearsal nobody else calls that."""
    return any(text in str(error) for text in ("differentiated Tensor", "does not require grad"))


def prove(pipeline: Pipeline, whole: UncutRun) -> None:
    """Compare one microbatch with what the uncut module did. Collective; raises on every rank."""
    problem = None
    try:
        pipeline.prove(whole)
    except ConfigurationError as error:  # the pipelines of other data ranks may not have it: all ranks raise it
        problem = error
    except RunError:
        raise
    except Exception as error:  # the others may wait for this rank within the step: they hear of it as of a failed one
        failed = f"Cut into stages, the step fails, which it did not whole ({type(error).__name__}: {error})."
        if _differentiates(error):
            raise PipelineSplitError(
                f"{failed} It takes derivatives by itself (torch.autograd.grad: a gradient penalty, a physics loss, an"
                " adversarial input), through blocks of other stages, which no single rank can. Use"
                " pipeline_parallel_size=1; tensor, ZeRO and data parallelism can do this."
            ) from error
        raise PipelineSplitError(
            f"{failed} Does its code read from a block of another stage what only the rank of that stage has (a tensor"
            " kept on a module)? Pass it from block to block, or keep both on one stage with pipeline_split."
        ) from error
    for answer in talk.gather(problem):
        if answer is not None:
            raise answer


class CheckedRunner:
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
        steps: PlacedRunner,
        samples: SampleCheck,
        replicas: ReplicaCheck | None,
        first: FirstStep | None,
        *,
        composed: ParallelModule,
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


def prove_cut(
    cut: ParallelModule, plans: ParallelPlan, make: Callable[[nn.Module, Hooks], Pipeline], plugin: Precision3D
) -> None:
    """Compare the stages with the uncut module before blocks are divided over tensor ranks: dropout in shards gives
    other numbers. Without tensor ranks `make_steps` compares, and what is learnt there is kept. Collective.

    Args:
        make: see `pipelines`.
    """
    if plans.tensor is not None and plans.whole is not None and plans.whole.compared:
        pipeline = make(cut.module, Hooks(context=plugin.forward_context))
        prove(pipeline, plans.whole)
        pipeline.close()


def make_steps(
    trainer: Trainer,
    composed: ParallelModule,
    plans: ParallelPlan,
    make: Callable[[nn.Module, Hooks], Pipeline],
    *,
    random: StepRandom,
    plugin: Precision3D,
) -> PlacedRunner:
    """What the strategy's step hooks call."""
    module = composed.module

    def opens() -> bool:
        """As Lightning finds out when to zero gradients: a callback may end an epoch within a window."""
        automatic: bool = module.automatic_optimization  # type: ignore[assignment]
        return automatic and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    if plans.split is None:
        return PlainRunner(composed, random, opens)

    def scale() -> float:
        return plugin.loss_scale() / trainer.accumulate_grad_batches

    steps = PipelineRunner(composed, random, opens, partial(make, module), scale, plugin.forward_context)
    if plans.tensor is None and plans.whole is not None and plans.whole.compared:
        steps.prove(plans.whole)
    return steps
