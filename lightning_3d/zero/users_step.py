"""Optimizers that are not torch's own: what of theirs cannot be done with parts of parameters is said, by name."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.zero.replaced_step import replace_step


def check_state(optimizer: Optimizer) -> None:
    """Raise for one whose `__init__` skipped torch's: there are no hooks by which its state is made whole."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so that its state, of"
            " which a rank holds a part, cannot be put together for checkpoints. Call super().__init__, or use data"
            " parallelism with zero_stage=0."
        )


def step_as_told(optimizer: Optimizer, pipelined: bool) -> Callable[[], None]:
    """Have `optimizer.step` say what it cannot do here; returns what undoes it."""
    original, kind = optimizer.step, type(optimizer).__name__

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        calls, failed = 0, False

        def counted() -> Any:
            nonlocal calls, failed
            assert closure is not None
            calls += 1
            if calls > 1 and pipelined:
                raise UnsupportedError(
                    f"{kind} evaluates the loss several times per step, between which it looks at gradients of which a"
                    " pipeline rank holds only its stage's. Use another optimizer, or pipeline_parallel_size=1."
                )
            failed = True
            loss = closure()
            failed = False
            return loss

        try:
            return original(**kwargs) if closure is None else original(closure=counted, **kwargs)
        except (AssertionError, RuntimeError) as error:
            parted = any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])
            # not that a rank is gone with which it exchanges something
            of_parts = isinstance(error, AssertionError | NotImplementedError) or "DTensor" in str(error)
            if failed or not parted or not of_parts:
                raise
            raise UnsupportedError(
                f"{kind}.step could not compute with parameters of which a rank holds only a part"
                f" ({type(error).__name__}: {error}). An optimizer that mixes several parameters, as in a norm of all"
                " gradients, works with data parallelism and zero_stage=0."
            ) from error

    return replace_step(optimizer, step)
