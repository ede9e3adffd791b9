"""The user's code between steps that computes with parameters: hooks (`hooks.py`), optimizers that are not torch's.

Elementwise code works on shards too. Operations that torch would compute wrongly there are done correctly, or refused.
Numbers read from a shard are read from the full tensor. Parameters of other stages are on meta, and adding one to a
real one would change nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import NO_PIPELINE, NOT_USERS, UnsupportedError, is_meta_error, module_of, outside
from lightning_3d.module.torch_private import MOVE_MODULE, tree_leaves, tree_map
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import complete, unsharded
from lightning_3d.sandbox.interceptor import Call, Rule, assigns_data
from lightning_3d.usercode.remote_numbers import RemoteNumbers, is_plain, is_pointwise, is_view
from lightning_3d.usercode.shard_rules import REMEDY, ShardRules, is_copy

_TENSOR: Any = Tensor
_GRAD, _SET_GRAD = _TENSOR.grad.__get__, _TENSOR.grad.__set__
_DEVICE, _IS_META = _TENSOR.device.__get__, _TENSOR.is_meta.__get__
_CALL_MODULE = nn.Module.__call__.__code__  # type: ignore[attr-defined]
_EXTREMES = ("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "norm", "vector_norm", "linalg_vector_norm")
"""Functions that torch does not define for no elements."""


def on_another_stage(name: str, why: object) -> UnsupportedError:
    """The error where `name` reads a value of another stage."""
    return UnsupportedError(
        f"{name} reads numbers of a weight that another stage of the pipeline owns ({why}). The norm"
        " of all gradients is trainer.strategy.grad_norm(). Hooks get other numbers from training_step, where a logged"
        " value is the same on every rank. Add the gradient of a penalty on weights in on_before_optimizer_step:"
        f" p.grad.add_(...). Or use {NO_PIPELINE}."
    )


class HookRules(Rule):
    """The rules for the code called `name` between steps of `parallel`.

    In place of `gathered` parameters, of which a call of a block in a hook gathers more, it has their shards. `read`
    are places in the code that have read numbers. `numbers` has those of other stages, which are refused without.
    Writes to the `.data` of `counted` tensors count for them too.
    """

    def __init__(
        self,
        name: str,
        parallel: ParallelModule | None,
        read: set[str],
        gathered: Callable[[], Sequence[tuple[Tensor, nn.Parameter]]] = tuple,
        numbers: RemoteNumbers | None = None,
        counted: Iterable[Tensor] = (),
    ) -> None:
        self.gathered = gathered
        self.counted = {id(each) for each in counted}
        self.shard_of: dict[int, nn.Parameter] = {}
        """By the id of each parameter that was used: its shard, where it is gathered, or itself."""
        self.name, self.read = name, read
        self.shards = None if parallel is None else ShardRules(name, parallel)
        self.numbers = numbers
        self.one_stage = parallel is not None and parallel.stages is None

    def before(self, call: Call) -> Call:
        given = () if self.shards is None else self.shards.parallel.parameters.given
        if call.func == _TENSOR.data.__get__ and id(call.args[0]) in {*self.counted, *map(id, given or ())}:
            return call._replace(func=Tensor.detach)  # it counts writes for the tensor of a state
        if self._uses_parameters(call):
            used = (call.args, call.kwargs, call.targets)
            args, kwargs, targets = tree_map(lambda leaf: self.shard_of.get(id(leaf), leaf), used)
            call = call._replace(args=args, kwargs=kwargs, targets=targets)
            if call.func == _TENSOR.data.__get__:
                call = call._replace(func=Tensor.detach)  # writes are counted: what is gathered is then out of date
        if self.one_stage and (call.func == _GRAD or not any(map(_may_be_parts, (*call.args, *call.kwargs.values())))):
            return call  # nearly all that hooks do
        if self.numbers is not None and module_of(call.caller).startswith("lightning_3d."):
            return call  # the package's own code
        return Call(self._run, (call,), {}, call.caller, ())

    def after(self, call: Call, result: Any) -> None:
        if call.targets and call.name.startswith("_foreach"):  # torch counts no writes to listed DTensors
            written = (self.shard_of.get(id(target), target) for target, _ in call.targets)
            torch.autograd.graph.increment_version([each for each in written if isinstance(each, DTensor)])

    def _run(self, call: Call) -> Any:
        func, args, kwargs, caller, targets = call
        written, everywhere = {id(target) for target, _ in targets}, set[int]()
        if self.numbers is not None and func == _GRAD:
            moves = args[0].is_meta and caller.f_code is MOVE_MODULE  # a gradient of another stage stays there
            return None if moves else self.numbers.gradient(args[0], _place(self.name, caller))
        if self.numbers is not None and func == _SET_GRAD and args[0].is_meta:
            return self.numbers.keep(*args)
        if func == _SET_GRAD and not module_of(caller).startswith(NOT_USERS) and self._is_whole(*args):
            whole = unsharded(args[1]) if isinstance(args[1], DTensor) else args[1]
            args = args[0], self.shards.part(args[0], whole, "sets the gradient of")  # type: ignore[union-attr]
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
        call = call._replace(args=args, kwargs=kwargs)  # of its tensors the owners are known, of full ones not
        if func == _IS_META and caller.f_code.co_filename == nn.init.__file__ and args[0].is_meta:
            raise UnsupportedError(
                f"{self.name} initialises a tensor that another stage of the pipeline owns by"
                f" {caller.f_code.co_name.removeprefix('_no_grad_')}. On this rank it draws nothing, so all later"
                f" random numbers would differ. Do so in setup, or use {NO_PIPELINE}."
            )
        harmless = is_plain(func) and not any(map(is_copy, call.tensors()))
        within = nullcontext() if harmless else self.shards or nullcontext()
        result = self._compute(self.read_in_full(call), within)
        if isinstance(result, DTensor | list | tuple) and not is_view(func):
            result = tree_map(lambda leaf: self.plain(leaf, caller), result)
        if self.numbers is None:
            return result
        return self.numbers.passed_on(func, call.args, call.kwargs, result, _place(self.name, caller))

    def _is_whole(self, parameter: Any, grad: Any) -> bool:
        """True for a gradient of a shard that all ranks have. Within a window of accumulation that before is plain."""
        if self.shards is None or not isinstance(parameter, DTensor) or not isinstance(grad, Tensor):
            return False
        if isinstance(grad, DTensor):  # torch takes a plain tensor of one element for a number
            return grad.device_mesh == parameter.device_mesh and all(each.is_replicate() for each in grad.placements)
        return parameter.grad is None or isinstance(parameter.grad, DTensor)

    def read_in_full(self, call: Call, *, graph: bool = False) -> Call:
        """`call` with full tensors where it reads numbers, or an extreme of elements of which some rank has none.

        With `graph`, an extreme that has a gradient is torch's own.
        """
        lacks = _lacks_elements(call) and not (graph and call.args[0].requires_grad)
        if not lacks and call.asks not in ("number", "truth", "array", "text", "answer"):
            return call
        args = tree_map(lambda leaf: self.full(leaf, call.caller) if isinstance(leaf, Tensor) else leaf, call.args)
        return call._replace(args=args)

    def _uses_parameters(self, call: Call) -> bool:
        """True where `call` uses a parameter itself. A block that is called needs its parameters gathered, and its
        backward has gradients there.
        """
        used = [leaf for leaf in call.tensors() if isinstance(leaf, nn.Parameter)]
        if not used or (self.numbers is None and call.func in (_GRAD, _SET_GRAD)) or _in_module(call.caller):
            return False
        new = {id(parameter): parameter for parameter in used if id(parameter) not in self.shard_of}
        if new:
            self.shard_of |= new | {id(full): shard for full, shard in self.gathered()}
        return any(self.shard_of[id(parameter)] is not parameter for parameter in used)

    def plain(self, leaf: Any, caller: FrameType) -> Any:
        """A number computed from a full tensor (a norm) as a plain tensor, to go with those of unsplit tensors.

        Norms of rows are complete: torch changes no parts of a sum in place.
        """
        if not isinstance(leaf, DTensor):
            return leaf
        whole = leaf.dim() or leaf.requires_grad
        return self.completed(leaf, caller) if whole else self.full(leaf, caller)

    @torch.no_grad()
    def full(self, tensor: Tensor, frame: FrameType) -> Tensor:
        """The full tensor, from which numbers are read.

        All ranks that have a shard must read. A rank that reads alone (`if trainer.is_global_zero:`) is found the first
        time at each place in the code, before its messages meet others.
        """
        source = self.numbers.owner(tensor) if self.numbers is not None else None
        if tensor.is_meta and (source is None or tensor.dim()):
            raise on_another_stage(self.name, "a number is read from it")
        full = tensor
        if isinstance(tensor, DTensor):
            self._meet(tensor, frame)
            owner = None if self.shards is None else self.shards.owner(tensor, "reads numbers from")
            parallel = self.shards and self.shards.parallel
            full = parallel.parameters.full(owner, tensor) if owner is not None and parallel else unsharded(tensor)
        if source is None or self.numbers is None or tensor.dim():
            return full
        return self.numbers.shared(full, source, "item", _place(self.name, frame))

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
        if self.shards is None or call.func == _SET_GRAD or not _may_be_parts(first) or is_copy(first):
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
            if not ours and not any(text in str(error) for text in ("DTensor", "DeviceMesh", "shard")):
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
        for key, shard in shards.items() if torch.is_grad_enabled() and not call.targets else ():
            if shard.requires_grad:
                full[key] = _RefuseBackward.apply(full[key].requires_grad_(), self.name, call.place)
        now = tree_map(lambda leaf: full.get(id(leaf), leaf), (args, kwargs))
        result = call.func(*now[0], **now[1])
        changed = {id(full[id(each)]): shards[id(each)] for each, _ in call.targets if id(each) in full}
        for target in changed.values():
            if (shape := full[id(target)].shape) != target.shape:  # `nn.init.orthogonal_` transposes a tensor in place
                raise UnsupportedError(
                    f"{self.name} changes the shape of a sharded tensor in place ({call.name}), and a shard keeps its"
                    f" place in the full shape: {tuple(target.shape)}, now {tuple(shape)}. {REMEDY}"
                )
            target.copy_(self.shards.part(target, full[id(target)], "writes into"))
        return tree_map(lambda leaf: changed.get(id(leaf), leaf), result)


class _RefuseBackward(torch.autograd.Function):
    """A full tensor through which no gradient reaches the shards: a loss of it would train nothing, without a word."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, name: str, place: str) -> Tensor:
        ctx.where = name, place
        return full.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        name, place = ctx.where
        raise UnsupportedError(
            f"{name} calls backward() on a loss that it computes from weights of its own ({place}). Ranks have shards"
            " of them, and torch computed this with full copies, which give shards no gradient. Call the module that"
            " has the weight (its forward), do it in training_step, or add the gradient yourself: p.grad.add_(...)."
        )


def _in_module(frame: FrameType | None) -> bool:
    """Return True if `frame` is part of a call of a module."""
    while frame is not None and frame.f_code is not _CALL_MODULE:
        frame = frame.f_back
    return frame is not None


def _place(name: str, frame: FrameType) -> str:
    """The line of the user's code that `frame` runs, for errors."""
    return f"reading a weight in {name} (line {outside(frame, 'torch.', 'lightning_3d.').f_lineno})"


def _lacks_elements(call: Call) -> bool:
    """Return True for an extreme of all elements, of which some rank has none: of a bias of one number, say."""
    args, name = call.args, call.name
    if name not in _EXTREMES or not args or not isinstance(args[0], DTensor) or call.kwargs.get("dim") is not None:
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
