"""Optimizers that are not torch's own: what they compute from whole tensors, and what of it cannot be done here."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.zero.mixing import mixes
from lightning_3d.zero.replaced_step import replace_step

Watch = Callable[[str, str], AbstractContextManager[Any]]


def check_state(optimizer: Optimizer) -> None:
    """Raise for one whose `__init__` skipped torch's: there are no hooks by which its state is made whole."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so that its state, of"
            " which a rank holds a part, cannot be put together for checkpoints. Call super().__init__, or use data"
            " parallelism with zero_stage=0."
        )


def step_as_told(optimizer: Optimizer, watch: Watch, pipelined: bool) -> Callable[[], None]:
    """Have `optimizer.step` see whole numbers, and say what it cannot do here; returns what undoes it.

    Args:
        optimizer: one of which it is not known how it steps parts.
        watch: what to enter around what it does itself, given its name and what to do instead.
        pipelined: whether the rank holds some stages only.
    """
    original, kind = optimizer.step, type(optimizer).__name__
    watched = watch(f"{kind}.step", "An optimizer that needs whole tensors works with data parallelism, zero_stage=0.")
    tried = not pipelined or type(optimizer).__module__.startswith("torch.")

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal tried
        calls = 0
        if not tried:
            _refuse_mixing(self)
            tried = True

        def counted() -> Any:
            nonlocal calls
            assert closure is not None
            calls += 1
            if calls > 1 and pipelined:
                raise UnsupportedError(
                    f"{kind} evaluates the loss several times per step, between which it looks at gradients of which a"
                    " pipeline rank holds only its stage's. Use another optimizer, or pipeline_parallel_size=1."
                )
            watched.__exit__(None, None, None)  # a training step is no part of what is watched
            try:
                return closure()
            finally:
                watched.__enter__()

        with watched:
            return original(**kwargs) if closure is None else original(closure=counted, **kwargs)

    return replace_step(optimizer, step)


def _refuse_mixing(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    try:
        mixed = mixes(optimizer)
    except Exception as error:  # of any kind: it is the user's code, on parameters that it was not built with
        rank_zero_warn(
            f"{kind} could not be tried on small parameters of its kind ({type(error).__name__}: {error}). If it"
            " computes something from several parameters at once (a norm of all gradients), that is now of a stage's"
            " parameters only; with pipeline_parallel_size=1 it is of all."
        )
        return
    if mixed:
        raise UnsupportedError(
            f"{kind} steps a parameter otherwise where there are others beside it: by a number that it computes from"
            " all of them (a norm of all gradients), or with random numbers that it draws for one after another. A"
            " pipeline rank holds only its stages' parameters. Use another optimizer (gradients are clipped by the norm"
            " of all with gradient_clip_val), or pipeline_parallel_size=1."
        )
