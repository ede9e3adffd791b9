"""Plain tensors that stand in for the sharded parameters of an optimizer while it steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.ranks.shards import like, local

Convert = Callable[[nn.Parameter, Tensor], Tensor]
"""Gathers a tensor that is sharded like the parameter, or takes this rank's shard of a full one."""


def moves_to_host(tensor: Tensor) -> bool:
    """Return True for a tensor that is not in host memory."""
    return tensor.device.type not in ("cpu", "meta")


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return tensor.to("cpu", copy=True)


class StandIns:
    """While entered, the groups of `optimizer` list plain tensors, with the gradients and states of its parameters.

    A parameter has the same stand-in at every step: an optimizer may key states of its own by it. Lists are changed in
    place, since LBFGS keeps the list of its first group.

    Args:
        optimizer: its parameters are DTensors, or plain and left as they are.
        convert: makes the plain tensor that stands in for one that is sharded like a parameter.
    """

    def __init__(self, optimizer: Optimizer, convert: Convert, restore: Convert) -> None:
        self.optimizer, self.convert, self.restore = optimizer, convert, restore
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        self._used: dict[nn.Parameter, nn.Parameter] = {}
        self._values: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._enter(parameter) for parameter in group["params"]]
        self.read_gradients()

    def _enter(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self._stands_in(parameter):
            return parameter
        values = self._values[parameter] = self.convert(parameter, parameter.detach())
        if parameter not in self._of:
            self._of[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        stand_in = self._used[parameter] = self._of[parameter]
        stand_in.data = values
        if parameter in self.optimizer.state:
            self.optimizer.state[stand_in] = self._converted(self.optimizer.state.pop(parameter), parameter, parameter)
        return stand_in

    def _stands_in(self, parameter: nn.Parameter) -> bool:
        return isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor | None)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Give the stand-ins the gradients that their parameters have now."""
        for parameter, stand_in in self._used.items():
            grad = parameter.grad
            stand_in.grad = None if grad is None else self.convert(parameter, grad)

    @torch.no_grad()
    def write_values(self) -> None:
        """Give the parameters the values that their stand-ins have now."""
        for parameter, stand_in in self._used.items():
            local(parameter.detach()).copy_(local(self.restore(parameter, stand_in.detach())))

    def exchange(self, *, back: bool) -> None:
        """List the parameters instead of their stand-ins, or the other way round."""
        other = {stand_in: parameter for parameter, stand_in in self._used.items()} if back else self._used
        for group in self.optimizer.param_groups:
            group["params"][:] = [other.get(parameter, parameter) for parameter in group["params"]]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        self.write_values()
        self.exchange(back=True)
        state = self.optimizer.state
        for parameter, stand_in in self._used.items():
            if stand_in in state:
                state[parameter] = self._converted(state.pop(stand_in), parameter, stand_in)
        for stand_in in self._used.values():
            stand_in.grad, stand_in.data = None, stand_in.data.new_empty(0)
        self._used, self._values = {}, {}

    def _converted(self, state: dict[str, Any], parameter: nn.Parameter, now: nn.Parameter) -> dict[str, Any]:
        """The entries of a parameter's `state`, of which those with the shape of `now` are converted."""
        convert = self.convert if now is parameter else self.restore
        return {
            key: convert(parameter, value) if isinstance(value, Tensor) and value.shape == now.shape else value
            for key, value in state.items()
        }


class HostCopies(StandIns):
    """Stand-ins that are copies in host memory, where the states are. What is there already stands in as its shard."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, self._copy, self._dtensor)
        self._sharded: dict[int, tuple[Tensor, Tensor]] = {}

    def _copy(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        shard = local(tensor)  # without gradients the very tensor that the DTensor has, not a view
        if moves_to_host(shard):
            return on_host(shard)
        self._sharded[id(shard)] = (shard, tensor)
        return shard

    def _dtensor(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return self._sharded[id(tensor)][1] if id(tensor) in self._sharded else like(parameter, tensor)

    def _stands_in(self, parameter: nn.Parameter) -> bool:
        return super()._stands_in(parameter) or moves_to_host(parameter)

    def write_values(self) -> None:
        for parameter, stand_in in self._used.items():
            shard = local(parameter.detach())
            if moves_to_host(shard):
                shard.copy_(stand_in.detach())
            elif stand_in.data_ptr() != self._values[parameter].data_ptr():  # `p.data = ...` in the optimizer
                self._values[parameter].copy_(stand_in.detach())

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._sharded = {}
