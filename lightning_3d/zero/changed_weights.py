"""Gathered weights in a training step: a change of one would be lost with the copy, and toggles must reach it.

`toggle_optimizer` sets which of the optimizers' parameters, which are shards, get gradients. FSDP2 asks these when it
gathers, which for a step of several backwards is before the first of them.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import graph_leaves, version_of
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule, storage
from lightning_3d.sandbox.writes import RefuseWrites, step_writes

WHY = (
    "which is lost with the copies of weights that zero_stage=1 to 3 gathers for a step. zero_stage=0 keeps it where"
    " all data ranks write the same; or use a hook between steps"
)
_LATE = (
    "The step changes {!r} in place, and did not in the first three steps. A part of a shard (weight[0]) may be a copy,"
    " whose changes are lost. To change a part, use zero_stage=0, or a hook between steps."
)


@contextmanager
def unwritten(
    groups: Sequence[Any], names: Mapping[str, nn.Parameter], *, shards: bool, closely: bool | None, whole: set[int]
) -> Iterator[None]:
    """Raise where the code inside changes gathered parameters, or a copy of a part of a shard.

    Args:
        shards: shards must not change either: those that are being gathered would be a step late.
        closely: intercept each call. Torch does not count writes through `.data`, but interception costs time.
        whole: ids of parameters that earlier steps have changed. With `closely=None` optimizers step inside.
    """
    params = [param for group in groups for param in group.fsdp_params]
    before = [_writes(param) for param in params]

    def watched() -> Iterator[tuple[str, Tensor]]:
        name_of = {id(shard): name for name, shard in names.items()}
        for group in groups:
            for param in group.fsdp_params:
                if group.is_unsharded:
                    yield name_of[id(param.sharded_param)], param._unsharded_param
                if shards:
                    yield name_of[id(param.sharded_param)], param.sharded_param

    rules = RefuseWrites(watched, WHY), RefuseOfShards(groups, names)
    with Interceptor(*rules) if closely else nullcontext(), _parametrized() as kept:
        yield
    for param, (full, writes, shard) in zip(params, before, strict=True):
        now, writes_now, shard_now = _writes(param)
        moved = shard_now != shard
        new = moved and id(param) not in whole
        if new:
            whole.add(id(param))
        lost = (shards and moved) or (full in (None, now) and writes_now != writes + kept[now])
        if lost or (new and closely is False):
            name = next(name for name, item in names.items() if item is param.sharded_param)
            if lost:
                raise step_writes(name, WHY)
            warnings.warn(_LATE.format(name), stacklevel=4)


class RefuseOfShards(Rule):
    """Refuse `torch.autograd.grad` by shards: blocks compute with gathered weights, so nothing depends on them.

    Refuse a write to a part of a shard that crosses ranks too (`weight[0].mul_(2)`): torch makes a copy of it.
    """

    def __init__(self, groups: Sequence[Any], names: Mapping[str, nn.Parameter]) -> None:
        self.groups, self.names = groups, names

    def before(self, call: Call) -> Call:
        if call.func is torch.autograd.grad:
            for name in _shards_among(call.tensors(), self.groups, self.names):
                raise by_shards(name)
        views = [(each._base, each) for each, _ in call.targets if isinstance(each, DTensor)]
        copies = [base for base, each in views if base is not None and storage(base) != storage(each)]
        for name in _shards_among(copies, self.groups, self.names):
            raise step_writes(name, WHY)
        return call


def refuse_shards(
    loss: Tensor, inputs: Iterable[Tensor], groups: Sequence[Any], names: Mapping[str, nn.Parameter]
) -> None:
    """Raise for a shard among the `inputs` of a backward, or at an end of the graph of `loss`."""
    for name in _shards_among([*inputs, *graph_leaves(loss)], groups, names):
        raise by_shards(name)


def _shards_among(tensors: Sequence[Tensor], groups: Sequence[Any], names: Mapping[str, nn.Parameter]) -> Iterator[str]:
    here = {id(tensor) for tensor in tensors}
    shards = {id(param.sharded_param) for group in groups for param in group.fsdp_params} & here
    return (name for name, parameter in names.items() if id(parameter) in shards)


def by_shards(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"training_step differentiates by a shard of {name!r}: by torch.autograd.grad or backward(inputs=), or in a"
        " torch.autograd.Function that takes parameters, as torchdiffeq's odeint_adjoint does (odeint takes none)."
        " Blocks compute with gathered weights, so the gradient would be lost. Use zero_stage=0."
    )


@contextmanager
def _parametrized() -> Iterator[Counter[int | None]]:
    """Count how often the code inside parametrizes each parameter, as PEFT does with stacked experts in a forward.

    Torch sets the parameter to itself then, which counts as one write.
    """
    counts: Counter[int | None] = Counter()

    def note(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if isinstance(owner, ParametrizationList) and not any(hasattr(each, "right_inverse") for each in owner):
            counts[id(parameter)] += 1

    with register_module_parameter_registration_hook(note):
        yield counts


def _writes(param: Any) -> tuple[int | None, int, int]:
    """The identity of the gathered parameter, and the numbers of writes to it and to the shard.

    Another tensor is gathered where a step changes the dtype. Gathering does not count as a write.
    """
    gathered = getattr(param, "_unsharded_param", None)
    shard = version_of(param.sharded_param)
    return (None, 0, shard) if gathered is None else (id(gathered), version_of(gathered), shard)


_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def follow_toggles(module: nn.Module, follow: Callable[[], None], undo: UndoStack) -> None:
    """Call `follow` after each toggle. `undo` reverts it."""
    if getattr(module, "automatic_optimization", True):
        return

    def followed(name: str) -> Callable[..., None]:
        original = getattr(module, name)

        def toggle(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            follow()

        return toggle

    for name in _TOGGLES:
        undo.set(module, name, followed(name))
