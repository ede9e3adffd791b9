"""Optimizers that treat every element alone step on this rank's shards as plain tensors.

On DTensors each of their dozen operations per parameter goes through DTensor's dispatch, which on a CPU costs more than
the arithmetic (measured: 38 ms against 22 ms for AdamW on half of 20M parameters).
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.local import like, local
from lightning_3d.zero.host_adam import fusable
from lightning_3d.zero.replaced_step import replace_step

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""torch's own, of exactly these types: a subclass may look at norms."""


def step_on_shards(optimizer: Optimizer) -> Callable[[], None]:
    """Have `optimizer.step` work on local tensors; returns what undoes it."""
    original, tensors = optimizer.step, LocalTensors(optimizer)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        with ExitStack() as entered:

            def first() -> Any:  # computes gradients, and drops those of the last step, on the parameters themselves
                assert closure is not None
                loss = closure()
                entered.enter_context(tensors)
                return loss

            if closure is not None:
                return original(closure=first, **kwargs)
            with tensors:
                return original(**kwargs)

    return replace_step(optimizer, step)


class LocalTensors:
    """While entered, parameters, gradients and states of `optimizer` are this rank's plain tensors.

    States are mostly the same tensors step after step; what stands for each is made once (it cost 5 ms of a step of 76
    parameters).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[list[nn.Parameter]] = []
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        self.pairs = Pairs()
        self.fused: list[dict[str, Any]] = []
        """Groups that take the fused kernel while entered."""

    def __enter__(self) -> None:
        self.parameters, self.shards = [group["params"] for group in self.optimizer.param_groups], {}
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = [self._shard(parameter) for parameter in parameters]
            if fusable(self.optimizer, group):
                group["fused"] = True
                self.fused.append(group)

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor | None):
            return parameter
        shard = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            shard.grad = local(parameter.grad)
        state = self.optimizer.state
        if parameter in state:
            state[shard] = {key: self.pairs.part(value) for key, value in state.pop(parameter).items()}
        self.shards[parameter] = shard
        return shard

    def __exit__(self, *_: object) -> None:
        state, pairs = self.optimizer.state, Pairs()
        for group in self.fused:
            group["fused"] = None
        self.fused = []
        for group, parameters in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = parameters
        for parameter, shard in self.shards.items():
            if shard not in state:
                continue
            state[parameter] = {
                key: pairs.add(value, self.pairs.shared(parameter, value))
                if isinstance(value, Tensor) and value.shape == shard.shape
                else value
                for key, value in state.pop(shard).items()
            }
        self.pairs = pairs
        self.parameters, self.shards = [], {}  # they hold the gradients


class Pairs:
    """Local tensors and the shared tensors of which they are this rank's part."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, part: Tensor, shared: Tensor) -> Tensor:
        self._parts[id(shared)] = self._shared[id(part)] = (part, shared)
        return shared

    def part(self, shared: Any) -> Any:
        """This rank's part of `shared`."""
        if id(shared) in self._parts:  # an id that is held here is no other object's
            return self._parts[id(shared)][0]
        return local(shared)

    def shared(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """That of which `part` is this rank's part, laid out like `parameter`."""
        return self._shared[id(part)][1] if id(part) in self._shared else like(parameter, part)
