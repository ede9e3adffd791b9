"""Sharded tensors that appear full to the user's code and are gathered on first need.

`F.cross_entropy`, and the views and casts that lead to it, run on the shard. Any other operation gathers the shards and
gets the full tensor. Gathering is a collective that all tensor ranks reach, since they run the same code on the same
batch. Outside training, where code is likelier to differ by rank, layers return gathered tensors at once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.sandbox.trees import leaves, map_leaves
from lightning_3d.tensor.autograd_collectives import gather
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.vocabulary_loss import parallel_cross_entropy


class LateGather(Tensor):
    """A tensor with the shape of the full one, of which this rank has the shard `local`."""

    local: Tensor
    division: TensorSplit
    axis: Axis
    passive: bool
    full: Tensor | None

    @staticmethod
    def of(local: Tensor, split: TensorSplit, axis: Axis, *, passive: bool = False) -> "LateGather":
        """A tensor of full size for the shard `local`.

        A passive tensor reports that it needs no gradient. FSDP2 passes tensors that do through an autograd function,
        which would get neither shard nor full tensor. The gradient flows through the shard all the same.
        """
        shape = list(local.shape)
        shape[split.dim] = split.size
        # It needs a gradient where the shard does. Code past `__torch_function__` (an autograd function) then fails in
        # backward, where a gradient on meta is an error. Otherwise it would cut off the gradient in silence.
        stand_in = torch.empty(shape, device="meta", dtype=local.dtype, requires_grad=local.requires_grad)
        lazy = stand_in.as_subclass(LateGather)
        lazy.local, lazy.division, lazy.axis, lazy.full, lazy.passive = local, split, axis, None, passive
        return lazy

    def gathered(self) -> Tensor:
        """The full tensor. Collective the first time."""
        if self.full is None:
            self.full = gather(self.local, self.axis, self.division)
        return self.full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LateGather):
            if func == _getter("requires_grad") and first.passive:
                return False
            if func == _getter("_base"):
                return None  # FSDP2 checks for views, and this tensor is none
            if func is Tensor.register_hook:
                # FSDP2 hooks the results of a block and then wraps the arguments of the next: it needs this no more.
                first.passive = True
            if func in ON_EITHER:
                return func(first.local if first.full is None else first.full, *args[1:], **kwargs)
            if func in OF_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if first.full is None and func in ON_SHARDS:
                done = ON_SHARDS[func](first, *args[1:], **kwargs)
                if done is not None:
                    return done
        return func(*map_leaves(_gathered, args), **map_leaves(_gathered, kwargs))


def gather_late(value: Any) -> Any:
    """`value` with every `LateGather` in it gathered, for code that cannot work with one."""
    return map_leaves(_gathered, value)


def pass_late_gather(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook in front of a block, before FSDP2's, which must find no `LateGather` that needs a gradient."""
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, LateGather):
            leaf.passive = True


def _getter(name: str) -> Any:
    """The function that `__torch_function__` gets where an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, LateGather) else value


def _same_place(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of each element."""
    return lambda lazy, *args, **kwargs: LateGather.of(
        method(lazy.local, *args, **kwargs), lazy.division, lazy.axis, passive=lazy.passive
    )


def _scaled(method: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A product with one number."""
    return lambda lazy, other: (
        LateGather.of(method(lazy.local, other), lazy.division, lazy.axis) if isinstance(other, int | float) else None
    )


def _is_last(lazy: LateGather) -> bool:
    return lazy.division.dim == lazy.local.dim() - 1


def _moved(lazy: LateGather, local: Tensor, dim: int) -> LateGather:
    return LateGather.of(local, TensorSplit(dim, lazy.division.pieces), lazy.axis)


def _view(lazy: LateGather, *shape: Any) -> LateGather | None:
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int | torch.dtype) else list(shape)
    if not _is_last(lazy) or not all(type(size) is int for size in sizes):
        return None
    if sizes[-1] == -1 and -1 not in sizes[:-1]:
        lead = lazy.local.numel() // lazy.local.shape[-1]
        sizes[-1] = lazy.division.size if torch.Size(sizes[:-1]).numel() == lead else 0
    if sizes[-1] != lazy.division.size:
        return None
    return _moved(lazy, lazy.local.reshape(*sizes[:-1], lazy.local.shape[-1]), len(sizes) - 1)


def _flatten(lazy: LateGather, start_dim: int = 0, end_dim: int = -1) -> LateGather | None:
    count = lazy.local.dim()
    if not _is_last(lazy) or end_dim % count >= lazy.division.dim:
        return None
    local = lazy.local.flatten(start_dim, end_dim)
    return _moved(lazy, local, local.dim() - 1)


def _index(lazy: LateGather, index: Any) -> LateGather | None:
    items = index if isinstance(index, tuple) else (index,)
    if not _is_last(lazy) or any(item is None or isinstance(item, bool) for item in items):
        return None
    used = sum(_consumes(item) for item in items if item is not Ellipsis)
    after = items[items.index(Ellipsis) + 1 :] if any(item is Ellipsis for item in items) else ()
    reaches_last = bool(after) or used == lazy.local.dim()
    if reaches_last and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return None
    if any(isinstance(item, Tensor) for item in items) and len(items) > 1:
        return None
    local = lazy.local[index]
    return _moved(lazy, local, local.dim() - 1)


def _consumes(item: Any) -> int:
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _transpose(lazy: LateGather, dim0: int, dim1: int) -> LateGather:
    count = lazy.local.dim()
    places = {dim0 % count: dim1 % count, dim1 % count: dim0 % count}
    return _moved(lazy, lazy.local.transpose(dim0, dim1), places.get(lazy.division.dim, lazy.division.dim))


def _permute(lazy: LateGather, *dims: Any) -> LateGather:
    order = [dim % lazy.local.dim() for dim in (dims[0] if len(dims) == 1 else dims)]
    return _moved(lazy, lazy.local.permute(order), order.index(lazy.division.dim))


def _cross_entropy(
    lazy: LateGather,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    classes = 1 if lazy.local.dim() > 1 else 0
    known = size_average is None and reduce is None and not target.is_floating_point()
    if lazy.division.dim != classes or not known or isinstance(target, LateGather) or len(lazy.division.sections) > 1:
        return None
    logits = lazy.local.movedim(classes, -1)
    device = logits.device.type
    if torch.is_autocast_enabled(device):
        logits = logits.float()
    return parallel_cross_entropy(
        logits, target, lazy.division, lazy.axis, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


ON_SHARDS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _view, Tensor.reshape: _view, torch.reshape: _view,
    Tensor.flatten: _flatten, torch.flatten: _flatten, Tensor.__getitem__: _index,
    Tensor.transpose: _transpose, torch.transpose: _transpose, Tensor.permute: _permute, torch.permute: _permute,
    **{f: _same_place(f) for f in (
        Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.contiguous, Tensor.clone,
    )},
    **{f: _scaled(f) for f in (
        Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, torch.mul, torch.div,
    )},
}  # fmt: skip
"""Functions that run on the shard. They return None for arguments that need the full tensor."""
OF_SHAPE: frozenset[Any] = frozenset(
    {
        *map(_getter, ("shape", "ndim", "dtype")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.is_floating_point, torch.numel, torch.is_floating_point),
    }
)
"""Functions that the tensor of full size answers."""
ON_EITHER: frozenset[Any] = frozenset(
    {
        *map(_getter, ("device", "requires_grad", "grad_fn", "is_leaf", "layout")),
        *map(_getter, ("is_cuda", "is_cpu", "is_meta", "is_sparse")),
        *(Tensor.register_hook, Tensor.get_device),
    }
)
"""Functions that give the same for the shard and the full tensor."""
