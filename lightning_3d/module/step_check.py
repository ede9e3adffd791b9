"""`StepCheck`: a check of every step of a run, called by the runner of the steps."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

Args = tuple[Any, ...]


class StepCheck:
    """A subclass overrides the moments that it needs."""

    def before_train(self, args: Args) -> None: ...

    def around_train(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_train(self, output: Any) -> None: ...

    def before_evaluate(self, name: str, args: Args, evaluation: int) -> Args:
        """The arguments for the step. `evaluation` counts runs of validation, test and predict."""
        return args

    def after_backward(self) -> None: ...

    def close(self) -> None: ...
