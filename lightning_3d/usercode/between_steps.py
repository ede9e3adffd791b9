"""The user's code between steps that computes with parameters: hooks (`hooks.py`), optimizers that are not torch's.

Elementwise code works on shards too. Operations that torch would compute wrongly there are done correctly, or refused.
Numbers read from a shard are read from the full tensor. Parameters of other stages are on meta, and adding one to a
real one would change nothing. See `shard_rules.py` for single operations.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import NO_PIPELINE, UnsupportedError, is_meta_error
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import complete, unsharded
from lightning_3d.sandbox.interceptor import Call, Rule, assigns_data
from lightning_3d.usercode.remote_numbers import RemoteNumbers, is_view
from lightning_3d.usercode.shard_rules import REMEDY, ShardRules, is_copy

_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_DEVICE: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_TORCH, _OURS = os.path.dirname(torch.__file__), str(Path(__file__).parents[1])
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_CALL_MODULE = nn.Module.__call__.__code__  # type: ignore[attr-defined]
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__")


def on_another_stage(name: str, why: object) -> UnsupportedError:
    """The error where `name` reads a value of another stage."""
    return UnsupportedError(
        f"{name} reads numbers of a weight that another stage of the pipeline owns ({why}). The norm"
        " of all gradients is trainer.strategy.grad_norm(). Compute other numbers in training_step, where a logged"
        f" value is the same on every rank. Or use {NO_PIPELINE}."
    )


class HookRules(Rule):
    """The rules for the code called `name` between steps of `parallel`.

    Args:
        name: of a hook or an optimizer's step, for errors.
        read: places in the code at which numbers were read from weights.
        gathered: gives the gathered parameters with the shards to use in their place. A call of a block in a hook
            gathers more of them.
        numbers: gives numbers of other stages' tensors; without it they are refused.
    """

    def __init__(
        self,
        name: str,
        parallel: ParallelModule | None,
        read: set[str],
        gathered: Callable[[], Sequence[tuple[Tensor, nn.Parameter]]] = tuple,
        numbers: RemoteNumbers | None = None,
    ) -> None:
        self.gathered = gathered
        self.shard_of: dict[int, nn.Parameter] = {}
        """By the id of each parameter that was used: its shard, where it is gathered, or itself."""
        self.name, self.read = name, read
        self.shards = None if parallel is None else ShardRules(name, parallel)
        self.numbers = numbers
        self.one_stage = parallel is not None and parallel.stages is None

    def before(self, call: Call) -> Call:
        if self._uses_parameters(call):
            args, kwargs = tree_map(lambda leaf: self.shard_of.get(id(leaf), leaf), (call.args, call.kwargs))
            call = call._replace(args=args, kwargs=kwargs)
        if self.one_stage and (call.func == _GRAD or not any(map(_may_be_parts, (*call.args, *call.kwargs.values())))):
            return call  # nearly all that hooks do
        if self.numbers is not None and call.caller.f_code.co_filename.startswith(_OURS):
            return call  # the package's own code
        return Call(self._run, (call,), {}, call.caller, ())

    def _run(self, call: Call) -> Any:
        func, args, kwargs, caller, _ = call
        if self.numbers is not None and func == _GRAD:
            return self.numbers.gradient(args[0], _place(self.name, caller))
        if self.numbers is not None and func == _DEVICE:
            return self.numbers.device(args[0])
        for operands in () if self.one_stage else _together(func, (*args, *kwargs.values())):
            # A single number may come from anywhere.
            large = [tensor for tensor in operands if tensor.dim()] or operands
            if len({tensor.is_meta for tensor in large}) > 1:
                raise UnsupportedError(
                    f"{self.name} computes with a tensor of this rank and one that another stage of the pipeline owns."
                    " An example is the weight of a target network and the weight that it follows. Use"
                    f" {NO_PIPELINE}."
                )
        if assigns_data(func) and isinstance(args[0], DTensor):
            with torch.no_grad():  # the attribute of a DTensor is not where its values are
                return self._compute(Tensor.copy_, args, {}, nullcontext())
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], Tensor):
            args = (self._read(args[0], caller), *args[1:])
        if func == _IS_META and caller.f_code.co_filename == nn.init.__file__ and args[0].is_meta:
            raise UnsupportedError(
                f"{self.name} initialises a tensor that another stage of the pipeline owns by"
                f" {caller.f_code.co_name.removeprefix('_no_grad_')}. On this rank it draws nothing, so all later"
                f" random numbers would differ. Do so in setup, or use {NO_PIPELINE}."
            )
        harmless = _is_plain(func) and not any(map(is_copy, args))
        result = self._compute(func, args, kwargs, nullcontext() if harmless else self.shards or nullcontext())
        if isinstance(result, DTensor | list | tuple) and not is_view(func):
            result = tree_map(lambda leaf: self._plain(leaf, caller), result)
        if self.numbers is None:
            return result
        return self.numbers.passed_on(func, args, kwargs, result, _place(self.name, caller))

    def _uses_parameters(self, call: Call) -> bool:
        """True where `call` uses a parameter itself. A block that is called needs its parameters gathered.

        Gradients of a window are where it is gathered.
        """
        values = (*call.args, *call.kwargs.values())
        nested = any(isinstance(value, list | tuple | dict) for value in values)
        used = [leaf for leaf in (call.tensors() if nested else values) if isinstance(leaf, nn.Parameter)]
        if not used or call.func == _GRAD or _in_module(call.caller):
            return False
        new = {id(parameter): parameter for parameter in used if id(parameter) not in self.shard_of}
        if new:
            self.shard_of |= new | {id(full): shard for full, shard in self.gathered()}
        return any(self.shard_of[id(parameter)] is not parameter for parameter in used)

    def _plain(self, leaf: Any, caller: FrameType) -> Any:
        """A number computed from a full tensor (a norm) as a plain tensor, to go with those of unsplit tensors.

        Norms of rows are complete: torch changes no parts of a sum in place.
        """
        if not isinstance(leaf, DTensor):
            return leaf
        return self._read(leaf, caller) if not leaf.dim() else complete(leaf)

    def _read(self, tensor: Tensor, frame: FrameType) -> Tensor:
        """The full tensor, from which numbers are read.

        All ranks that have a shard must read. A rank that reads alone (`if trainer.is_global_zero:`) is found the first
        time at each place in the code, before its messages meet others.
        """
        source = self.numbers.owner(tensor) if self.numbers is not None else None
        if tensor.is_meta and (source is None or tensor.dim()):
            raise on_another_stage(self.name, "a number is read from it")
        if not isinstance(tensor, DTensor):
            if source is None or self.numbers is None or tensor.dim():
                return tensor
            return self.numbers.shared(tensor, source, "item", _place(self.name, frame))
        if not all(placement.is_replicate() for placement in tensor.placements):
            talk.meet_once(_place(self.name, frame), tensor.device_mesh.mesh.flatten().tolist(), self.read)
        if self.shards is None:
            return unsharded(tensor)
        owner = self.shards.owner(tensor, "reads numbers from")
        return unsharded(tensor) if owner is None else self.shards.parallel.parameters.full(owner, tensor)

    def _compute(self, func: Any, args: Any, kwargs: Any, within: AbstractContextManager[Any]) -> Any:
        try:
            with within:
                return _by_kind(func, args, kwargs) if _is_foreach(func) else func(*args, **kwargs)
        except (RuntimeError, TypeError, AssertionError) as error:
            if is_meta_error(error):
                raise on_another_stage(self.name, error) from error
            ours = isinstance(error, AssertionError) and any(map(_may_be_parts, args))
            if not ours and not any(
                text in str(error) for text in ("DTensor", "sharding strategy", "sharded dimension")
            ):
                raise
            raise UnsupportedError(
                f"{self.name} computes something with parameters that is not possible on the shard of a rank"
                f" ({type(error).__name__}: {error}). Operations on each element are possible. To set a full tensor,"
                f" use load_state_dict. {REMEDY}"
            ) from error


def _in_module(frame: FrameType | None) -> bool:
    """Return True if `frame` is part of a call of a module."""
    while frame is not None and frame.f_code is not _CALL_MODULE:
        frame = frame.f_back
    return frame is not None


def _place(name: str, frame: FrameType) -> str:
    """The line of the user's code that `frame` runs, for errors."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"reading a weight in {name} (line {frame.f_lineno})"


@cache
def _is_plain(func: Any) -> bool:
    """True where torch declares that it draws nothing and makes no view. `ShardRules` is not needed then: it costs more
    than most of what optimizers do."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__") and name != "__get__"  # of an attribute, such as T, which is a view
    bases = (name.strip("_"), name.strip("_")[1:]) if special else (name,)
    packet = next((getattr(torch.ops.aten, each) for each in bases if hasattr(torch.ops.aten, each)), None)
    if packet is None:
        return False
    overloads = [getattr(packet, each) for each in packet.overloads()]
    first = [each._schema.arguments[0].alias_info for each in overloads if each._schema.arguments]
    draws = any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
    return not draws and all(alias is None or alias.is_write for alias in first)


def _may_be_parts(value: Any) -> bool:
    return isinstance(value, DTensor | list | tuple | dict)


def _together(func: Any, values: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Tensors that are computed with each other."""
    name = getattr(func, "__name__", "")
    if name == "__deepcopy__":  # comes with a memo of everything that was copied before
        return
    if not _is_foreach(func):
        yield [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return
    lists = [value for value in values if isinstance(value, list | tuple)]
    for row in zip(*lists, strict=False):
        yield [item for item in row if isinstance(item, Tensor)]


def _is_foreach(func: Any) -> bool:
    return getattr(func, "__name__", "").startswith("_foreach")


def _by_kind(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on lists in groups: it takes only tensors sharded over the same ranks, or all on meta."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    kinds = [_kind(row) for row in zip(*lists, strict=False)]
    if len(set(kinds)) < 2:
        return func(*args, **kwargs)
    results: list[Any] = [None] * len(kinds)
    for kind in set(kinds):
        chosen = [index for index, other in enumerate(kinds) if other == kind]

        def pick(value: Any, chosen: list[int] = chosen) -> Any:
            return [value[index] for index in chosen] if isinstance(value, list | tuple) else value

        some = func(*map(pick, args), **{key: pick(value) for key, value in kwargs.items()})
        for index, result in zip(chosen, some or [], strict=False):
            results[index] = result
    return results


def _kind(tensors: Sequence[Any]) -> tuple[Any, bool]:
    """The mesh that tensors are sharded over, and True if they belong to another stage."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    return mesh, any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors)
