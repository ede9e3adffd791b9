"""Each optimizer, once its parameters are placed: the way it steps, and what it must not be."""

from collections.abc import Callable, Iterable, MutableMapping
from functools import wraps
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_3d.axes.parameters import Parameters
from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.host_memory import is_on_device
from lightning_3d.module.undo import UndoStack
from lightning_3d.optim.probe import KNOWN, Reach, reach_of
from lightning_3d.optim.sharded_steps import replace_step, step_all_gathered, step_on_shards, step_one_at_a_time
from lightning_3d.optim.stand_ins import Convert, StandIns
from lightning_3d.sandbox.trees import leaves


def step_like_one_device(
    optimizer: Optimizer,
    full: Convert,
    shard: Convert,
    mean: Callable[[Tensor], Tensor],
    pipelined: bool,
    host: bool = False,
) -> Callable[[], None]:
    """Have `optimizer.step` do what it would with all tensors on one device; returns what undoes it.

    Args:
        full: the full tensor of one that is sharded like a parameter. Collective.
        mean: of a loss over the data ranks.
        pipelined: True where the rank has some stages only.
        host: step in host memory, where the states are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    offloaded, host = host, host and any(is_on_device(parameter) for parameter in parameters)
    own = type(optimizer) not in KNOWN
    if own and not sharded and not pipelined and not host:
        return lambda: None
    reach = reach_of(optimizer, pipelined)
    if host and reach is not Reach.ELEMENT:
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps full tensors on the device, so its states cannot be in host memory. Use"
            ' offload={"parameters": "cpu"} with zero_stage=3, or an optimizer that steps each element by itself.'
        )
    if own and not sharded and not host:
        return lambda: None
    if reach is Reach.ELEMENT:
        return step_on_shards(optimizer, host, keep=not offloaded)

    def take(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return shard(parameter, tensor).clone()  # a view, kept as a state, would keep the full tensor

    stand_ins = StandIns(optimizer, full, take)
    if reach is Reach.TENSOR:
        return step_one_at_a_time(optimizer, stand_ins)
    return step_all_gathered(optimizer, stand_ins, mean)


def move_states(optimizers: Iterable[Optimizer], device: torch.device, host: bool = False) -> None:
    """Put each state where its parameter is: in host memory with offload, else on `device`; with `host` there.

    Step counts stay where they are: torch's optimizers want them on the CPU.
    """
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            home = key.device if isinstance(key, Tensor) and not key.is_meta else device
            home = torch.device("cpu") if host else home
            if isinstance(state, MutableMapping):
                state.update({name: value if name == "step" else _moved(value, home) for name, value in state.items()})
            else:
                optimizer.state[key] = _moved(state, home)


def _moved(state: Any, home: torch.device) -> Any:
    return apply_to_collection(state, Tensor, lambda tensor: tensor.to(home), allow_frozen=True)


def check_state(optimizer: Optimizer) -> None:
    """Raise where its `__init__` skipped torch's: it has no hooks by which its state is gathered."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.__init__ does not call that of torch.optim.Optimizer, so that its state, of"
            " which a rank has a shard, cannot be gathered for checkpoints. Call super().__init__, or use zero_stage=0"
            " with data ranks alone."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes, own = {each.shape for each in parameters if isinstance(each, DTensor)}, set(map(id, parameters))
    for name, value in vars(optimizer).items():
        kept = leaves(value) if name not in ("state", "param_groups", "defaults") else ()
        if any(
            isinstance(each, Tensor) and each.is_floating_point() and each.numel() > 1 and each.shape in shapes
            for each in kept
            if id(each) not in own
        ):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps tensors as large as its parameters in {name!r}. Its step gets shards"
                " of the parameters, and could not compute with both. Keep them in its state (self.state[parameter]),"
                " made in the first step, or use data parallelism with zero_stage=0."
            )


def refuse_new_parameters(optimizer: Optimizer, table: Parameters, layout: Layout) -> Callable[[], None]:
    """Refuse parameters that `table` does not have, now and in `optimizer.step`; returns what undoes it.

    Tensor ranks need nothing: they compute the same gradients. Checked in the step, since parameters come by
    `add_param_group` of the optimizer, by that of Lightning's wrapper, or into a group's list.
    """
    if layout.gradient_ranks == 1 and not layout.pipelined:
        return lambda: None
    known, original = _checked(optimizer, table), optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if _count(self) != known:
            known = _checked(self, table)
        return original(*args, **kwargs)

    return replace_step(optimizer, step)


def _checked(optimizer: Optimizer, table: Parameters) -> int:
    new = [each for group in optimizer.param_groups for each in group["params"] if table.of(each) is None]
    if new:
        raise UnsupportedError(
            f"{type(optimizer).__name__} was given {len(new)} parameters (shape {tuple(new[0].shape)}, ...) that the"
            " module did not have when it was placed on its ranks: their gradients are not averaged over the data"
            " ranks, and other pipeline stages do not know of them. Make their modules in __init__, setup or"
            " configure_model; add_param_group may be given their parameters when they are to train. A head that"
            " begins anew keeps its parameters: reset_parameters()."
        )
    return _count(optimizer)


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def follow_mean(reduce: Callable[[Tensor], Tensor], device: torch.device, undo: UndoStack) -> None:
    """Have each `ReduceLROnPlateau` follow the mean of its metric over data ranks, as on one device.

    Each rank may log that of its own samples. Learning rates would differ, also those of shards of one weight.
    """
    plain = ReduceLROnPlateau.step

    @wraps(plain)
    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, reduce(torch.tensor(float(metrics), device=device)), *args, **kwargs)

    undo.set(ReduceLROnPlateau, "step", step)  # on an object it would be in checkpoints
