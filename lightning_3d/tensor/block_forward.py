"""The forward of a split block: in shards for the calls that were proven, unsplit for all others.

A proof covers the forms of calls that were recorded when the module was planned. A later call may hand the block
something else (a cache, a mask for each head) whose division over the ranks is unknown. Then the block computes unsplit
on gathered parameters, as one device would.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.anatomy import place_of
from lightning_3d.module.forward import ForwardLayer, Layer
from lightning_3d.module.graph_private import nodes_made
from lightning_3d.module.operation_count import ShownOperations
from lightning_3d.module.torch_private import in_wrapper, own_parameters
from lightning_3d.module.undo import Change, replaced_entries
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.sandbox.writes import replaced
from lightning_3d.tensor.autograd_collectives import gather, gathered_shard, take
from lightning_3d.tensor.dropout import ShardDraws, ShardDropout
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import LateTensor, compute_late, is_part
from lightning_3d.tensor.module_forward import BlockState
from lightning_3d.tensor.recompute import Resume, noted
from lightning_3d.tensor.sample import each_numbered, form_of
from lightning_3d.tensor.sequence import are_distinct, copy_all, part_of
from lightning_3d.tensor.tensor_plan import SequencePlan, UnitPlan

Setting = tuple[nn.Module, str]
"""A module and the name of an attribute; no name for the kinds of its parts."""


def settings_of(block: nn.Module) -> list[Setting]:
    """Settings that may decide about the code of `block`: texts, flags, numbers that are 0, the kinds of its parts."""
    found: list[Setting] = []
    for inner in block.modules():
        own = [kind for kind in type(inner).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
        spaces = [vars(inner), *map(vars, own)] if own else []
        kept = {name for space in spaces for name, value in space.items() if type(value) in (bool, str, float)}
        found += [(inner, name) for name in sorted(kept) if not name.startswith("__") and name != "training"]
        found += [(inner, "")] if any(True for _ in inner.children()) else []
    return found


def _fact(module: nn.Module, name: str) -> object:
    """The attribute, as a value that can be compared with any other."""
    if not name:
        return [type(child) for child in module.children()]
    value = getattr(module, name, None)
    return value if type(value) in (bool, str) else not value if type(value) is float else type(value)


_PARTS = (
    "Tensor ranks divide its features, as runs ahead of training allowed, and a mean or a norm of a part is not that of"
    " all",
    'keep it whole: tensor_plan={"name of a module in it": "whole"}',
)


class BlockForward(ForwardLayer, rank=Layer.SPLIT):
    """The forward of one block. An unsplit call reverts the `changes` of attributes that the plan made.

    `frozen` are split parameters without gradients. Adapters (DoRA) read those of other modules.
    """

    def __init__(
        self, module: nn.Module, plan: UnitPlan, state: BlockState, changes: list[Change], frozen: Sequence[str]
    ) -> None:
        super().__init__(module)
        self.plan, self.axis, self.state, self.changes = plan, state.axis, state, changes
        self.frozen = [place_of(module, each) for each in frozen]
        split = [place_of(module, each) for each in plan.splits]
        self.divided = [(owner, name) for owner, name in split if isinstance(own_parameters(owner)[name], DTensor)]
        self.forms = frozenset(plan.forms)
        self.settings = settings_of(module)
        self.facts = self._facts()
        self.shown = ShownOperations(module, f"{type(module).__name__} computes", *_PARTS, beside=True)
        self.draws = ShardDraws(module, plan)
        # apply_tensor warns of it. Dynamo (torch 2.13) crashes where it compiles a block under `ShardDropout`.
        self.uncompiled = in_wrapper(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.unsplit:
            return self.next(*args, **kwargs)
        for owner, name in self.divided:
            if not isinstance(own_parameters(owner).get(name), DTensor):
                raise replaced(f"{type(owner).__name__}.{name}")
        if (facts := self._facts()) != self.facts:
            self._warn_changed(facts)
        if self.forms and (self.module.training, form_of((args, kwargs))) not in self.forms:
            self._warn_unsplit()
            self.state.repeatable = False
            with self.unsplit():
                return self.next(*compute_late(args), **compute_late(kwargs))
        if self.plan.sequence is not None and not self._zero_gathers_inside(self.plan.sequence):
            args, kwargs = self._divide_stream(self.plan.sequence, args, kwargs)
        if self.plan.inputs:
            args, kwargs = each_numbered(self._enter, (args, kwargs))
        sequence, dropouts = self.state.sequence, self.plan.dropouts if self.module.training and self.draws else ()
        if sequence is not None or dropouts:
            self.state.repeatable = False
        with self._in_shards(sequence, self.state.dims, self.state.others, dropouts):
            forward = self.next if self.uncompiled is None or not any(dropouts) else self.uncompiled
            start = nodes_made()
            result = forward(*args, **kwargs)
            if self.shown.are_new(start):
                self.shown.note(start, tensors_in(result))
        self.facts = self._facts()  # flags that the call itself sets are its own
        if sequence is not None:
            result = each_numbered(lambda index, tensor: self._leave_stream(index, tensor, sequence), result)
        if not self.plan.outputs:
            return result
        count = len(tensors_in(result))
        if count != self.plan.results:
            raise TensorPlanError(
                f"{type(self.module).__name__} returned {self.plan.results} tensors when it was planned and returns"
                f" {count} now. It is unknown which are sharded. Plan the module with a batch like those of training."
            )
        return each_numbered(self._leave, result)

    def _facts(self) -> list[object]:
        return [_fact(module, name) for module, name in self.settings]

    def _warn_changed(self, facts: list[object]) -> None:
        """Warn once for each kind of block of attributes that changed between two calls."""
        differs = [a != b for a, b in zip(self.facts, facts, strict=True)]
        self.facts = facts
        changed = [
            name or "the kinds of its parts" for (_, name), other in zip(self.settings, differs, strict=True) if other
        ]
        warnings.warn(
            f"{type(self.module).__name__} changed between two calls: {', '.join(changed)}. Its shards were proven with"
            " what it had before. If its code computes otherwise now, tensor ranks may have other numbers than one"
            " device. Set the value before training starts, or use tensor_parallel_size=1.",
            stacklevel=3,
        )

    def _warn_unsplit(self) -> None:
        """Warn once for each kind of block."""
        warnings.warn(
            f"{type(self.module).__name__} is called in a way that the recorded run did not show (other arguments or"
            " another mode). These calls compute it unsplit on every tensor rank, which is correct but slow. If they"
            " are frequent, plan the module with a batch of each kind.",
            stacklevel=3,
        )

    @contextmanager
    def unsplit(self) -> Iterator[None]:
        """Compute the block unsplit inside, and when a checkpoint that begins inside is repeated.

        Its parameters are gathered, its attributes are the original ones, and its layers compute nothing.
        """
        state = self.state
        current, running = [(change, change.now()) for change in self.changes], state.running
        for change in reversed(self.changes):
            change.revert()
        state.running, state.unsplit = 0, state.unsplit + 1
        try:
            with noted(lambda: lambda _: self.unsplit()), replaced_entries(self._full()):
                yield
        finally:
            for change, value in current:
                change.put(value)
            state.running, state.unsplit = running, state.unsplit - 1

    @contextmanager
    def _in_shards(
        self, sequence: TensorSplit | None, dims: int, others: list[Tensor], dropouts: Sequence[bool]
    ) -> Iterator[None]:
        """Compute the block in shards inside, and when a checkpoint that begins inside is repeated."""
        state, dropout = self.state, ShardDropout(dropouts, self.axis)

        def note() -> Resume:
            left, known = tuple(dropout.left), list(state.others)

            def resume(arguments: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
                # A checkpoint hands a copy of each argument to the function.
                copies = [now for then, now in arguments if any(then is other for other in known)]
                return self._in_shards(sequence, dims, [*known, *copies], left)

            return resume

        state.sequence, state.dims, state.others = sequence, dims, list(others)
        shadows: list[tuple[dict[str, Any], str]] = []
        state.running += 1
        try:  # another context manager would end the graph of torch.compile
            shadows = [*self._shadow_outer(), *self._shadow_frozen()]
            with dropout if any(dropouts) else nullcontext(), noted(note):
                yield
        finally:
            state.running -= 1
            state.clear()
            for space, name in shadows:
                space.pop(name, None)

    def _full(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        for path, split in self.plan.splits.items():
            owner, name = place_of(self.module, path)
            if (shard := gathered_shard(own_parameters(owner)[name])) is not None:  # else a layer inside has it
                yield vars(owner), name, gather(shard, self.axis, split)

    def _shadow_outer(self) -> list[tuple[dict[str, Any], str]]:
        """Sum the gradients of all parameters that are used on shards of the sequence in one go."""
        if self.state.sequence is None or self.plan.sequence is None:
            return []
        places = [place_of(self.module, each) for each in self.plan.sequence.outer]
        copied = copy_all([own_parameters(owner)[name] for owner, name in places], self.axis)  # type: ignore[misc]
        for (owner, name), value in zip(places, copied, strict=True):
            owner.__dict__[name] = value
        return [(owner.__dict__, name) for owner, name in places]

    def _shadow_frozen(self) -> Iterator[tuple[dict[str, Any], str]]:
        for owner, name in self.frozen:
            if (shard := gathered_shard(own_parameters(owner)[name])) is not None:
                owner.__dict__[name] = shard
                yield owner.__dict__, name

    def _zero_gathers_inside(self, plan: SequencePlan) -> bool:
        """True where weights of the stream are gathered layer by layer: their gradients cannot be summed in one go."""
        places = (place_of(self.module, each) for each in plan.outer)
        return any(isinstance(own_parameters(owner)[name], DTensor) for owner, name in places)

    def _divide_stream(self, plan: SequencePlan, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Later code finds the stream among the arguments by identity, which a gathering on use would break.
        args, kwargs = each_numbered(lambda index, t: t if index == plan.stream else compute_late(t), (args, kwargs))
        tensors = tensors_in((args, kwargs))
        stream, others = tensors[plan.stream], [t for i, t in enumerate(tensors) if i != plan.stream]
        trains = self.module.training and torch.is_grad_enabled() and stream.shape[plan.dim] >= self.axis.size
        if is_part(stream) and stream.axis is self.axis:
            split = stream.division
        elif trains:
            split = TensorSplit.even(plan.dim, stream.shape[plan.dim], self.axis.size)
        else:
            return args, kwargs
        if not are_distinct(others, stream, split):
            return args, kwargs
        self.state.sequence, self.state.others, self.state.dims = split, others, stream.dim()
        return each_numbered(
            lambda index, t: part_of(t, self.axis, split) if index == plan.stream else t, (args, kwargs)
        )

    def _leave_stream(self, index: int, tensor: Tensor, split: TensorSplit) -> Tensor:
        if self.plan.sequence is None or index not in self.plan.sequence.results:
            return tensor
        return LateTensor.of(tensor, split, self.axis)

    def _enter(self, index: int, tensor: Tensor) -> Tensor:
        if index not in self.plan.inputs:
            return tensor
        split = self.plan.inputs[index]
        if split is None or tensor.shape[split.dim] == 1:
            return self.state.enter(tensor)
        if index in self.plan.folded and tensor.shape[split.dim] % split.size == 0:
            rows = compute_late(tensor).unflatten(split.dim, (-1, split.size))
            return take(rows, self.axis, TensorSplit(split.dim + 1, split.pieces)).flatten(split.dim, split.dim + 1)
        if tensor.shape[split.dim] != split.size:
            raise TensorPlanError(
                f"{type(self.module).__name__} was planned for an argument of size {split.size} in dimension"
                f" {split.dim}, which the tensor ranks divide. It is now called with shape {tuple(tensor.shape)}. Plan"
                " the module with a batch like those of training."
            )
        return part_of(tensor, self.axis, split)

    def _leave(self, index: int, tensor: Tensor) -> Tensor:
        split = self.plan.outputs.get(index)
        if split is None:
            return tensor
        if self.module.training and torch.is_grad_enabled():
            # Attention weights, for example, which the caller may never read.
            return LateTensor.of(tensor, split, self.axis)
        return gather(tensor, self.axis, split)
