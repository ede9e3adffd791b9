"""Steps of an optimizer whose states or parameters are on a disk: a few parameters at a time.

While some parameters are stepped, the next ones and their states are read, and the last ones are written.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import ConfigurationError, UnsupportedError
from lightning_3d.module.undo import UndoStack, replaced_entries
from lightning_3d.offload.disk_file import PAGE, DiskFile, paged
from lightning_3d.offload.disk_tensors import SMALL, DiskTensor, DiskTransfers, without_base
from lightning_3d.offload.offload_choice import Place
from lightning_3d.optim.probe import KNOWN, Reach, bytes_per_byte, needs_all_parameters, step_small
from lightning_3d.optim.sharded_steps import Closure, replace_step
from lightning_3d.ranks import agreement
from lightning_3d.ranks.shards import like, local

_UNITS = 3
"""Parts of the budget: parameters that are read, that are stepped, and that are written."""
_REMEDY = 'Leave "optimizer" and "parameters" out of offload, or use another optimizer.'


@dataclass
class _Unit:
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    parameters: list[nn.Parameter] = field(default_factory=list)
    nbytes: int = 0
    last: bool = False
    """True for the last one of its group."""


class DiskSteps:
    """Steps `optimizer` unit by unit. Tensors on the disk can be read by any code, also after the run.

    The step of `optimizer` is that of the layout already. States are in `file`, or in memory without one. `shard` gives
    the disk tensor of a parameter, None where it is in memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        transfers: DiskTransfers,
        file: DiskFile | None,
        shard: Callable[[nn.Parameter], DiskTensor | None],
    ) -> None:
        self.optimizer, self.transfers, self.file, self.shard = optimizer, transfers, file, shard
        self.ratios = checked_states(optimizer)
        self.states: dict[nn.Parameter, dict[str, DiskTensor]] = {}
        self._reserve()

    def start(self) -> Callable[[], None]:
        """Move states that are there to the disk, and step unit by unit from now on; returns what undoes it."""
        self.store_all()
        with ExitStack() as undo:
            undo.callback(replace_step(self.optimizer, self._stepping(self.optimizer.step)))
            undo.callback(self.optimizer.register_load_state_dict_post_hook(lambda _: self.store_all()).remove)
            return undo.pop_all().close

    def _reserve(self) -> None:
        """Have room on the disk for the states that are not there yet, and in the budget for the largest parameter."""
        room = 0
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            for parameter in _here(group):
                size = self._bytes(parameter, ratio)
                self.transfers.check(size, f"a parameter of shape {tuple(parameter.shape)} with its states")
                room += int(ratio * _nbytes(parameter)) + (int(ratio) + 1) * PAGE
        if self.file is not None:
            self.file.reserve(room, f"the states of {type(self.optimizer).__name__}")

    def _bytes(self, parameter: nn.Parameter, ratio: float) -> int:
        """Bytes of a parameter that a step needs in memory."""
        shard = self.shard(parameter)
        states = 0 if self.file is None else int(ratio * paged(_nbytes(parameter)))
        return states + (0 if shard is None else shard.nbytes)

    @torch.no_grad()
    def store_all(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in _here(group):
                self._store_new(parameter)
        self.transfers.finish()

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Optimizer, closure: Closure = None, **kwargs: Any) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            with torch.no_grad(), _hooks_once(optimizer, kwargs):
                self._step(lambda: original(**kwargs))
            return loss

        return step

    def _step(self, original: Callable[[], Any]) -> None:
        optimizer, groups, transfers = self.optimizer, self.optimizer.param_groups, self.transfers
        units = list(self._units())
        try:
            for unit, following in zip(units, [*units[1:], None], strict=True):
                batch = transfers.fetch(self._items(unit))
                if following is not None:
                    transfers.prefetch(self._items(following))
                stepped = {**unit.group, "params": unit.parameters}
                optimizer.param_groups = [stepped]
                original()
                if unit.last:  # each unit sees the values of its group as they were before the step
                    unit.group.update({name: value for name, value in stepped.items() if name != "params"})
                for parameter in unit.parameters:
                    self._follow(parameter)
                transfers.put_back(batch, changed=True)
                for parameter in unit.parameters:
                    self._store_new(parameter)
        finally:
            optimizer.param_groups = groups
            transfers.finish()

    def _units(self) -> Iterator[_Unit]:
        most = self.transfers.budget // _UNITS
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            units = [_Unit(group)]
            for parameter in _here(group):
                if parameter.grad is None:
                    continue
                size = self._bytes(parameter, ratio)
                if units[-1].parameters and units[-1].nbytes + size > most:
                    units.append(_Unit(group))
                units[-1].parameters.append(parameter)
                units[-1].nbytes += size
            units[-1].last = True
            yield from (unit for unit in units if unit.parameters)

    def _items(self, unit: _Unit) -> list[DiskTensor]:
        items = []
        for parameter in unit.parameters:
            shard = self.shard(parameter)
            items += [] if shard is None else [shard]
            items += self.states.get(parameter, {}).values()
        return items

    def _follow(self, parameter: nn.Parameter) -> None:
        """Note which tensors the optimizer has put in the place of others."""
        known = self.states.get(parameter, {})
        for key, value in self._large(parameter):
            if key in known and known[key].tensors[0] is not value and known[key].nbytes == paged(value.nbytes):
                known[key].tensors = (value,)

    def _store_new(self, parameter: nn.Parameter) -> None:
        """Move states of `parameter` that are in memory to the disk."""
        if self.file is None or parameter not in self.optimizer.state:
            return
        known = self.states.setdefault(parameter, {})
        new = {
            key: value
            for key, value in self._large(parameter)
            if key not in known or known[key].tensors[0] is not value
        }
        plain = [without_base(value) for value in new.values()]
        stored = self.transfers.store(self.file, [[value] for value in plain])
        state = self.optimizer.state[parameter]
        for key, value, item in zip(new, plain, stored, strict=True):
            state[key] = like(state[key], value)
            item.tensors = (local(state[key]),)
            known[key] = item

    def _large(self, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
        """The states of `parameter` that are worth a place on the disk."""
        entries = self.optimizer.state.get(parameter, {})
        found = [(key, local(value)) for key, value in entries.items() if isinstance(value, Tensor)]
        return [(key, value) for key, value in found if value.nbytes >= SMALL]


def offload_states(
    optimizer: Optimizer,
    place: Place | None,
    transfers: DiskTransfers | None,
    shard: Callable[[nn.Parameter], DiskTensor | None],
    undo: UndoStack,
) -> None:
    """Have `optimizer` step from the disk where its states or parameters are. Collective; raises on every rank."""
    folder = None if place is None else place.folder
    shards = (shard(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if transfers is None or (folder is None and all(each is None for each in shards)):
        return

    def steps() -> DiskSteps:
        return DiskSteps(optimizer, transfers, None if folder is None else DiskFile(Path(folder)), shard)

    undo.callback(agreement.together(steps, ConfigurationError).start())


def checked_states(optimizer: Optimizer) -> list[float]:
    """Bytes of states for each byte of a parameter, of each group. Raises if units of parameters cannot be stepped."""
    kind = type(optimizer).__name__
    groups = optimizer.param_groups
    if KNOWN.get(type(optimizer)) is Reach.ALL:
        raise UnsupportedError(f"{kind} needs all parameters and states at the same time. {_REMEDY}")
    if not any(list(_here(group)) for group in groups):
        return [0.0] * len(groups)
    try:
        trial = step_small(optimizer, steps=1)
        together = type(optimizer) not in KNOWN and needs_all_parameters(optimizer)
    except Exception as error:  # of any kind: it is the user's code, on parameters that it was not built with
        raise UnsupportedError(
            f"{kind} could not be tried ({type(error).__name__}: {error}), so its states cannot be on a disk. {_REMEDY}"
        ) from error
    if trial.calls > 1 or together:
        how = "evaluates the loss several times" if trial.calls > 1 else "computes a number from all parameters"
        raise UnsupportedError(f"{kind} {how} in a step, which steps some parameters at a time here. {_REMEDY}")
    for parameter, key, value in _states(trial.twin):
        if value.shape != parameter.shape and value.numel() > 1:
            raise UnsupportedError(
                f"{kind} has a state {key!r} of shape {tuple(value.shape)} for a parameter of shape"
                f" {tuple(parameter.shape)}. Only states of the shape of their parameter can be on a disk. {_REMEDY}"
            )
    return [
        bytes_per_byte(trial.twin, group["params"]) if group["params"] else 0.0 for group in trial.twin.param_groups
    ]


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    yield parameter, key, value


@contextmanager
def _hooks_once(optimizer: Optimizer, kwargs: dict[str, Any]) -> Iterator[None]:
    """Call the hooks on the step of `optimizer` before and after the code inside, and not in each step of a unit."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in list(before.values()):
        hook(optimizer, (), kwargs)
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    with replaced_entries((vars(optimizer), name, OrderedDict()) for name in names):
        yield
    for hook in list(after.values()):
        hook(optimizer, (), kwargs)


def _here(group: dict[str, Any]) -> Iterator[nn.Parameter]:
    """The parameters of `group` that this rank has."""
    return (parameter for parameter in group["params"] if not parameter.is_meta)


def _nbytes(parameter: nn.Parameter) -> int:
    return local(parameter.detach()).nbytes
