"""The forward of a block on a part of the sequence, and `apply_context`, which puts it on the blocks of a module."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.ledger import Ledger
from lightning_3d.context.compared_block import ComparedForward
from lightning_3d.context.cut_attention import Part, attention, running
from lightning_3d.context.cut_plan import LEAST, BlockCut, ContextPlan, parts_of
from lightning_3d.context.eager_private import torch_attention, without_empty_cache
from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import CONTEXT_AXIS
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.wire import Parts, Spec
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule
from lightning_3d.sandbox.silence import SDPA, is_random
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.autograd_collectives import copy
from lightning_3d.tensor.axis import Axis, peer_group
from lightning_3d.tensor.block_forward import BlockForward
from lightning_3d.tensor.dropout import ShardDraws, ShardDropout, draws_mask
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import LateTensor, compute_late, is_part
from lightning_3d.tensor.patch import patch_unit
from lightning_3d.tensor.recompute import Resume, in_reentrant_checkpoint, noted, save_states
from lightning_3d.tensor.sample import each_numbered, form_of
from lightning_3d.tensor.sequence import are_distinct, part_of
from lightning_3d.tensor.tensor_plan import UnitPlan


@dataclass(frozen=True)
class StageParts(Parts):
    """Messages between stages of a pipeline: each context rank sends its part of what a divided block returns."""

    axis: Axis
    results: Mapping[str, Mapping[int, int]]
    """For each block the results that are divided, and along which dimension."""

    def sent(self, unit: str, index: int, spec: Spec) -> Spec:
        dim = self.results.get(unit, {}).get(index)
        if dim is None or dim >= len(spec.shape) or spec.shape[dim] < LEAST * self.axis.size:
            return spec
        own = parts_of(dim, spec.shape[dim], self.axis.size).local_size(self.axis.rank)
        return spec.divided(dim, (*spec.shape[:dim], own, *spec.shape[dim + 1 :]))

    def own(self, tensor: Tensor, spec: Spec) -> Tensor:
        return tensor if spec.dim is None else part_of(tensor, self.axis, self._split(spec, spec.dim))

    def joined(self, own: Tensor, spec: Spec) -> Tensor:
        return own if spec.dim is None else LateTensor.of(own, self._split(spec, spec.dim), self.axis)

    def is_part(self, value: Any) -> bool:
        return is_part(value)

    def whole(self, value: Any) -> Any:
        return compute_late(value)

    def _split(self, spec: Spec, dim: int) -> TensorSplit:
        return parts_of(dim, spec.shape[dim], self.axis.size)


class RefuseDropout(Rule):
    """Refuses dropout in `module`: the first forward of a reentrant checkpoint records no graph, and computes whole."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module).__name__

    def before(self, call: Call) -> Call:
        if is_random(call.func, call.args, call.kwargs) and draws_mask(call.func, call.args, call.kwargs):
            raise UnsupportedError(
                f"{self.kind} draws dropout inside of a checkpoint with use_reentrant=True. Its first"
                " forward computes the whole sequence, and the repeated one a part, with another mask. Use"
                ' use_reentrant=False, or recompute="full" of Strategy3D without a checkpoint of your own.'
            )
        return call


class CutForward(ForwardLayer, rank=Layer.CONTEXT):
    """The forward of one block: in training on a part of the sequence, else on all of it.

    `heads` is the forward inside of a block whose heads are divided too. `trains` is False for the threads of a proof.
    """

    def __init__(
        self, module: nn.Module, cut: BlockCut, axis: Axis, heads: BlockForward | None, *, trains: bool
    ) -> None:
        super().__init__(module)
        self.cut, self.axis, self.heads, self.trains = cut, axis, heads, trains
        self.own = [] if heads is None else [(change, change.now()) for change in heads.changes]
        """Attributes of the block while it runs on a part: code around it reads those of the whole."""
        self._put_back()
        dropouts = UnitPlan(dropouts=cut.on_part, dropout_modules=cut.draws)
        self.draws = ShardDraws(module, dropouts)
        self.last: Part | None = None
        """Of the last call, for a proof. None where it computed whole."""
        self.lengths = set[int]()
        """Of the sequences that it has computed in parts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.last, split = None, self.split_of(args, kwargs)
        if split is None:
            with Interceptor(RefuseDropout(self.module)) if in_reentrant_checkpoint() else nullcontext():
                return self.on_all(*args, **kwargs)
        agreed = not self.trains or split.size % self.axis.size == 0 or split.size in self.lengths
        self.last = part = Part(self.axis, split, self.cut.attention, draws=self.trains, agreed=agreed)
        result = self.on_part(part, args, kwargs)
        self.lengths.add(split.size)
        return result

    def _put_back(self) -> None:
        for change, _ in reversed(self.own):
            change.revert()

    def on_all(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.heads is None else self.heads.unsplit():
            return self.next(*compute_late(args), **compute_late(kwargs))

    def on_part(self, part: Part, args: Any, kwargs: Any) -> Any:
        error, result, split = None, None, part.split
        args, kwargs = each_numbered(lambda index, tensor: self._enter(index, tensor, split), (args, kwargs))
        try:
            with self._on_part(part, self.cut.on_part if part.draws and self.draws else ()):
                args, kwargs = _without_empty_cache(args, kwargs)
                result = self.next(*args, **kwargs)
            part.check_all_met()
            result = each_numbered(lambda index, tensor: self._leave(index, tensor, split), result)
        except Exception as mine:
            if part.agreed:
                raise
            error = mine
        part.agree(error, "the end of a block on a part")
        return result

    def split_of(self, args: Any, kwargs: Any) -> TensorSplit | None:
        """The parts of the sequence in this call, None for one that was not proven."""
        cut = self.cut
        if not (self.module.training and torch.is_grad_enabled()):
            return None
        if cut.form is not None and form_of((args, kwargs)) != cut.form:
            return None
        tensors = tensors_in((args, kwargs))
        stream = tensors[cut.stream]
        length = stream.shape[cut.dim]
        if cut.follows:
            return stream.division if is_part(stream) and stream.division.dim == cut.dim else None
        if length < LEAST * self.axis.size or cut.rows not in (None, stream.shape[1 - cut.dim]):
            return None
        if any(tensors[index].shape[dim] != length for index, dim in cut.arguments.items()):
            return None
        split = parts_of(cut.dim, length, self.axis.size)
        whole = (t for index, t in enumerate(tensors) if index != cut.stream and index not in cut.arguments)
        return split if are_distinct(whole, stream, split) else None

    def _enter(self, index: int, tensor: Tensor, split: TensorSplit) -> Tensor:
        if index == self.cut.stream:
            own = part_of(tensor, self.axis, split)
            return own if self.heads is None else LateTensor.of(own, split, self.axis)
        if index in self.cut.arguments:
            return part_of(tensor, self.axis, TensorSplit(self.cut.arguments[index], split.pieces))
        enters = self.heads is not None and index in self.heads.plan.inputs  # by itself
        return tensor if enters else copy(compute_late(tensor), self.axis)

    def _leave(self, index: int, tensor: Tensor, split: TensorSplit) -> Tensor:
        dim = self.cut.results.get(index)
        if dim is None or self.heads is not None:
            return tensor
        tensor, own = tensor if self.cut.follows else compute_late(tensor), split.local_size(self.axis.rank)
        if tensor.dim() <= dim or tensor.shape[dim] != own:
            raise UnsupportedError(
                f"{type(self.module).__name__} returned a tensor of shape {tuple(tensor.shape)} for {own} positions."
                f" In its proof dimension {dim} had the positions. Other context ranks have the other positions,"
                " so it is unknown how to join the results. Set context_parallel_size=1 for this module."
            )
        return LateTensor.of(tensor, TensorSplit(dim, split.pieces), self.axis)

    @contextmanager
    def _on_part(self, part: Part, draws: Sequence[bool]) -> Iterator[None]:
        """Compute on a part inside, and when a checkpoint that begins inside is repeated."""
        dropout = ShardDropout(draws, self.axis, attention=False)

        def note() -> Resume:
            left, met = tuple(dropout.left), list(part.met)

            def resume(_: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
                return self._on_part(replace(part, met=list(met), agreed=True), left)

            return resume

        eager = torch_attention(map(self.module.get_submodule, self.cut.eager)) if self.cut.eager else nullcontext()
        with eager, running(part), dropout if any(draws) else nullcontext(), noted(note), ExitStack() as stack:
            stack.callback(self._put_back)
            for change, value in self.own:
                change.put(value)
            yield


class WholeForward(ForwardLayer, rank=Layer.CONTEXT):
    """The forward of a block that computes on all of the sequence: what is inside of it finds no part."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = compute_late(args), compute_late(kwargs)
        if self.module.training:  # states with a graph would come to blocks on a part, and cannot be copied
            args, kwargs = _without_empty_cache(args, kwargs)
        return self.next(*args, **kwargs)


def _without_empty_cache(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return [*map(without_empty_cache, args)], {key: without_empty_cache(value) for key, value in kwargs.items()}


def patch_block(block: nn.Module, cut: BlockCut, axis: Axis, undo: UndoStack, *, trains: bool = False) -> CutForward:
    """Let `block` compute by `cut`. Callers put `attention` in the place of torch's function."""
    undo.callback(save_states())
    heads = None
    if cut.heads is None:
        use_open_attention(block, undo)
    else:
        heads = patch_unit(block, cut.heads, axis, undo)
    forward = CutForward(block, cut, axis, heads, trains=trains)
    add_layer(forward, undo)
    return forward


def apply_context(
    module: nn.Module,
    plan: ContextPlan,
    mesh: DeviceMesh,
    undo: UndoStack,
    ledger: Ledger | None = None,
    *,
    experts: bool = False,
) -> StageParts:
    """Put the layers on the blocks of `module` that are on this stage; returns the parts that stages send.

    Weights are equal on every context rank, and gradients are averaged over these ranks then. With `experts` tokens
    travel between data ranks, which run their blocks equally often.
    """
    axis = Axis(peer_group(mesh.get_group(), ledger, mesh.device_type, CONTEXT_AXIS), weight=plan.size)
    cuts = {**plan.blocks, **plan.ends}
    here = {name: module.get_submodule(name) for name in (*cuts, *plan.whole)}
    here = {name: block for name, block in here.items() if not any(p.is_meta for p in block.parameters())}
    undo.replace(SDPA, attention, here.values())
    for name, block in here.items():
        if name in plan.whole:
            add_layer(WholeForward(block), undo)
            continue
        forward = patch_block(block, cuts[name], axis, undo, trains=True)
        if name in plan.blocks:
            add_layer(ComparedForward(name, forward, alone=not experts), undo)
    return StageParts(axis, {name: cut.results for name, cut in plan.blocks.items()})
