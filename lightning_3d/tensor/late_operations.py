"""Operations of a `LateTensor` that need its shard alone: views, casts, functions of elements or rows, and losses.

A division along positions is followed through views, up to a loss whose rows are divided.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.sandbox.trees import map_leaves
from lightning_3d.tensor.autograd_collectives import copy, reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.cross_entropy import counted_weights, cross_entropy_in_parts, parallel_cross_entropy
from lightning_3d.tensor.geometry import Interval, TensorSplit, local_part
from lightning_3d.tensor.late_product import Product, is_large
from lightning_3d.tensor.late_tensor import ON_SHARDS, LateTensor, Step, compute_late, is_part, on_stand_in


@lru_cache(256)
def reshaped(split: TensorSplit, shape: tuple[int, ...], new: tuple[int, ...]) -> TensorSplit | None:
    """`split` of a tensor of `shape`, after it is reshaped to `new`. None where that divides several dimensions."""
    wanted = _elements(split, shape)
    for dim in range(len(new)):
        inner = prod(new[dim + 1 :])
        row = new[dim] * inner
        firsts = [[(start, min(stop, row)) for start, stop in each if start < row] or [(0, 0)] for each in wanted]
        if inner and all(at % inner == 0 for each in firsts for interval in each for at in interval):
            pieces = tuple(tuple((start // inner, stop // inner) for start, stop in each) for each in firsts)
            found = TensorSplit(dim, pieces)
            if _elements(found, new) == wanted:
                return found
    return None


def _elements(split: TensorSplit, shape: Sequence[int]) -> list[list[Interval]]:
    """The intervals of each rank in the flattened tensor."""
    inner = prod(shape[split.dim + 1 :])
    row = shape[split.dim] * inner
    found: list[list[Interval]] = []
    for piece in split.pieces:
        own: list[Interval] = []
        for outer in range(prod(shape[: split.dim])):
            for start, stop in piece:
                begin, end = outer * row + start * inner, outer * row + stop * inner
                if own and own[-1][1] == begin:
                    own[-1] = (own[-1][0], end)
                elif begin < end:
                    own.append((begin, end))
        found.append(own)
    return found


@lru_cache(256)
def sliced(split: TensorSplit, start: int, stop: int) -> tuple[TensorSplit, tuple[slice, ...]]:
    """`split` of the positions from `start` to `stop` alone, and the slice of each rank's part that has them."""
    clip = lambda at: min(max(at, start), stop) - start  # noqa: E731
    pieces = tuple(tuple((clip(low), clip(high)) for low, high in piece) for piece in split.pieces)
    before = lambda at, piece: sum(min(max(at, low), high) - low for low, high in piece)  # noqa: E731
    return TensorSplit(split.dim, pieces), tuple(slice(before(start, p), before(stop, p)) for p in split.pieces)


def loss_over_ranks(
    losses: Tensor, target: Tensor, axis: Axis, *, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """The sum or mean of the `losses` of all ranks. Only a sum is sent: each rank can count the whole `target`."""
    wide = torch.promote_types(losses.dtype, torch.float32)  # a sum in half precision may overflow
    total = reduce(losses.to(wide).sum(), axis)
    if reduction == "mean":
        total = total / counted_weights(target, weight, ignore_index).sum()
    return total.to(losses.dtype)


def _then(func: Any, args: Any, kwargs: Any) -> Step:
    return lambda full: func(full, *args, **kwargs)


def _elementwise(late: LateTensor, step: Step, stand_in: Tensor) -> LateTensor:
    if stand_in is late:
        return late
    if late.product is None:
        return late.derived(step, stand_in, step(late.local))
    return late.derived(step, stand_in, late.local, product=late.product.then(step, stand_in.dtype))


def _cast(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    probe = torch.empty((0,) * late.local.dim(), dtype=late.dtype, device=late.device)
    result = func(probe, *args, **kwargs)
    if result.device != probe.device or not result.is_floating_point() or "memory_format" in kwargs:
        return NotImplemented
    stand_in = late if result is probe else on_stand_in(late, Tensor.to, result.dtype, copy=True)
    return _elementwise(late, _then(func, args, kwargs), stand_in)


def _scaled(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], int | float):
        return NotImplemented
    return _each(late, func, *args)


def _copied(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    stand_in = on_stand_in(late, func, *args, **kwargs)
    return late if stand_in is late else late.derived(_then(func, args, kwargs), stand_in, late.local)


def _is_last(late: LateTensor) -> bool:
    return late.division.dim == late.local.dim() - 1


def _reshaped(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    stand_in = on_stand_in(late, func, *args, **kwargs)
    if stand_in is late:
        return late
    if is_part(late):
        split = None if stand_in.dtype != late.dtype else reshaped(late.division, late.shape, stand_in.shape)
        if split is None:
            return NotImplemented
        assert late.axis is not None
        shape = list(stand_in.shape)
        shape[split.dim] = split.local_size(late.axis.rank)
        return late.derived(_then(func, args, kwargs), stand_in, late.local.reshape(shape), split=split)
    size = stand_in.shape[-1] if stand_in.dim() else 0
    if not _is_last(late) or size != late.division.size or stand_in.dtype != late.dtype:
        return NotImplemented
    local = late.local.reshape(*stand_in.shape[:-1], late.local.shape[-1])
    split = TensorSplit(local.dim() - 1, late.division.pieces)
    return late.derived(_then(func, args, kwargs), stand_in, local, split=split)


def _permuted(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> LateTensor:
    sizes = func(torch.empty(*range(late.local.dim()), device="meta"), *args, **kwargs).shape
    order = list(sizes)  # dimension i of the tensor above has size i
    stand_in = on_stand_in(late, func, *args, **kwargs)
    split = TensorSplit(order.index(late.division.dim), late.division.pieces)
    return late.derived(_then(func, args, kwargs), stand_in, late.local.permute(order), split=split)


def _indexed(late: LateTensor, func: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if is_part(late):
        return _indexed_part(late, func, list(items))
    rows = isinstance(index, Tensor)  # it picks rows by their numbers, or is a mask
    if not _is_last(late) or not all(map(_is_plain, () if rows else items)):
        return NotImplemented
    if rows and (type(index) is not Tensor or index.dtype not in (torch.bool, torch.int64)):
        return NotImplemented
    used = index.dim() if rows and index.dtype == torch.bool else sum(item is not Ellipsis for item in items)
    after = () if rows or Ellipsis not in items else items[items.index(Ellipsis) + 1 :]
    if (after or used == late.local.dim()) and (rows or items[-1] != slice(None)):
        return NotImplemented
    index = index.clone() if rows else index  # the user's code may change it before the full tensor is computed
    local = late.local[index]
    if rows:
        trains = late.group.gate is not None
        shape = (*local.shape[:-1], late.division.size)
        stand_in = torch.empty(shape, device="meta", dtype=late.dtype, requires_grad=trains)
    else:
        stand_in = on_stand_in(late, func, index)
    split = TensorSplit(local.dim() - 1, late.division.pieces)
    return late.derived(_then(func, (index,), {}), stand_in, local, split=split)


def _indexed_part(late: LateTensor, func: Any, items: list[Any]) -> Any:
    """Some neighbouring positions, or some of another dimension."""
    if not all(map(_is_plain, items)) or items.count(Ellipsis) > 1:
        return NotImplemented
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    rest = [slice(None)] * (late.dim() - len([item for item in items if item is not Ellipsis]))
    full, dim = [*items[:at], *rest, *items[at + 1 :]], late.division.dim
    start, stop, step = full[dim].indices(late.shape[dim]) if isinstance(full[dim], slice) else (0, 0, 0)
    if step != 1 or start >= stop:
        return NotImplemented
    split, own = sliced(late.division, start, stop)
    assert late.axis is not None
    here = (*full[:dim], own[late.axis.rank], *full[dim + 1 :])
    split = TensorSplit(dim - sum(isinstance(item, int) for item in full[:dim]), split.pieces)
    return late.derived(
        _then(func, (tuple(items),), {}), on_stand_in(late, func, tuple(items)), late.local[here], split=split
    )


def _is_plain(item: Any) -> bool:
    if isinstance(item, slice):
        return all(part is None or isinstance(part, int) for part in (item.start, item.stop, item.step))
    return item is Ellipsis or (isinstance(item, int) and not isinstance(item, bool))


def _cross_entropy(
    late: LateTensor,
    func: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = 1 if late.local.dim() > 1 else 0
    how: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    if size_average is not None or reduce is not None or not _are_rows(late, target, classes, weight):
        return NotImplemented
    if is_part(late):
        options = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
        return _over_ranks(late, target, classes, partial(func, **options), **how)
    if late.division.dim != classes or func is not F.cross_entropy or len(late.division.sections) > 1:
        return NotImplemented
    late.group.loss_computed = True
    local = late.local.movedim(classes, -1)
    cast = torch.is_autocast_enabled(local.device.type) and late.dtype != torch.float64
    losses = partial(_loss, late.division, late.axis, cast, label_smoothing=label_smoothing)
    if late.product is None or not is_large(local, late.division.size, late.division.ranks):
        return losses(local if late.product is None else late.product.of_rows(local), target, **how)
    each, count = partial(losses, **{**how, "reduction": "none"}), late.division.size // late.division.ranks
    dtype = torch.float32 if cast else late.product.dtype
    return cross_entropy_in_parts(local, late.product, target, each, count, **how).to(dtype)


def _loss(split: TensorSplit, axis: Axis | None, cast: bool, logits: Tensor, target: Tensor, **how: Any) -> Tensor:
    """Cross-entropy of logits whose classes are the last dimension."""
    logits = logits.float() if cast else logits
    if axis is not None:
        return parallel_cross_entropy(logits, target, split, axis, **how)
    found = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **how)
    return found.view(target.shape) if how["reduction"] == "none" else found


def _linear_cross_entropy(
    late: LateTensor,
    func: Any,
    linear_weight: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **options: Any,
) -> Any:
    classes, ignored = late.dim() - 1, -100 if ignore_index is None else ignore_index
    if not is_part(late) or not _are_rows(late, target, classes, weight):
        return NotImplemented
    linear_weight, options = _of_positions(late, (linear_weight, options))
    losses = lambda rows, target, **how: func(compute_late(rows), linear_weight, target, **options, **how)  # noqa: E731
    return _over_ranks(late, target, classes, losses, weight=weight, reduction=reduction, ignore_index=ignored)


def _are_rows(late: LateTensor, target: Tensor, classes: int, weight: Tensor | None) -> bool:
    """True for a class of each row, and for weights that are no parameters."""
    rows = (*late.shape[:classes], *late.shape[classes + 1 :])
    plain = not target.is_floating_point() and not isinstance(target, LateTensor)
    return plain and target.shape == rows and (weight is None or not weight.requires_grad)


def _over_ranks(
    late: LateTensor, target: Tensor, classes: int, losses: Callable[..., Tensor], *, reduction: str, **how: Any
) -> Any:
    """The loss of all positions, from the `losses` of those of each rank."""
    dim, axis = late.division.dim, late.axis
    if dim == classes or axis is None:
        return NotImplemented
    late.group.loss_computed = True
    split = TensorSplit(dim - (dim > classes), late.division.pieces)
    found = losses(late.local, local_part(target, split, axis.rank), reduction="none", **how)
    if reduction == "none":
        return LateTensor.of(found, split, axis)
    return loss_over_ranks(found, target, axis, reduction=reduction, **how)


def _of_positions(late: LateTensor, values: Any) -> Any:
    """`values` as a part uses them: gradients of what was computed before are summed over the parts."""
    axis = late.axis
    assert axis is not None
    return map_leaves(lambda leaf: copy(leaf, axis) if isinstance(leaf, Tensor) and not leaf.is_leaf else leaf, values)


WEIGHTS: set[type] = {Tensor, nn.Parameter}
"""Classes of weights whose product is torch's own."""


def _linear(late: LateTensor, func: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A head on a part, which may never be computed whole."""
    if not is_part(late) or type(weight) not in WEIGHTS or weight.dim() != 2 or late.division.dim == late.dim() - 1:
        return NotImplemented
    late.group.loss_computed = True
    rows, product = Product.of(compute_late(late.local), *_of_positions(late, (weight, bias)))
    classes = TensorSplit.even(rows.dim() - 1, weight.shape[0], 1)
    return late.with_rows(LateTensor.of(rows, classes, None, product=product))


def _each_row(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A norm or a softmax over the last dimension."""
    over = args[0] if args else kwargs.get("normalized_shape", kwargs.get("dim"))
    last = over in (-1, late.dim() - 1) if isinstance(over, int | None) else len(over) == 1
    if not is_part(late) or not last or late.division.dim == late.dim() - 1:
        return NotImplemented
    own_args, own_kwargs = _of_positions(late, (args, kwargs))
    local = func(compute_late(late.local), *own_args, **own_kwargs)
    return late.derived(_then(func, args, kwargs), on_stand_in(late, Tensor.to, local.dtype, copy=True), local)


def _each(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> LateTensor:
    return _elementwise(late, _then(func, args, kwargs), on_stand_in(late, func, *args, **kwargs))


OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _cross_entropy),
    F.linear: _linear,
    **dict.fromkeys((F.layer_norm, F.rms_norm), _each_row),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _each_row),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _each),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshaped),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to), _cast),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone), _copied),
    **dict.fromkeys(
        (Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, torch.mul, torch.div), _scaled
    ),
}
if hasattr(F, "linear_cross_entropy"):  # torch has it since 2.13
    OPERATIONS[F.linear_cross_entropy] = _linear_cross_entropy
ON_SHARDS.update(OPERATIONS)
