"""Plain tensors that stand in for the sharded parameters of an optimizer while it steps: full ones, copies, or shards.

On DTensors each of a dozen operations per parameter goes through DTensor's dispatch. On a CPU that costs more than the
arithmetic: AdamW on half of 20M parameters took 38 ms, and 22 ms on plain tensors.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.module.host_memory import is_on_device
from lightning_3d.ranks.dtensor_private import shard_of
from lightning_3d.ranks.shards import like, local

Convert = Callable[[nn.Parameter, Tensor], Tensor]
"""Gathers a tensor that is sharded like the parameter, or takes this rank's shard of a full one."""


class StandIns:
    """While entered, the groups of `optimizer` list plain tensors, with the gradients and states of its parameters.

    A parameter has the same stand-in at every step: an optimizer may key states of its own by it. Lists are changed in
    place, since LBFGS keeps the list of its first group. Plain parameters are left as they are. `convert` makes the
    plain tensor that stands in for a sharded parameter, or for a tensor that is sharded like one.
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
        if not self._needs_stand_in(parameter):
            return parameter
        values = self._values[parameter] = self.convert(parameter, parameter.detach())
        if parameter not in self._of:
            self._of[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        stand_in = self._used[parameter] = self._of[parameter]
        stand_in.data = values
        if parameter in self.optimizer.state:
            self.optimizer.state[stand_in] = self._converted(self.optimizer.state.pop(parameter), parameter, parameter)
        return stand_in

    def _needs_stand_in(self, parameter: nn.Parameter) -> bool:
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

    def list_parameters(self) -> None:
        self._list({stand_in: parameter for parameter, stand_in in self._used.items()})

    def list_stand_ins(self) -> None:
        self._list(self._used)

    def _list(self, other: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [other.get(parameter, parameter) for parameter in group["params"]]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        self.write_values()
        self.list_parameters()
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
        if is_on_device(shard):
            return shard.to("cpu", copy=True, non_blocking=True)
        self._sharded[id(shard)] = (shard, tensor)
        return shard

    def _dtensor(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return self._sharded[id(tensor)][1] if id(tensor) in self._sharded else like(parameter, tensor)

    def _needs_stand_in(self, parameter: nn.Parameter) -> bool:
        return super()._needs_stand_in(parameter) or is_on_device(parameter)

    def read_gradients(self) -> None:
        """Begin the copies, and wait once for all."""
        super().read_gradients()
        if any(map(is_on_device, self._used)):
            torch.accelerator.current_stream().record_event().synchronize()

    def write_values(self) -> None:
        for parameter, stand_in in self._used.items():
            shard = local(parameter.detach())
            target = shard if is_on_device(shard) else self._values[parameter]
            if stand_in.data_ptr() != target.data_ptr():  # `p.data = ...` in the optimizer, or a copy
                target.copy_(stand_in.detach(), non_blocking=True)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._sharded = {}


State = dict[str, Any]


class LocalShards:
    """While entered, the groups of `optimizer` list local shards, with the gradients and states of its parameters.

    Lists are changed in place, since some optimizers keep the list of a group. Plain tensors are kept for the next
    step: new ones for each shard, gradient and state cost a third of a small model's step. Those that go to a disk
    are not, since they would stay in memory. Plain parameters are left as they are.
    """

    def __init__(self, optimizer: Optimizer, keep: bool = True) -> None:
        self.optimizer, self.keep = optimizer, keep
        self._known: dict[int, _LocalShard] = {}
        """By the id of the parameter: hashes of tensors are slow."""
        self._entered: list[_LocalShard] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._enter(parameter) for parameter in group["params"]]

    def _enter(self, parameter: nn.Parameter) -> nn.Parameter:
        grad = parameter.grad
        if not isinstance(parameter, DTensor) or not (grad is None or isinstance(grad, DTensor)):
            return parameter
        values = shard_of(parameter)
        known = self._known.get(id(parameter))
        if known is None:
            known = self._known[id(parameter)] = _LocalShard(parameter, values)
        known.take_values(values)
        if (state := self.optimizer.state.pop(parameter, None)) is not None:
            self.optimizer.state[known.stand_in] = known.as_local(state)
        known.stand_in.grad = None if grad is None else shard_of(grad)
        self._entered.append(known)
        return known.stand_in

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        entered, self._entered = self._entered, []
        states, parameters = self.optimizer.state, {id(known.stand_in): known.parameter for known in entered}
        for group in self.optimizer.param_groups:
            group["params"][:] = [parameters.get(id(parameter), parameter) for parameter in group["params"]]
        for known in entered:
            # The optimizer may assign `p.data = ...`.
            if known.stand_in.data_ptr() != known.values.data_ptr():
                known.values.copy_(known.stand_in.detach())
                known.stand_in.data = known.values
            known.stand_in.grad = None
            if (state := states.pop(known.stand_in, None)) is not None:
                states[known.parameter] = known.as_sharded(state)
            if not self.keep:
                known.forget()


class _LocalShard:
    """One parameter. It has the same stand-in at every step: an optimizer may key states of its own by it."""

    def __init__(self, parameter: nn.Parameter, values: Tensor) -> None:
        self.parameter, self.values = parameter, values
        self.stand_in = nn.Parameter(values, requires_grad=parameter.requires_grad)
        self.sharded, self.local = _Entries({}), _Entries({})
        """The state after the last step, as others see it and as the optimizer does."""

    def forget(self) -> None:
        """Leave the state to the optimizer alone, and the values to the parameter, whose memory a disk takes back."""
        self.sharded, self.local = _Entries({}), _Entries({})
        self.values = self.stand_in.data = self.values.new_empty(0)

    def take_values(self, values: Tensor) -> None:
        if values is not self.values or values.data_ptr() != self.stand_in.data_ptr():  # offload moves a shard's memory
            self.values = self.stand_in.data = values

    def as_local(self, state: State) -> State:
        """`state` with local shards for tensors that are sharded like the parameter."""
        if not self.sharded.are_those_of(state):
            shape = self.parameter.shape
            local = {
                key: shard_of(value) if isinstance(value, DTensor) and value.shape == shape else value
                for key, value in state.items()
            }
            self.sharded, self.local = _Entries(state), _Entries(local)
        return self.local.state

    def as_sharded(self, state: State) -> State:
        """`state` with DTensors for local shards. A tensor that was changed in place has the DTensor of before."""
        if not self.local.are_those_of(state):
            before = {id(value): self.sharded.items[key] for key, value in self.local.items.items()}
            sharded = {
                key: before[id(value)] if id(value) in before else self._as_sharded(value)
                for key, value in state.items()
            }
            self.sharded, self.local = _Entries(sharded), _Entries(state)
        return self.sharded.state

    def _as_sharded(self, value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape == self.stand_in.shape
        return like(self.parameter, value) if alike else value


class _Entries:
    """A state and its entries, which shows whether they were replaced since."""

    def __init__(self, state: State) -> None:
        self.state, self.items = state, dict(state)

    def are_those_of(self, state: State) -> bool:
        """Return True if `state` is the same one with the same objects. Their values may differ."""
        return (
            state is self.state
            and state.keys() == self.items.keys()
            and all(map(is_, map(state.__getitem__, self.items), self.items.values()))
        )
