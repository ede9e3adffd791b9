"""Optimizers that look at a whole matrix (its rows' means, its singular values) step on whole tensors.

One parameter at a time is made whole with its gradient and state, stepped, and dealt out again: more is sent than the
optimizer's arithmetic is worth, but the numbers are those of one device.

Another `step` in the place of an optimizer's own.

Adam on shards in host memory by torch's own fused kernel.

Where the user chose neither `fused` nor `foreach`, torch runs Adam on a CPU one operation after the other, a dozen
passes over memory (measured: 22 ms for half of 20M parameters, against 7 ms fused). That is most of what a step with
offloaded states costs, too. Half types stay as they are: one would round after each operation, the other once.

LBFGS, which searches with all parameters as one vector and computes the loss several times in a step.

How each kind of optimizer steps on parameters of which ranks hold parts, or losses of which they hold parts.

Optimizers that treat every element alone step on this rank's shards as plain tensors.

On DTensors each of their dozen operations per parameter goes through DTensor's dispatch, which on a CPU costs more than
the arithmetic (measured: 38 ms against 22 ms for AdamW on half of 20M parameters).

Parameters that an optimizer is given once the module is placed: nothing divides them or reduces their gradients.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.optim.probe import Watch, replace_step, step_on_full_numbers
from lightning_3d.ranks.shards import like, local

WHOLE: tuple[type[Optimizer], ...] = tuple(
    getattr(optim, name)
    for name in ("Adafactor", "Muon")
    if hasattr(optim, name)  # Muon came with torch 2.9
)
Convert = Callable[[nn.Parameter, Tensor], Tensor]


def step_on_full_tensors(optimizer: Optimizer, whole: Convert, part: Convert) -> Callable[[], None]:
    """Have `optimizer.step` work on whole tensors; returns what undoes it."""
    original = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _step_one(self, group, parameter, original, whole, part)
        finally:
            self.param_groups = groups
        return loss

    return replace_step(optimizer, step)


@torch.no_grad()
def _step_one(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    step: Callable[[], Any],
    whole: Convert,
    part: Convert,
) -> None:
    assert parameter.grad is not None
    full = nn.Parameter(whole(parameter, parameter.detach()))
    full.grad = whole(parameter, parameter.grad)
    if parameter in optimizer.state:
        optimizer.state[full] = _converted(optimizer.state.pop(parameter), parameter, whole)
    optimizer.param_groups = [{**group, "params": [full]}]
    step()
    local(parameter.detach()).copy_(local(part(parameter, full.detach())))
    optimizer.state[parameter] = _converted(optimizer.state.pop(full, {}), parameter, part)


def _converted(state: dict[str, Any], parameter: nn.Parameter, convert: Convert) -> dict[str, Any]:
    return {
        key: convert(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }


FUSED = (optim.Adam, optim.AdamW)
"""Of exactly these types. SGD's kernel cannot take a parameter that gets its first gradient later than others."""


def fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the step of `group`, whose parameters are plain tensors now, may take the fused kernel."""
    if type(optimizer) not in FUSED or group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["differentiable"] or group["capturable"] or isinstance(group["lr"], Tensor):
        return False
    steps = [optimizer.state[p]["step"] for p in group["params"] if optimizer.state.get(p)]
    return all(_plain(p) and (p.grad is None or _plain(p.grad)) for p in group["params"]) and all(
        isinstance(step, Tensor) and step.dtype == torch.float32 and step.device.type == "cpu" for step in steps
    )


def _plain(tensor: Tensor) -> bool:
    kinds = (torch.float32, torch.float64)
    return tensor.device.type == "cpu" and tensor.dtype in kinds and tensor.layout == torch.strided


def step_on_full_vector(
    optimizer: LBFGS, whole: Convert, part: Convert, mean: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """Have `optimizer.step` search with whole parameters and the loss of all ranks; returns what undoes it.

    With a loss of its own each rank would stop searching at another point. What it searches with, every rank holds
    whole: parameters, gradients and as many vectors of all of them as `history_size` says, twice.

    Reads `_params`, where LBFGS (torch 2.11 and 2.13) keeps what it steps; `tests/same/test_optimizers.py` fails when
    that changes.
    """
    original = optimizer.step

    def step(self: LBFGS, closure: Callable[[], Any]) -> Any:
        with torch.no_grad():
            held = self.param_groups[0]["params"]
            wholes = [_whole(parameter, whole) for parameter in held]

            def shared() -> Any:
                _deal_out(held, wholes, part)
                with torch.enable_grad():
                    loss = closure()
                for parameter, full in zip(held, wholes, strict=True):
                    if full is not parameter:
                        full.grad = None if parameter.grad is None else whole(parameter, parameter.grad)
                return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

            self._params = wholes
            _rename(self, held[0], wholes[0])
            try:
                return original(shared)
            finally:
                _deal_out(held, wholes, part)
                self._params = held
                _rename(self, wholes[0], held[0])

    return replace_step(optimizer, step)


def _whole(parameter: nn.Parameter, whole: Convert) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(whole(parameter, parameter.detach()), requires_grad=parameter.requires_grad)


def _deal_out(held: list[nn.Parameter], wholes: list[nn.Parameter], part: Convert) -> None:
    for parameter, full in zip(held, wholes, strict=True):
        if full is not parameter:
            local(parameter.detach()).copy_(local(part(parameter, full.detach())))


def _rename(optimizer: LBFGS, old: nn.Parameter, new: nn.Parameter) -> None:
    """Its state, which is of all parameters, is kept under the first one."""
    if old is not new and old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def step_like_one_device(
    optimizer: Optimizer,
    whole: Convert,
    part: Convert,
    mean: Callable[[Tensor], Tensor],
    watch: Watch,
    pipelined: bool,
) -> Callable[[], None]:
    """Have `optimizer.step` do what it would with everything in one place; returns what undoes it.

    Args:
        optimizer: any; of one that is none of torch's the parameters are DTensors.
        whole: makes a tensor that is divided like a parameter whole.
        part: this rank's part of a whole tensor.
        mean: of a loss over the data ranks.
        watch: what to enter around a step that is none of torch's, given its name and what to do instead.
        pipelined: whether the rank holds some stages only.
    """
    if isinstance(optimizer, LBFGS):
        return step_on_full_vector(optimizer, whole, part, mean)
    if isinstance(optimizer, WHOLE):
        return step_on_full_tensors(optimizer, whole, part)
    if type(optimizer) in ELEMENTWISE:
        return step_on_shards(optimizer)
    return step_on_full_numbers(optimizer, watch, pipelined)


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
        self.pairs = ParameterPairs()
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
        state, pairs = self.optimizer.state, ParameterPairs()
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


class ParameterPairs:
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


def refuse_new_parameters(optimizer: Optimizer, module: nn.Module, layout: Layout) -> Callable[[], None]:
    """Have `optimizer.step` raise for parameters that `module` does not have now; returns what undoes it.

    Tensor ranks need nothing done: they compute the same gradients. Looked at in the step, since parameters come by
    `add_param_group` of the optimizer, by that of Lightning's wrapper, or into a group's list.
    """
    if layout.data_parallel_size * layout.pipeline_parallel_size == 1:
        return lambda: None
    placed, known, original = set(module.parameters()), _count(optimizer), optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if _count(self) != known:
            _refuse([each for group in self.param_groups for each in group["params"] if each not in placed], self)
            known = _count(self)
        return original(*args, **kwargs)

    return replace_step(optimizer, step)


def _refuse(new: list[nn.Parameter], optimizer: Optimizer) -> None:
    if new:
        raise UnsupportedError(
            f"{type(optimizer).__name__} was given {len(new)} parameters (shape {tuple(new[0].shape)}, ...) that the"
            " module did not have when it was placed on its ranks: their gradients are not averaged over the data"
            " ranks, and other pipeline stages do not know of them. Make their modules in __init__, setup or"
            " configure_model; add_param_group may be given their parameters when they are to train."
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
