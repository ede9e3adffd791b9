"""The forwards of modules at the edges of, and inside, split regions."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor.autograd_collectives import gather, reduce, take
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.dropout import ShardDropout
from lightning_3d.tensor.edges import Memo
from lightning_3d.tensor.fallback import Change, compute_unsplit, form_of, warn_unsplit
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.late_gather import LateGather, whole
from lightning_3d.tensor.overlap import Deferral, defer
from lightning_3d.tensor.recompute import Resume, noted
from lightning_3d.tensor.sequence import copy_all, enter, leave
from lightning_3d.tensor.tensor_plan import SequencePlan, UnitPlan
from lightning_3d.tensor.trace import tensors_in

Shadow = Callable[[Tensor], Tensor]


class ShardedForward:
    """A module's forward at the edge of, or inside, a split region."""

    def __init__(self, module: nn.Module, axis: Axis, memo: Memo) -> None:
        self.module, self.axis, self.memo = module, axis, memo
        self.original = module.__dict__.get("forward")
        self.enters = self.emits = self.leaves = self.gathers = False
        self.mixes: TensorSplit | None = None
        self.width: int | None = None
        self.shadows: list[tuple[nn.Module, str, Shadow]] = []
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gathers and self.memo.sequence is not None:
            args, kwargs = each_tensor(self.memo.gathered, args), each_tensor(self.memo.gathered, kwargs)
        if self.width is not None:
            args, kwargs = each_tensor(self._narrow, args), each_tensor(self._narrow, kwargs)
        if self.enters:
            args, kwargs = each_tensor(self.memo, args), each_tensor(self.memo, kwargs)
        try:
            for owner, name, shadow in self.shadows:
                owner.__dict__[name] = shadow(owner._parameters[name])  # type: ignore[arg-type]
            result = self._product(*args, **kwargs) if self.enters else self._forward(*args, **kwargs)
        finally:
            for owner, name, _ in self.shadows:
                owner.__dict__.pop(name, None)
        if self.emits:
            result = each_tensor(self.memo, result)
        return each_tensor(self._reduce, result) if self.leaves else result

    def _product(self, *args: Any, **kwargs: Any) -> Any:
        deferral = self._deferral()
        taken = partial(self.memo.taken, deferral=deferral)
        args, kwargs = each_tensor(taken, args), each_tensor(taken, kwargs)
        if deferral is None or deferral.token is None:
            return self._forward(*args, **kwargs)
        (input,), bias = tensors_in((args, kwargs)), self.module.bias
        return deferral.product(input, bias)  # type: ignore[arg-type]

    def _deferral(self) -> Deferral | None:
        """For torch's own forward, with a weight that is a parameter of its own."""
        plain = self.original is None and "weight" in self.module._parameters
        shadow = self.module.__dict__.get("weight") if plain else None
        return None if shadow is None else defer(self.module, shadow)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.mixes is not None:
            args, kwargs = each_tensor(self._all_channels, args), each_tensor(self._all_channels, kwargs)
        result = (self.original or type(self.module).forward.__get__(self.module))(*args, **kwargs)
        return result if self.mixes is None else each_tensor(self._own_channels, result)

    def _reduce(self, tensor: Tensor) -> Tensor:
        split = self.memo.sequence
        return reduce(tensor, self.axis) if split is None else leave(tensor, self.axis, split)

    def _sum(self, tensor: Tensor) -> Tensor:
        return reduce(tensor, self.axis)

    def _all_channels(self, tensor: Tensor) -> Tensor:
        split = self.mixes
        if split is None or tensor.shape[-1] != split.local_size(self.axis.rank):
            return tensor
        return enter(tensor, self.axis, TensorSplit(tensor.dim() - 1, split.pieces))

    def _own_channels(self, tensor: Tensor) -> Tensor:
        split = self.mixes
        if split is None or tensor.shape[-1] != split.size:
            return tensor
        return local_part(tensor, TensorSplit(tensor.dim() - 1, split.pieces), self.axis.rank)

    def _narrow(self, tensor: Tensor) -> Tensor:
        width = self.width
        return self.memo.decoy(tensor, width) if width is not None and tensor.shape[-1] > width else tensor


class UnitForward:
    """A block's forward: its arguments and results at the edge, the dropouts inside."""

    def __init__(self, module: nn.Module, plan: UnitPlan, axis: Axis, memo: Memo, changes: list[Change]) -> None:
        self.module, self.plan, self.axis, self.memo, self.changes = module, plan, axis, memo, changes
        self.forms = frozenset(plan.forms)
        self.original = module.__dict__.get("forward")
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.memo.running += 1
        try:
            return self._run(*args, **kwargs)
        finally:
            self.memo.running -= 1

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.forms and (self.module.training, form_of((args, kwargs))) not in self.forms:
            warn_unsplit(self.module)
            self.memo.repeatable = False
            with self._whole():
                return self.module.forward(*whole(args), **whole(kwargs))
        if self.plan.sequence is not None:
            args, kwargs = self._divide_stream(self.plan.sequence, args, kwargs)
        if self.plan.inputs:
            args, kwargs = _numbered(self._enter, (args, kwargs))
        sequence = self.memo.sequence
        if sequence is not None or (self.module.training and any(self.plan.dropouts)):
            self.memo.repeatable = False
        with self._in_shards(sequence, self.memo.dims, self.memo.others, self.plan.dropouts):
            result = (self.original or type(self.module).forward.__get__(self.module))(*args, **kwargs)
        if sequence is not None:
            result = _numbered(lambda index, tensor: self._leave_stream(index, tensor, sequence), result)
        if not self.plan.outputs:
            return result
        count = len(tensors_in(result))
        if count != self.plan.results:
            raise TensorPlanError(
                f"{type(self.module).__name__} gave {self.plan.results} tensors when it was planned and gives {count}"
                " now, so which of them are divided over the tensor ranks is not known. Plan it with a batch of the"
                " kind that it is used on."
            )
        return _numbered(self._leave, result)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """While open, and while a checkpoint that begins inside is repeated, the block is whole."""
        with (
            compute_unsplit(self.module, self.plan, self.changes, self.axis),
            noted(lambda: lambda _: self._repeat(self._whole())),
        ):
            yield

    @contextmanager
    def _in_shards(
        self, sequence: TensorSplit | None, dims: int, others: list[Tensor], dropouts: Sequence[bool]
    ) -> Iterator[None]:
        """The same for a block in shards."""
        memo, dropout = self.memo, ShardDropout(dropouts, self.axis)

        def note() -> Resume:
            left = tuple(dropout.left)

            def resume(arguments: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
                # A checkpoint hands a copy of each argument to the function.
                again = [now for then, now in arguments if any(then is other for other in known)]
                return self._repeat(self._in_shards(sequence, dims, [*known, *again], left))

            known = list(memo.others)
            return resume

        memo.sequence, memo.dims, memo.others = sequence, dims, list(others)
        shadows: list[tuple[dict[str, Any], str]] = []
        try:
            shadows = self._shadow_outer()
            with dropout if self.module.training and any(dropouts) else nullcontext(), noted(note):
                yield
        finally:
            memo.clear()
            for space, name in shadows:
                space.pop(name, None)

    @contextmanager
    def _repeat(self, state: AbstractContextManager[None]) -> Iterator[None]:
        self.memo.running += 1
        try:
            with state:
                yield
        finally:
            self.memo.running -= 1

    def _shadow_outer(self) -> list[tuple[dict[str, Any], str]]:
        """Let the parameters that are used on parts of the sequence sum their gradients in one go."""
        if self.memo.sequence is None or self.plan.sequence is None:
            return []
        places = [
            (self.module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in self.plan.sequence.outer
        ]
        copied = copy_all([owner._parameters[name] for owner, name in places], self.axis)  # type: ignore[misc]
        for (owner, name), value in zip(places, copied, strict=True):
            owner.__dict__[name] = value
        return [(owner.__dict__, name) for owner, name in places]

    def _divide_stream(self, plan: SequencePlan, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # What follows tells the stream from the other arguments by identity, which gathering on use would lose.
        args, kwargs = _numbered(lambda index, t: t if index == plan.stream else whole(t), (args, kwargs))
        tensors = tensors_in((args, kwargs))
        stream, others = tensors[plan.stream], [t for i, t in enumerate(tensors) if i != plan.stream]
        if not (self.module.training and torch.is_grad_enabled()) or stream.shape[plan.dim] < self.axis.size:
            return args, kwargs
        split = TensorSplit.even(plan.dim, stream.shape[plan.dim], self.axis.size)
        parts = {split.local_size(rank) for rank in range(self.axis.size)}
        if any(t.dim() == stream.dim() and t.shape[plan.dim] in parts for t in others):
            return args, kwargs  # what is made of this one could be taken for a part of the stream
        self.memo.sequence, self.memo.others, self.memo.dims = split, others, stream.dim()
        return _numbered(lambda index, t: self._part(t, split) if index == plan.stream else t, (args, kwargs))

    def _part(self, tensor: Tensor, split: TensorSplit) -> Tensor:
        if isinstance(tensor, LateGather) and tensor.division == split and tensor.whole is None:
            return tensor.local
        return take(whole(tensor), self.axis, split)

    def _leave_stream(self, index: int, tensor: Tensor, split: TensorSplit) -> Tensor:
        stream = self.plan.sequence is not None and index in self.plan.sequence.results
        if not stream:
            return tensor
        return LateGather.of(tensor, split, self.axis) if self.axis.lazy else gather(tensor, self.axis, split)

    def _enter(self, index: int, tensor: Tensor) -> Tensor:
        if index not in self.plan.inputs:
            return tensor
        split = self.plan.inputs[index]
        if split is None or tensor.shape[split.dim] == 1:
            return self.memo(tensor)
        if index in self.plan.folded and tensor.shape[split.dim] % split.size == 0:
            rows = whole(tensor).unflatten(split.dim, (-1, split.size))
            return take(rows, self.axis, TensorSplit(split.dim + 1, split.pieces)).flatten(split.dim, split.dim + 1)
        if tensor.shape[split.dim] != split.size:
            raise TensorPlanError(
                f"{type(self.module).__name__} was planned with {split.size} in dimension {split.dim} of an argument"
                f" that the tensor ranks divide, and is now called with shape {tuple(tensor.shape)}. Plan it with a"
                " batch of the kind that it is trained on."
            )
        if isinstance(tensor, LateGather) and tensor.division == split and tensor.whole is None:
            return tensor.local  # as another block left it
        return take(whole(tensor), self.axis, split)

    def _leave(self, index: int, tensor: Tensor) -> Tensor:
        split = self.plan.outputs.get(index)
        if split is None:
            return tensor
        if self.axis.lazy and self.module.training and torch.is_grad_enabled():
            return LateGather.of(
                tensor, split, self.axis, passive=True
            )  # attention weights, say, that nobody may ask for
        return gather(tensor, self.axis, split)


def each_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every floating tensor changed; plain tuples and dicts of tensors, the usual case, are quick."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple(each_tensor(change, item) for item in value)
    if type(value) is dict:
        return {key: each_tensor(change, item) for key, item in value.items()}
    if value is None or isinstance(value, int | float | str | bool):
        return value
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value)


def _numbered(change: Callable[[int, Tensor], Tensor], value: Any) -> Any:
    count = iter(range(1_000_000))
    return tree_map(lambda leaf: change(next(count), leaf) if isinstance(leaf, Tensor) else leaf, value)
