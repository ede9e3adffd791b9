"""Full states of a sharded module and of its optimizers, in every layout.

While a module is sharded, `state_dict()` of it and of its optimizers returns full tensors. `load_state_dict()` takes
full tensors too. Checkpoints and the user's own code get the same states as on one device.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.axes.parameters import Parameters
from lightning_3d.errors import NOT_USERS, UnsupportedError, module_of
from lightning_3d.module.packed_weights import PARTS_OF_SPARSE
from lightning_3d.module.torch_private import own_buffers, own_parameters
from lightning_3d.module.undo import UndoStack

Convert = Callable[[nn.Parameter, Tensor], Tensor]
Meet = Callable[[str], None]
"""Raises unless every rank asks for the same state now: gathering takes all ranks."""
Gathered = Callable[[], Sequence[tuple[Tensor, nn.Parameter]]]
"""Returns each gathered parameter, which is another object than its shard, with it."""
_as_shards: ContextVar[bool] = ContextVar("_as_shards", default=False)


@contextmanager
def as_shards() -> Iterator[None]:
    """Inside, states contain this rank's shards: nothing is gathered or sharded."""
    token = _as_shards.set(True)
    try:
        yield
    finally:
        _as_shards.reset(token)


def full_module_state(module: nn.Module, table: Parameters, meet: Meet, undo: UndoStack) -> None:
    """Let `state_dict()` gather and `load_state_dict()` shard, in `module` and everything below it.

    Tensors of other pipeline stages are in the state of `module` itself. In the state of a submodule they are on meta.
    `undo` reverts it.
    """
    owners = [owner for owner in module.modules() if any(_is_sharded(p) for p in own_parameters(owner).values())]
    if not owners and table.exchange is None:
        return

    def gather_soon(*_: object) -> None:
        if not _as_shards.get():
            meet("state_dict() of the module")

    undo.callback(module.register_state_dict_pre_hook(gather_soon).remove)

    def gather(owner: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        if _as_shards.get():
            return
        for name, parameter in own_parameters(owner).items():
            if isinstance(state.get(prefix + name), DTensor) and parameter is not None:
                state[prefix + name] = table.give(parameter, state[prefix + name])

    def take_shards(owner: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in own_parameters(owner).items():
            value = state.get(prefix + name)
            if parameter is not None and value is not None and not _is_like(value, parameter):
                state[prefix + name] = _convert(parameter, value, table.shard)
        for name, buffer in own_buffers(owner).items():
            if buffer is not None and buffer.is_meta and prefix + name in state:
                state[prefix + name] = buffer

    for owner in owners:
        undo.callback(owner.register_state_dict_post_hook(gather).remove)
        undo.callback(owner.register_load_state_dict_pre_hook(take_shards).remove)
    if table.exchange is not None:
        undo.callback(module.register_state_dict_post_hook(_from_all_stages(table, table.exchange)).remove)


def _is_sharded(parameter: nn.Parameter | None) -> bool:
    """True where this rank has only a shard of `parameter`, or nothing of it."""
    return parameter is not None and (isinstance(parameter, DTensor) or parameter.is_meta)


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    """True for a shard that is placed as that of `parameter`: a clone of it, as averages of weights are."""
    if not (isinstance(value, DTensor) and isinstance(parameter, DTensor)):
        return False
    shard: DTensor = parameter
    return (value.shape, value.device_mesh, value.placements) == (shard.shape, shard.device_mesh, shard.placements)


def _from_all_stages(table: Parameters, exchange: Callable[..., dict[Any, dict[str, Any]]]) -> Callable[..., None]:
    def complete(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        if _as_shards.get():
            return
        parameters = dict(module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False))
        mine = {
            name: {"value": value}
            for name, value in state.items()
            if isinstance(value, Tensor)
            and not value.is_meta
            and value.layout not in PARTS_OF_SPARSE  # on every stage
            and (name not in parameters or table.counts(parameters[name]))
        }
        for name, entry in exchange(mine).items():
            if isinstance(state.get(name), Tensor) and state[name].is_meta:
                state[name] = entry["value"]

    return complete


def full_optimizer_state(
    optimizer: Optimizer, table: Parameters, gathered: Gathered, meet: Meet, undo: UndoStack
) -> None:
    """Let `state_dict()` gather and `load_state_dict()` shard, in `optimizer`. `undo` reverts it.

    Code that has a gathered parameter finds the state of its shard.
    """
    if table.exchange is None and not any(_is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        return

    def gather(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _as_shards.get():
            return state
        meet("state_dict() of an optimizer")
        return _converted(optimizer, state, table.give, table)

    def take_shards(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _as_shards.get():
            return state
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        here = {
            key: value
            for key, value in state.get("state", {}).items()
            if not (isinstance(key, int) and parameters[key].is_meta)  # another stage steps it
        }
        return _converted(optimizer, {**state, "state": here}, table.shard, None)

    undo.callback(optimizer.register_state_dict_post_hook(gather).remove)
    undo.callback(optimizer.register_load_state_dict_pre_hook(take_shards).remove)

    def follow(optimizer: Optimizer) -> None:
        _replace_state(optimizer, state := _StatesHere(dict, optimizer.state))
        state.staged, state.gathered = table.exchange is not None, gathered

    follow(optimizer)
    undo.callback(lambda: _replace_state(optimizer, defaultdict(dict, optimizer.state)))
    undo.callback(optimizer.register_load_state_dict_post_hook(follow).remove)


def _replace_state(optimizer: Optimizer, state: defaultdict[Any, Any]) -> None:
    """Give `optimizer` its `state` in another object, and also an optimizer inside of it that has the same state."""
    before = optimizer.state
    for owner in (optimizer, *(each for each in vars(optimizer).values() if isinstance(each, Optimizer))):
        vars(owner).update({name: state for name, each in vars(owner).items() if each is before})


def _said(name: str) -> Callable[..., Any]:
    """The method `name` of a dict, for code of the user: it says what `optimizer.state` lacks on this rank."""
    original = getattr(defaultdict, name)

    def method(self: Any, *asked: Any) -> Any:
        frame = sys._getframe(1)
        if isinstance(frame.f_locals.get("self"), Optimizer) or f"{module_of(frame)}.".startswith(NOT_USERS):
            return original(self, *asked)
        place = f"{frame.f_code.co_name} (line {frame.f_lineno} of {frame.f_code.co_filename})"
        remedy = "optimizer.state_dict(), called on every rank, has the states of all stages."
        for full, shard in self.gathered() if asked and not dict.__contains__(self, asked[0]) else ():
            if full is asked[0]:
                return self[shard] if name == "__missing__" else original(self, shard, *asked[1:])
        if self.staged and not asked:
            rank_zero_warn(
                f"{place} goes through optimizer.state. In a pipeline it has the states of a stage's own weights, so"
                f" numbers computed from all of them are of one stage. {remedy}"
            )
        elif self.staged and isinstance(asked[0], Tensor) and asked[0].is_meta:
            raise UnsupportedError(
                f"{place} reads optimizer.state of a weight that another stage of the pipeline owns. Here it has no"
                f" state. {remedy}"
            )
        return original(self, *asked)

    return method


class _StatesHere(defaultdict[Any, Any]):
    """`optimizer.state` of shards: also by what is gathered of them. A stage has the states of its own weights."""

    staged: bool = False
    gathered: Gathered = tuple
    __missing__, __contains__, get = _said("__missing__"), _said("__contains__"), _said("get")
    __iter__, keys, values, items = _said("__iter__"), _said("keys"), _said("values"), _said("items")

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))  # a copy has no run


def _converted(
    optimizer: Optimizer, state: Mapping[str, Any], convert: Convert, stages: Parameters | None
) -> dict[str, Any]:
    """`state` with the entries that are numbered by parameter converted, and with those of all `stages`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, LBFGS):  # its state is one vector of all parameters, and full on every rank
        return {**state}
    entries = {
        key: {k: _convert(parameters[key], v, convert) for k, v in value.items()} if isinstance(key, int) else value
        for key, value in state.get("state", {}).items()
    }
    if stages is not None and stages.exchange is not None:
        mine = {key: entry for key, entry in entries.items() if isinstance(key, int) and stages.counts(parameters[key])}
        merged = {**entries, **stages.exchange(mine)}
        numbers = sorted(key for key in merged if isinstance(key, int))  # MADGRAD has a count beside them
        entries = {key: merged[key] for key in dict.fromkeys([*numbers, *merged])}
    return {**state, "state": entries}


def full_optimizer_entries(optimizer: Optimizer, table: Parameters) -> dict[int, Any]:
    """The full state of each parameter, by its place in `param_groups`. Collective."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: optimizer.state[p] for index, p in enumerate(parameters) if p in optimizer.state}
    return dict(_converted(optimizer, {"state": state}, table.full, table)["state"])


def own_entries(optimizer: Optimizer, table: Parameters) -> dict[int, Any]:
    """This rank's shards of the states that `optimizer` has from before set-up, by the place of the parameter."""
    swaps, entries = table.swaps(), dict[int, Any]()
    for place, before in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if before in swaps and before in optimizer.state and not swaps[before].is_meta:
            entry = optimizer.state[before].items()
            entries[place] = {key: _convert(swaps[before], value, table.shard) for key, value in entry}
    return entries


def _convert(parameter: nn.Parameter, value: Any, convert: Convert) -> Any:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return convert(parameter, value) if same else value


def swap_parameters(
    optimizers: Sequence[Optimizer], swaps: Mapping[nn.Parameter, nn.Parameter], entries: Sequence[Mapping[int, Any]]
) -> None:
    """Give `optimizers` the new parameters in place of the old, with `entries` as their state."""
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            current = group["params"]
            current[:] = [swaps.get(parameter, parameter) for parameter in current]  # in place: LBFGS keeps the list
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for old in [parameter for parameter in swaps if parameter in optimizer.state]:
            del optimizer.state[old]
        optimizer.state.update({parameters[place]: entry for place, entry in entries[index].items()})
