"""Optimizers that are not torch's own: what they compute from whole tensors, and what of it cannot be done here.

Whether an optimizer steps each parameter by itself: a pipeline rank has the gradients of its own stages only.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import UnsupportedError

Watch = Callable[[str, str], AbstractContextManager[Any]]


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Have `optimizer.step(...)` call `step(optimizer, ...)`; returns what undoes it."""
    original = optimizer.step
    step.__dict__.update(getattr(original, "__dict__", {}))  # schedulers mark the step they have wrapped
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def undo() -> None:
        optimizer.step = original  # type: ignore[method-assign]

    return undo


def check_state(optimizer: Optimizer) -> None:
    """Raise for one whose `__init__` skipped torch's: there are no hooks by which its state is made whole."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so that its state, of"
            " which a rank holds a part, cannot be put together for checkpoints. Call super().__init__, or use data"
            " parallelism with zero_stage=0."
        )


def step_on_full_numbers(optimizer: Optimizer, watch: Watch, pipelined: bool) -> Callable[[], None]:
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


_STEPS = 4
"""What a step finds of all parameters may count from the next one."""


def mixes(optimizer: Optimizer) -> bool:
    """Whether a copy of `optimizer` steps a small parameter otherwise with another beside it.

    Also where it draws random numbers: which parameters get which then depends on all of them. Raises what the copy
    raises where it cannot step parameters that it was not built with.
    """
    return not torch.equal(_stepped(optimizer, 1), _stepped(optimizer, 2))


def _stepped(optimizer: Optimizer, count: int) -> Tensor:
    """The first of `count` parameters after some steps."""
    group = next(group for group in optimizer.param_groups if group["params"])
    kind = group["params"][0]
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)

        def small() -> Tensor:
            return torch.randn(8, 8, generator=generator).to(device, kind.dtype)

        parameters = [nn.Parameter(small()) for _ in range(2)][:count]
        twin = twin_of(optimizer, {**group, "params": parameters})
        for _ in range(_STEPS):
            gradients = [small() for _ in range(2)]

            def closure(gradients: list[Tensor] = gradients) -> Tensor:
                for parameter, gradient in zip(parameters, gradients, strict=False):
                    parameter.grad = gradient.clone()
                return torch.zeros(())

            twin.step(closure)  # type: ignore[arg-type]  # it may return a tensor
    return parameters[0].detach()


def twin_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """A copy with one `group` and no state."""
    twin = object.__new__(type(optimizer))
    instead = {"state": defaultdict[Any, Any](dict), "param_groups": [group]}
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", *instead)}
    hooks = {name: OrderedDict[int, Any]() for name in own if name.endswith("_hooks")}
    twin.__dict__.update({name: _apart(name, value) for name, value in own.items() if name not in hooks})
    twin.__dict__.update({**hooks, **instead})
    return twin


def _apart(name: str, value: Any) -> Any:
    """A copy of what an optimizer keeps, so that the real one is not stepped by what is done to it."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, nn.Parameter | nn.Module | Optimizer) or (isinstance(leaf, Tensor) and leaf.numel() > 1000):
            raise ValueError(f"{name} holds a {type(leaf).__name__}, which is not that of the small ones")
    return deepcopy(value) if isinstance(value, dict | list | Tensor) else value
