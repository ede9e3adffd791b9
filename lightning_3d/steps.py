"""How the module's steps run once it is placed: as they are, or as stages of a pipeline."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from lightning_3d import talk
from lightning_3d.compose import Composed
from lightning_3d.errors import ConfigurationError, PipelineSplitError, RunError
from lightning_3d.pipeline.runner import Hooks, Pipeline
from lightning_3d.pipeline.whole import Whole
from lightning_3d.randomness import StepRandom

Call = Callable[..., Any]


class Steps(Protocol):
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


class PlacedSteps(Steps, Protocol):
    """The same on a placed module."""

    random: StepRandom


class OwnSteps:
    """Nothing but the user's own step: while the module is not placed, before `setup` and after `teardown`."""

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        return call(*args)

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        return call(*args)

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def hold(self, held: bool) -> None: ...

    def close(self) -> None: ...


class PlainSteps:
    """The user's step on the user's batch.

    Args:
        opens: whether the batch is the first of an accumulation window, which may not be the end of the one before.
    """

    def __init__(self, composed: Composed, random: StepRandom, opens: Callable[[], bool]) -> None:
        self.data, self.random, self.opens = composed.data, random, opens

    def train(self, call: Call, args: tuple[Any, ...]) -> Any:
        if self.opens():
            self.data.drop()
        self.data.begin()
        with self.random.step(), self.data.unwritten():
            return call(*args)

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        self.data.begin()
        with self.random.step():
            output = call(*args)
        self.data.end()
        return output

    def before_backward(self, loss: Tensor) -> None:
        self.data.before_backward(loss)

    def after_backward(self) -> None:
        self.data.after_backward()

    def hold(self, held: bool) -> None:
        self.data.hold(held)

    def close(self) -> None: ...


class PipelinedSteps:
    """The user's step on every microbatch, on every stage, in the order of a schedule.

    Forward and backward of the whole batch happen in `train`; Lightning then clears gradients and calls backward on the
    loss, which is when the gradients are put in place.

    Args:
        opens: as for `PlainSteps`.
        make: builds the pipeline around hooks.
        scale: what the loss is multiplied with before backward: 1 / accumulated batches, times a loss scale.
        autocast: the precision plugin's context for a step.
    """

    def __init__(
        self,
        composed: Composed,
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
            self.data.rest()  # what an evaluation gathered: the gradients to drop are those of the shards
            self.data.drop()
        with self.random.step():
            return self.pipeline.training_step(*args, first=first, last=not self.held, scale=self.scale())

    def evaluate(self, name: str, call: Call, args: tuple[Any, ...]) -> Any:
        with self.random.step():
            return self.pipeline.eval_step(name, *args)

    def prove(self, whole: Whole) -> None:
        """`prove` with gathered parameters. Collective; raises on every rank."""
        self.data.hold(True)
        self.data.begin()
        prove(self.pipeline, whole)
        self.data.end()
        self.data.rest()
        self.data.hold(False)

    def before_backward(self, loss: Tensor) -> None:
        self.pipeline.backward(loss)

    def after_backward(self) -> None: ...

    def hold(self, held: bool) -> None:
        self.held = held

    def close(self) -> None:
        self.pipeline.close()

    def _begin(self) -> None:
        self.data.hold(True)
        self.data.begin()

    def _locate(self, name: str) -> Tensor:
        located = self.data.locate(name)
        return located if located is not None else self.composed.module.get_parameter(name)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.data.begin()
        yield
        self.data.end()


def _differentiates(error: Exception) -> bool:
    """Whether it is torch's about `autograd.grad`: in the rehearsal nobody else calls that."""
    return any(text in str(error) for text in ("differentiated Tensor", "does not require grad"))


def prove(pipeline: Pipeline, whole: Whole) -> None:
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
