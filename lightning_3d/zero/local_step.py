"""Optimizers that treat every element alone step on this rank's shards as plain tensors.

On DTensors each of their dozen operations per parameter goes through DTensor's dispatch, which on a CPU costs more than
the arithmetic (measured: 38 ms against 22 ms for AdamW on half of 20M parameters).
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.local import like, local

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""torch's own, of exactly these types: a subclass may look at norms."""


def step_on_shards(optimizer: Optimizer) -> Callable[[], None]:
    """Have `optimizer.step` work on local tensors; returns what undoes it."""
    if type(optimizer) not in ELEMENTWISE:
        return lambda: None
    original = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with ExitStack() as entered:

            def first() -> Any:  # computes gradients, and drops those of the last step, on the parameters themselves
                assert closure is not None
                loss = closure()
                entered.enter_context(LocalTensors(optimizer))
                return loss

            if closure is not None:
                return original(closure=first, **kwargs)
            with LocalTensors(optimizer):
                return original(**kwargs)

    step.__dict__.update(getattr(original, "__dict__", {}))  # schedulers mark the step they have wrapped
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def undo() -> None:
        optimizer.step = original  # type: ignore[method-assign]

    return undo


class LocalTensors:
    """While entered, parameters, gradients and states of `optimizer` are this rank's plain tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[list[nn.Parameter]] = []
        self.shards: dict[nn.Parameter, nn.Parameter] = {}

    def __enter__(self) -> None:
        self.parameters, self.shards = [group["params"] for group in self.optimizer.param_groups], {}
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = [_enter(self.optimizer, parameter, self.shards) for parameter in parameters]

    def __exit__(self, *_: object) -> None:
        state = self.optimizer.state
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = parameters
        for parameter, shard in self.shards.items():
            if shard in state:
                state[parameter] = {key: _like(parameter, value, shard) for key, value in state.pop(shard).items()}


def _enter(optimizer: Optimizer, parameter: nn.Parameter, shards: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor | None):
        return parameter
    shard = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        shard.grad = local(parameter.grad)
    if parameter in optimizer.state:
        state = optimizer.state.pop(parameter)
        optimizer.state[shard] = {k: local(v) for k, v in state.items()}
    shards[parameter] = shard
    return shard


def _like(parameter: nn.Parameter, value: Any, shard: nn.Parameter) -> Any:
    """A state of `shard` as the state of `parameter`."""
    return like(parameter, value) if isinstance(value, Tensor) and value.shape == shard.shape else value
