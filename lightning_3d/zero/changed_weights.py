"""Gathered weights in a training step: a change of one would be lost with the copy, and toggles must reach it.

`toggle_optimizer` sets which of the optimizers' parameters, which are shards, get gradients. FSDP2 asks these when it
gathers, which for a step of several backwards is before the first of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from lightning_3d.errors import UnsupportedError, module_of
from lightning_3d.module.torch_private import version_of
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule, is_memory, storage
from lightning_3d.sandbox.writes import RefuseWrites, step_writes

WHY = (
    "which is lost with the copies of weights that zero_stage=1 to 3 gathers for a step. zero_stage=0 keeps it where"
    " all data ranks write the same; or use a hook between steps"
)


@contextmanager
def unwritten(
    groups: Sequence[Any], names: Mapping[str, nn.Parameter], *, closely: bool, step: str = "training_step"
) -> Iterator[None]:
    """Raise where the code inside changes gathered parameters; `closely` also through `.data`, which takes time."""
    params = [param for group in groups for param in group.fsdp_params]
    before = [_writes(param) for param in params]
    name_of = {id(shard): name for name, shard in names.items()}

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for param in (param for group in groups if group.is_unsharded for param in group.fsdp_params):
            yield name_of[id(param.sharded_param)], param._unsharded_param

    fulls = [(getattr(param, "_unsharded_param", None), group) for group in groups for param in group.fsdp_params]
    groups_of = {storage(full): group for full, group in fulls if full is not None}
    late = lambda memory: memory in groups_of and not groups_of[memory].is_unsharded  # noqa: E731
    rules = RefuseWrites(gathered, WHY), RefuseFreed(step, late)
    with Interceptor(*rules) if closely else nullcontext(), _parametrized() as kept:
        yield
    for param, (full, writes) in zip(params, before, strict=True):
        now, writes_now = _writes(param)
        if full in (None, now) and writes_now != writes + kept[now]:
            raise step_writes(name_of[id(param.sharded_param)], WHY)


_OF_NO_VALUES = ("__get__", "__set__", "untyped_storage", "data_ptr", "size", "dim", "numel", "stride", "__hash__")


@dataclass
class RefuseFreed(Rule):
    """Refuse calls in the code called `name` that use memory which ZeRO has freed, or fills again: a `late` one."""

    name: str
    late: Callable[[int], bool] = lambda memory: False

    def before(self, call: Call) -> Call:
        used = () if call.name in _OF_NO_VALUES else filter(is_memory, map(local, call.tensors()))
        freed = any(not each.untyped_storage().nbytes() or self.late(storage(each)) for each in used)
        callers = [module_of(frame) for frame in (call.caller, call.outside) if freed]
        if freed and not any(each.startswith(("lightning_3d.", "torch.distributed.")) for each in callers):
            raise UnsupportedError(
                f"{self.name} uses a tensor that code has kept of a gathered weight ({call.place}). ZeRO frees this"
                " memory when a block or a step ends. Ask the module for its weight each time, or keep a clone of it."
            )
        return call


@dataclass
class RefuseOfShards(Rule):
    """Refuse `torch.autograd.grad` by shards: blocks compute with gathered weights, so nothing depends on them."""

    groups: Sequence[Any]
    names: Mapping[str, nn.Parameter]

    def before(self, call: Call) -> Call:
        if call.func is torch.autograd.grad:
            self.check(call.tensors())
        return call

    def check(self, tensors: Iterable[Tensor], loss: Tensor | None = None) -> None:
        """Raise for a shard among `tensors`: inputs of the backward of `loss`, or ends of its graph."""
        if isinstance(loss, DTensor):
            raise RuntimeError("the loss is a DTensor")  # `explain_shard_errors` explains it
        here = {id(tensor) for tensor in tensors}
        shards = {id(param.sharded_param) for group in self.groups for param in group.fsdp_params} & here
        for name in (name for name, parameter in self.names.items() if id(parameter) in shards):
            raise UnsupportedError(
                f"training_step differentiates by a shard of {name!r}: by torch.autograd.grad or backward(inputs=), or"
                " in a torch.autograd.Function that takes parameters, as torchdiffeq's odeint_adjoint does (odeint"
                " takes none). Blocks compute with gathered weights, so the gradient would be lost. Use zero_stage=0."
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


def _writes(param: Any) -> tuple[int | None, int]:
    """The identity of the gathered parameter, and the number of writes to it.

    Another tensor is gathered where a step changes the dtype. Gathering does not count as a write.
    """
    gathered = getattr(param, "_unsharded_param", None)
    return (None, 0) if gathered is None else (id(gathered), version_of(gathered))


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

    for name in ("toggle_optimizer", "untoggle_optimizer"):
        undo.set(module, name, followed(name))
