"""The user's code between steps that computes with parameters: hooks (`hooks.py`), optimizers that are not torch's.

Elementwise code works on shards too. Operations that torch would compute wrongly there are done correctly, or refused.
Numbers read from a shard are read from the full tensor. Parameters of other stages are on meta, and adding one to a
real one would change nothing.

Random numbers: each rank would draw for its shard from the same stream, so that shards repeat each other. Views: a
slice across the shards of several ranks is a copy, and what is written into it is lost.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import NO_PIPELINE, UnsupportedError, is_meta_error
from lightning_3d.module.torch_private import TorchDispatchMode, schema, tree_leaves, tree_map
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import complete, like, local, unsharded
from lightning_3d.sandbox.interceptor import Call, Rule, assigns_data, storage
from lightning_3d.usercode.remote_numbers import RemoteNumbers, is_plain, is_pointwise, is_view

REMEDY = "Do so in setup, where tensors are unsplit, or use data parallelism with zero_stage=0."
_COPY = "_lightning_3d_copy"
"""Set on a tensor that would be a view on one device, and is a copy here."""


def is_copy(tensor: Any) -> bool:
    """Return True for a copy that would be a view on one device."""
    return hasattr(tensor, _COPY)


class ShardRules(TorchDispatchMode):
    """Entered around one operation of the code called `name`, which uses parameters of `parallel.module`."""

    def __init__(self, name: str, parallel: ParallelModule) -> None:
        super().__init__()
        self.name, self.parallel = name, parallel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        arguments = schema(func).arguments
        named = ((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)
        for argument, value in (*zip(arguments, args, strict=False), *named):
            if argument.is_write and any(map(is_copy, tree_leaves(value))):
                raise UnsupportedError(
                    f"{self.name} writes into a slice of a sharded tensor. The slice crosses the shards of several"
                    " ranks, so it is a copy, and the tensor would not change. In on_train_batch_start or"
                    " on_train_batch_end, assign to it (weight[0] = values), or write into the same slice of the weight"
                    f" in self.state_dict(), called on every rank: the weight follows. {REMEDY}"
                )
        result = func(*args, **kwargs)
        if arguments and arguments[0].alias_info is not None and not arguments[0].is_write:
            self._note_copies(args[0], result)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw for the full tensor, as one device does, and keep this rank's shard."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self._concerns, tensors)):
            return func(*args, **kwargs)
        drawn_for, name = tensors[0], func.overloadpacket.__name__
        if len(tensors) > 1 or not name.endswith(("_", "_like")):
            raise UnsupportedError(
                f"{self.name} draws random numbers ({name}) by the values of a sharded tensor. They would not be those"
                f" of one device. Draw them with torch.rand_like(weight) first. {REMEDY}"
            )
        if self.parallel.stages is not None and self._is_gradient(drawn_for):
            raise UnsupportedError(
                f"{self.name} draws random numbers for a gradient. Other stages of the pipeline do not have it and"
                " would draw nothing, so all later random numbers would differ. Draw them for the parameter"
                f" instead (torch.randn_like(weight)), or use {NO_PIPELINE}."
            )
        here = drawn_for.device
        if drawn_for.is_meta:  # all ranks go through as many numbers
            here = next((p.device for p in self.parallel.module.parameters() if not p.is_meta), torch.device("cpu"))
        full = torch.empty_strided(drawn_for.shape, drawn_for.stride(), dtype=drawn_for.dtype, device=here)
        drawn = func(full, *args[1:], **kwargs)
        if drawn_for.is_meta:
            return drawn_for if name.endswith("_") else torch.empty_like(drawn, device="meta")
        if isinstance(drawn_for, DTensor):
            drawn = self.part(drawn_for, drawn, "draws random numbers for")
        return drawn_for.copy_(drawn) if name.endswith("_") else drawn

    def part(self, shard: DTensor, full: Tensor, does: str) -> Tensor:
        """The part of `full` for the rank of `shard`, as a shard. The code `does` something that needs its place."""
        owner = self.owner(shard, does)
        if owner is None:
            raise self._unknown(shard, does)
        return like(shard, local(self.parallel.parameters.shard(owner, full)))

    def _concerns(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor) or self.parallel.stages is None:
            return isinstance(tensor, DTensor)
        if tensor.is_meta:
            return any(p.is_meta and p.shape == tensor.shape for p in self.parallel.module.parameters())
        return self._is_gradient(tensor)

    def _is_gradient(self, tensor: Tensor) -> bool:
        gradients = (p.grad for p in self.parallel.module.parameters() if not p.is_meta)
        return any(grad is not None and storage(grad) == storage(tensor) for grad in gradients)

    def owner(self, tensor: DTensor, does: str) -> nn.Parameter | None:
        """A parameter that is sharded as `tensor` is, None where there is none.

        Raises where the candidates are sharded in several ways, since the code `does` something that needs to know.
        """
        shards = [held.now for held in self.parallel.parameters if isinstance(held.now, DTensor)]
        alike = [p for p in shards if (p.shape, p.placements) == (tensor.shape, tensor.placements)]
        itself = [p for p in alike if storage(tensor) in {storage(each) for each in (p, p.grad) if each is not None}]
        found = itself or alike
        if len({self.parallel.parameters.split(p) for p in found}) > 1:
            raise self._unknown(tensor, does)
        return found[0] if found else None

    def _unknown(self, tensor: Tensor, does: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} {does} a sharded tensor of shape {tuple(tensor.shape)} that is no parameter or gradient. The"
            f" place of its shards is therefore not known. Use the parameter itself. {REMEDY}"
        )

    def _note_copies(self, source: Any, result: Any) -> None:
        for view in tree_leaves(result):
            if isinstance(view, DTensor) and (is_copy(source) or storage(view) != storage(source)):
                owner = self.owner(source, "takes a slice of") if isinstance(source, DTensor) else None
                split = None if owner is None else self.parallel.parameters.split(owner)
                if split is not None and max(map(len, split.pieces)) > 1:
                    raise UnsupportedError(
                        f"{self.name} takes a slice of a fused matrix (shape {tuple(source.shape)}). Each tensor rank"
                        " has a shard of each section, so its rows are in another order here. Take the slice from"
                        f" state_dict(), called on every rank. {REMEDY}"
                    )
                setattr(view, _COPY, True)


_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_DEVICE: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_TORCH, _OURS = os.path.dirname(torch.__file__), str(Path(__file__).parents[1])
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_CALL_MODULE = nn.Module.__call__.__code__  # type: ignore[attr-defined]
_EXTREMES = ("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "norm", "vector_norm", "linalg_vector_norm")
"""Functions that torch does not define for no elements."""


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
        given = self.shards.parallel.parameters.given if self.shards is not None and call.func == _DATA else None
        if any(full is call.args[0] for full, *_ in given or ()):
            return call._replace(func=Tensor.detach)  # it counts writes for the tensor of a state
        if self._uses_parameters(call):
            used = (call.args, call.kwargs, call.targets)
            args, kwargs, targets = tree_map(lambda leaf: self.shard_of.get(id(leaf), leaf), used)
            call = call._replace(args=args, kwargs=kwargs, targets=targets)
        if self.one_stage and (call.func == _GRAD or not any(map(_may_be_parts, (*call.args, *call.kwargs.values())))):
            return call  # nearly all that hooks do
        if self.numbers is not None and call.caller.f_code.co_filename.startswith(_OURS):
            return call  # the package's own code
        return Call(self._run, (call,), {}, call.caller, ())

    def _run(self, call: Call) -> Any:
        func, args, kwargs, caller, targets = call
        written, everywhere = {id(target) for target, _ in targets}, set[int]()
        if self.numbers is not None and func == _GRAD:
            return self.numbers.gradient(args[0], _place(self.name, caller))
        if self.numbers is not None and func == _DEVICE:
            return self.numbers.device(args[0])
        for operands in () if self.one_stage else _together(func, (*args, *kwargs.values())):
            # A single number may come from anywhere.
            large = [tensor for tensor in operands if tensor.dim()] or operands
            if len({tensor.is_meta for tensor in large}) > 1:
                here = [tensor for tensor in large if not tensor.is_meta]
                if self.numbers is None or any(id(each) in written or self.numbers.owner(each) for each in here):
                    raise UnsupportedError(
                        f"{self.name} computes with a tensor of this rank and one that another stage of the pipeline"
                        " owns. An example is the weight of a target network and the weight that it follows. Use"
                        f" {NO_PIPELINE}."
                    )
                everywhere.update(map(id, here))  # masks, say: the other stage computes with its own
        if everywhere and targets and not _is_foreach(func):
            return targets[0][0]  # the other stage writes to it
        if everywhere:
            args, kwargs = tree_map(lambda leaf: leaf.to("meta") if id(leaf) in everywhere else leaf, (args, kwargs))
        if assigns_data(func) and isinstance(args[0], DTensor):
            with torch.no_grad():  # the attribute of a DTensor is not where its values are
                return self._compute(call._replace(func=Tensor.copy_, args=args), nullcontext())
        reads = call.asks in ("number", "truth", "array", "text") and isinstance(args[0], Tensor)
        if reads or lacks_elements(call.name, args, kwargs):
            args = (self.full(args[0], caller), *args[1:])
        if func == _IS_META and caller.f_code.co_filename == nn.init.__file__ and args[0].is_meta:
            raise UnsupportedError(
                f"{self.name} initialises a tensor that another stage of the pipeline owns by"
                f" {caller.f_code.co_name.removeprefix('_no_grad_')}. On this rank it draws nothing, so all later"
                f" random numbers would differ. Do so in setup, or use {NO_PIPELINE}."
            )
        harmless = is_plain(func) and not any(map(is_copy, call.tensors()))
        within = nullcontext() if harmless else self.shards or nullcontext()
        result = self._compute(call._replace(args=args, kwargs=kwargs), within)
        if isinstance(result, DTensor | list | tuple) and not is_view(func):
            result = tree_map(lambda leaf: self._plain(leaf, caller), result)
        if self.numbers is None:
            return result
        return self.numbers.passed_on(func, args, kwargs, result, _place(self.name, caller))

    def _uses_parameters(self, call: Call) -> bool:
        """True where `call` uses a parameter itself. A block that is called needs its parameters gathered.

        Gradients of a window are where it is gathered.
        """
        used = [leaf for leaf in call.tensors() if isinstance(leaf, nn.Parameter)]
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
        return self.full(leaf, caller) if not leaf.dim() else self.completed(leaf, caller)

    @torch.no_grad()
    def full(self, tensor: Tensor, frame: FrameType) -> Tensor:
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
        self._meet(tensor, frame)
        if self.shards is None:
            return unsharded(tensor)
        owner = self.shards.owner(tensor, "reads numbers from")
        return unsharded(tensor) if owner is None else self.shards.parallel.parameters.full(owner, tensor)

    def completed(self, leaf: Any, frame: FrameType) -> Any:
        """`leaf`, with the parts of a norm put together: in a list or a sum torch takes them for parts of a sum."""
        if isinstance(leaf, DTensor) and any(placement.is_partial() for placement in leaf.placements):
            self._meet(leaf, frame)
            return complete(leaf)
        return leaf

    def _meet(self, tensor: DTensor, frame: FrameType) -> None:
        if not all(placement.is_replicate() for placement in tensor.placements):
            talk.meet_once(_place(self.name, frame), tensor.device_mesh.mesh.flatten().tolist(), self.read)

    def _compute(self, call: Call, within: AbstractContextManager[Any]) -> Any:
        func, args, kwargs = call[:3]
        one = partial(self._on_full if self._is_for_full(call) else self._one, call)
        with within:
            return _by_kind(one, args, kwargs) if _is_foreach(func) else one(*args, **kwargs)

    def _is_for_full(self, call: Call) -> bool:
        """True where torch would compute on shards, and wrongly. It takes a tensor of one element for a number: as an
        index, as `quantile` has it inside, it would count rows of each shard."""
        first = call.kwargs.get("out", call.args[0] if call.args else None)
        if self.shards is None or not _may_be_parts(first) or is_copy(first):
            return False
        if call.name in ("__setitem__", "eye", "quantile", "nanquantile"):
            return True
        small = any(each.dim() and each.numel() == 1 and not isinstance(each, DTensor) for each in call.tensors())
        return small and is_plain(call.func) and not is_pointwise(call.func)

    def _one(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        try:
            return call.func(*args, **kwargs)
        except (RuntimeError, TypeError, AssertionError) as error:
            if is_meta_error(error):
                raise on_another_stage(self.name, error) from error
            ours = isinstance(error, AssertionError) and any(map(_may_be_parts, args))
            if not ours and not any(text in str(error) for text in ("DTensor", "shard")):
                raise
            if self.shards is not None and is_plain(call.func):
                return self._on_full(call, *args, **kwargs)
            raise UnsupportedError(
                f"{self.name} computes something with parameters that is not possible on the shard of a rank"
                f" ({type(error).__name__}: {error}). Operations are that take and return whole tensors (torch.where,"
                f" lerp_). state_dict(), called on every rank, has full tensors; load_state_dict sets them. {REMEDY}"
            ) from error

    def _on_full(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """The result for full tensors, where torch has none for shards (with a full one, by rows). Collective."""
        assert self.shards is not None
        shards = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)}
        full = {key: self.full(shard, call.caller) for key, shard in shards.items()}
        now = tree_map(lambda leaf: full.get(id(leaf), leaf), (args, kwargs))
        result = call.func(*now[0], **now[1])
        changed = {id(full[id(each)]): shards[id(each)] for each, _ in call.targets if id(each) in full}
        for target in changed.values():
            target.copy_(self.shards.part(target, full[id(target)], "writes into"))
        return tree_map(lambda leaf: changed.get(id(leaf), leaf), result)


def _in_module(frame: FrameType | None) -> bool:
    """Return True if `frame` is part of a call of a module."""
    while frame is not None and frame.f_code is not _CALL_MODULE:
        frame = frame.f_back
    return frame is not None


def _place(name: str, frame: FrameType) -> str:
    """The line of the user's code that `frame` runs, for errors."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    return f"reading a weight in {name} (line {frame.f_lineno})"


def lacks_elements(name: str, args: Any, kwargs: Any) -> bool:
    """Return True for an extreme of all elements, of which some rank has none: of a bias of one number, say."""
    if name not in _EXTREMES or not args or not isinstance(args[0], DTensor) or kwargs.get("dim") is not None:
        return False
    tensor, alone = args[0], len(args) == 1 or ("norm" in name and len(args) == 2)
    placed: Any = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    shards = [(tensor.shape[how.dim], ranks) for how, ranks in placed if how.is_shard()]
    return alone and any(-(-rows // ranks) * (ranks - 1) >= rows for rows, ranks in shards)


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
