"""Forwards of modules inside a split block, of experts of which each rank has some, and the state that they share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.axes.group import Group
from lightning_3d.errors import TensorPlanError
from lightning_3d.module.expert_modules import RoutedCall
from lightning_3d.module.forward import ForwardLayer, Layer, is_plain
from lightning_3d.module.torch_private import in_backward, own_parameters
from lightning_3d.sandbox.trees import map_leaves, tensors_in
from lightning_3d.tensor.autograd_collectives import copy, reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.overlap import Deferral, EarlySum, autocast_dtype, defer, early_sum
from lightning_3d.tensor.sequence import enter, leave, shards_of


@dataclass
class _Entered:
    """A tensor that entered a region."""

    source: Tensor
    grad_mode: bool
    inside: Tensor
    """The copy that the region's code gets."""
    taken: Tensor
    """The copy that its products take."""
    early: EarlySum | None
    """None once a product took the tensor: from then on its sum cannot be launched early."""


class BlockState:
    """State of one forward of a block. Products of one input share one copy, and so one sum in backward."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.entered: list[_Entered] = []
        self.decoys: list[tuple[Tensor, Tensor]] = []
        self.sequence: TensorSplit | None = None
        """Split of the residual stream in the running forward."""
        self.dims = 0
        """Dimensions of the stream."""
        self.others: list[Tensor] = []
        """The block's other arguments, which are not divided."""
        self.running = 0
        """Number of running forwards of the block in shards. More than one where it calls itself."""
        self.unsplit = 0
        """Number of running unsplit forwards of the block, during which none runs in shards."""
        self.repeatable = True
        """True while modules of the block may be recomputed alone: no unsplit call, dropout or split stream so far."""

    def decoy(self, tensor: Tensor, width: int) -> Tensor:
        """A narrower tensor to read sizes off. A column product takes `tensor` in its place."""
        narrow = tensor.detach().narrow(-1, 0, width)
        self.decoys.append((narrow, tensor))
        return narrow

    def clear(self) -> None:
        self.entered.clear()
        self.decoys.clear()
        self.others.clear()
        self.sequence = None

    def enter(self, tensor: Tensor) -> Tensor:
        """`tensor` for use inside a split region: its gradient is summed over the ranks."""
        for decoy, real in self.decoys:
            if decoy is tensor:
                tensor = real
        tensor = compute_late(tensor)  # autograd functions do not see through a `LateTensor`
        if not tensor.requires_grad or self._find(lambda entered: entered.inside is tensor) is not None:
            return tensor  # of a module around this one, whose input is the same
        if self.sequence is not None and not any(tensor is other for other in self.others):
            return tensor  # the gathering at the start of the region sums the gradient
        early = early_sum(self.axis.begin_all_reduce)
        return self._once(tensor, early, lambda: copy(tensor, self.axis, early))

    def gathered(self, tensor: Tensor) -> Tensor:
        """The full sequence of a shard of the residual stream. Other tensors are returned as they are."""
        split = self.sequence
        if split is None or any(tensor is other for other in self.others):
            return tensor
        if tensor.dim() != self.dims or tensor.shape[split.dim] != split.local_size(self.axis.rank):
            return tensor
        early = early_sum(lambda grad: self.axis.begin_reduce_scatter(shards_of(grad, self.axis, split)))
        return self._once(tensor, early, lambda: enter(tensor, self.axis, split, early))

    def taken(self, tensor: Tensor, deferral: Deferral | None) -> Tensor:
        """The copy of `tensor` for a product. The first product launches the sum if its weight's gradient can wait."""
        entered = self._find(lambda entered: entered.inside is tensor)
        if entered is None:
            return tensor
        if entered.early is not None and deferral is not None:
            entered.taken = deferral.launch(tensor, entered.early)
        entered.early = None
        return entered.taken

    def _once(self, tensor: Tensor, early: EarlySum | None, make: Callable[[], Tensor]) -> Tensor:
        found = self._find(lambda entered: entered.source is tensor)
        if found is None:
            inside = make()
            found = _Entered(tensor, torch.is_grad_enabled(), inside, inside, early)
            self.entered.append(found)
        return found.inside

    def _find(self, wanted: Callable[[_Entered], bool]) -> _Entered | None:
        grad = torch.is_grad_enabled()
        return next((entered for entered in self.entered if entered.grad_mode == grad and wanted(entered)), None)

    def __deepcopy__(self, memo: Any) -> "BlockState":
        return BlockState(self.axis)


class ModuleForward(ForwardLayer, rank=Layer.SPLIT):
    """The forward of one module at the edge of, or inside, a split region.

    It raises where the module is called outside of its block, for example a layer of an `nn.Sequential`. A plan is
    proven for the block, not for its modules. Such a module would compute with shards alone.
    """

    def __init__(self, module: nn.Module, state: BlockState, name: str = "", block: str = "") -> None:
        super().__init__(module)
        self.axis, self.state, self.name, self.block = state.axis, state, name, block
        self.plain, self.sums_gradients = is_plain(module, type(module)), state.axis.weight == 1
        self.enters = self.emits = self.reduces = self.gathers = False
        self.mixes: TensorSplit | None = None
        self.width: int | None = None
        self.routes: OwnRoutes | None = None
        self.foreign = False
        self.shadows: list[tuple[nn.Module, str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.state.running:
            if self.state.unsplit:
                return self._shadowed(self.next, args, kwargs, full=True)
            self._refuse()
        if self.gathers and self.state.sequence is not None:
            args, kwargs = each_argument(self.state.gathered, args, kwargs)
        if self.width is not None:
            args, kwargs = each_argument(self._narrow, args, kwargs)
        if self.enters:
            args, kwargs = each_argument(self.state.enter, args, kwargs)
        result = self._shadowed(self._product if self.enters else self._forward, args, kwargs)
        if self.emits and self.reduces:  # inside the region the sequence is full, divided or not in the stream
            return each_floating(lambda part: copy(reduce(part, self.axis), self.axis), result)
        if self.emits:
            result = each_floating(self.state.enter, result)
        return each_floating(self._reduce, result) if self.reduces else result

    def _shadowed(self, call: Callable[..., Any], args: Any, kwargs: Any, *, full: bool = False) -> Any:
        shadows = [each for each in self.shadows if each[1] not in each[0].__dict__]  # else its block has put it there
        try:  # a context manager would end the graph of torch.compile
            for owner, name, shadow in shadows:
                owner.__dict__[name] = (shadow.full if full else shadow)(own_parameters(owner)[name])
            return call(*args, **kwargs)
        finally:
            for owner, name, _ in shadows:
                owner.__dict__.pop(name, None)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return reduce(tensor, self.axis)

    def _refuse(self) -> None:
        block = self.block or "the module that holds it"
        remedy = f'tensor_plan={{"{self.block or self.name}": "whole"}}'
        if self.axis.weight > 1:
            remedy = "context_parallel_size=1"
        if not in_backward():
            raise TensorPlanError(
                f"{self.name} was called outside of {block}. Each rank computes a shard of it, and the plan was"
                f" proven for calls of {block}, so the result would be wrong. Call {block}, or keep it unsplit:"
                f" {remedy}."
            )
        if not self.state.repeatable:  # else a checkpoint that is not torch's repeats some of the block's forward
            raise TensorPlanError(
                f"Backward computes {self.name} again, but not through torch.utils.checkpoint.checkpoint. How {block}"
                " ran in forward (unsplit or not, its dropout, its split sequence) is unknown there. Use that function,"
                f" or keep the block unsplit: {remedy}."
            )

    def _product(self, *args: Any, **kwargs: Any) -> Any:
        plain = self.plain and "weight" in own_parameters(self.module)
        shadow = self.module.__dict__.get("weight") if plain else None
        deferral = None if shadow is None else defer(self.module, shadow)
        args, kwargs = each_argument(partial(self.state.taken, deferral=deferral), args, kwargs)
        if deferral is None or deferral.token is None:
            return self._forward(*args, **kwargs)
        (input,), bias = tensors_in((args, kwargs)), self.module.bias
        return deferral.product(input, bias)  # type: ignore[arg-type]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.mixes is not None:
            args, kwargs = each_argument(self._all_channels, args, kwargs)
        if self.foreign:
            return foreign_result(args, kwargs, [owner.__dict__[name] for owner, name, _ in self.shadows])
        result = self.next(*args, **kwargs) if self.routes is None else self.routes(self.next, args, kwargs)
        return result if self.mixes is None else each_floating(self._own_channels, result)

    def _reduce(self, tensor: Tensor) -> Tensor:
        split = self.state.sequence
        return reduce(tensor, self.axis) if split is None else leave(tensor, self.axis, split)

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
        return self.state.decoy(tensor, width) if width is not None and tensor.shape[-1] > width else tensor


def each_floating(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every floating tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if value is None or isinstance(value, bool):  # most other arguments; walking through containers costs a host more
        return value
    return map_leaves(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value
    )


def each_argument(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with every floating tensor in them changed."""
    changed = {name: each_floating(change, value) for name, value in kwargs.items()}
    return tuple([each_floating(change, value) for value in args]), changed


SENTINEL = "_is_expert_parallel"
"""Attribute of Hugging Face's experts: numbers from `num_experts` on are other ranks', and are skipped."""


class OwnRoutes:
    """Calls the module `experts` with the routes to those of one tensor rank. Each has `numbers` of them."""

    def __init__(self, experts: nn.Module, numbers: TensorSplit, group: Group) -> None:
        self.experts, self.group, ((self.start, self.stop),) = experts, group, numbers.pieces[group.rank]
        self.call = RoutedCall(experts)

    def __call__(self, forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        (hidden, index, weights), others = self.call.taken(args, kwargs)
        self.call.check(hidden, index, weights, "Leave them out of tensor_plan.")
        own = (index >= self.start) & (index < self.stop)
        # The code of the module skips other ranks' routes itself, and waits for no value.
        chosen = getattr(getattr(self.experts, "config", None), "_experts_implementation", None)
        if chosen == "grouped_mm" and hasattr(self.experts, SENTINEL):
            local = torch.where(own, index - self.start, self.stop - self.start)
            return self.call.run(forward, [hidden, local, weights.masked_fill(~own, 0.0)], others)
        where = self.group.places(own)
        tokens = where[:-1]
        routes = [hidden[tokens], (index[where] - self.start)[:, None], weights[where][:, None]]
        rows = self.call.run(forward, routes, others)
        result = rows.new_zeros((*hidden.shape[:-1], rows.shape[-1]))
        return result.index_put(tokens, rows, accumulate=True)


def foreign_result(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[Tensor]) -> Tensor:
    """Zeros in place of the result of another rank's expert, with a graph like its owner's, from empty shards."""
    hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
    dtype = autocast_dtype(hidden)
    result = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return result + sum(empty.sum().to(dtype) for empty in (hidden[:0], *parameters))
