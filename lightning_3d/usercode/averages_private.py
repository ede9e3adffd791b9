"""Shards for Lightning's callbacks that average weights: their copy of the module is sharded as the module is.

`WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging` copy the module in `setup`, before it is placed.
An average is computed element by element, so shards of the copy and of the module give the shards of the average.
`state_dict()` of the copy is gathered like that of the module. After the run the copy is unsplit again.

A checkpoint is loaded before the module is placed, so the callbacks restore their unsplit copy by themselves.

Reads `_average_model` of the callbacks (Lightning 2.6).
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_3d.axes.group import Group, broadcast_tensors
from lightning_3d.axes.state_dict import full_module_state
from lightning_3d.module.anatomy import place_of
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk

AVERAGES = (WeightAveraging, StochasticWeightAveraging)


def shard_averages(
    callbacks: Iterable[Callback], parallel: ParallelModule, as_saved: Callable[[], AbstractContextManager[None]]
) -> None:
    """Shard the copies of `callbacks` as `parallel` is, until it is undone. Both are collective. Callbacks return their
    states in `as_saved`: they are sharded in a sharded checkpoint.
    """
    for callback in callbacks:
        copy: Any = callback._average_model if isinstance(callback, AVERAGES) else None
        if copy is not None:
            averaged = isinstance(copy, torch.optim.swa_utils.AveragedModel)
            _shard(callback, copy.module if averaged else copy, parallel, as_saved)


def _shard(
    callback: Callback, copy: nn.Module, parallel: ParallelModule, as_saved: Callable[[], AbstractContextManager[None]]
) -> None:
    averaged, undo = _AveragedModule.of(copy, parallel), parallel.changes
    undo.collective(averaged.undo)
    parallel.parameters.add_copies(averaged.origin)
    full_module_state(copy, parallel.parameters, talk.meet, undo)
    for name in ("state_dict", "on_save_checkpoint"):
        undo.set(callback, name, _within(getattr(callback, name), as_saved))
    undo.set(copy, "to", lambda *_, **__: copy)  # shards stay with those of the module; meta tensors cannot move
    if isinstance(callback, StochasticWeightAveraging):
        undo.set(callback, "transfer_weights", averaged.transfer)


def _within(method: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return run


@dataclass(frozen=True)
class _AveragedModule:
    """A copy of the module whose parameters are sharded as those of the module."""

    copy: nn.Module
    parallel: ParallelModule
    origin: Mapping[nn.Parameter, nn.Parameter]
    """The parameter of the module for each sharded parameter of the copy."""
    plain: Mapping[str, nn.Parameter]
    """The copy's own parameters, without values."""
    absent: Mapping[str, Tensor]
    """The copy's own buffers that other stages own."""

    @classmethod
    @torch.no_grad()
    def of(cls, copy: nn.Module, parallel: ParallelModule) -> "_AveragedModule":
        module = parallel.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        broadcast_tensors([*copy.parameters(), *copy.buffers()], Group())
        plain = dict(copy.named_parameters(remove_duplicate=False))
        absent = {name: each for name, each in copy.named_buffers() if name in buffers and buffers[name].is_meta}
        shards: dict[nn.Parameter, nn.Parameter] = {}
        for name, unsplit in plain.items():
            here = parameters[name]
            if here not in shards:
                shards[here] = nn.Parameter(parallel.parameters.shard(here, unsplit.detach()), unsplit.requires_grad)
            owner, own_name = place_of(copy, name)
            owner._parameters[own_name] = shards[here]
        for name, buffer in absent.items():
            owner, own_name = place_of(copy, name)
            owner._buffers[own_name] = buffer.to("meta")
        for unsplit in plain.values():
            unsplit.data = unsplit.data.new_empty(0)
        return cls(copy, parallel, {shard: here for here, shard in shards.items()}, plain, absent)

    @torch.no_grad()
    def transfer(self, *_: object) -> None:
        """Copy the average into the module. An absent parameter (`pipeline/split.py`) reports another device."""
        for shard, here in self.origin.items():
            here.copy_(shard)

    @torch.no_grad()
    def undo(self) -> None:
        """Make the copy unsplit. Collective."""
        named, table = dict(self.copy.named_parameters(remove_duplicate=False)), self.parallel.parameters
        full = {name: table.full(shard, shard.detach()) for name, shard in named.items() if not shard.is_meta}
        full |= {name: each for name, each in self.copy.named_buffers() if not each.is_meta}
        if table.exchange is not None:
            counted = {
                name: {"value": value} for name, value in full.items() if name not in named or table.counts(named[name])
            }
            full |= {name: entry["value"] for name, entry in table.exchange(counted).items()}
        for name, unsplit in self.plain.items():
            unsplit.data = full[name]
            owner, own_name = place_of(self.copy, name)
            owner._parameters[own_name] = unsplit
        for name, buffer in self.absent.items():
            owner, own_name = place_of(self.copy, name)
            owner._buffers[own_name] = full.get(name, buffer)
