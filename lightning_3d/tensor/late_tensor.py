"""Tensors that appear full to the user's code and are computed, or gathered from shards, on first need.

`F.cross_entropy`, and the views and casts that lead to it, need no full tensor. Any other operation gets it. Gathering
is a collective that all tensor ranks reach, since they run the same code on the same batch. Outside training, where
code is likelier to differ by rank, layers return gathered tensors at once.

A tensor and the views and casts of it are a family. The first need of one computes all of them, by the operations that
the user's code has called. So a view shares its memory with its base, and a write is seen where torch shows it.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.autograd_private import in_backward, in_checkpoint, in_transform
from lightning_3d.sandbox.trees import leaves, map_leaves
from lightning_3d.tensor.autograd_collectives import gather
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_product import Product
from lightning_3d.tensor.loss_in_parts import cross_entropy_in_parts
from lightning_3d.tensor.vocabulary_loss import parallel_cross_entropy

Step = Callable[[Tensor], Tensor]


@dataclass
class Family:
    """A late tensor and those derived from it. All of them are computed, or none."""

    gate: Tensor | None
    """The gradients of all members pass through it. None if there are none."""
    members: list[Callable[[], "LateTensor | None"]] = field(default_factory=list)
    """Weak references in the order of creation."""
    passed: bool = False
    """True once a loss has been computed without the full tensor."""
    nested: bool = field(default_factory=lambda: not may_wait())
    """True where a checkpoint repeats its creation, and then also what follows."""


class LateTensor(Tensor):
    """A tensor with the shape of the full one, of which this rank has `local`.

    That is its shard. With a `product` it is what the shard is computed from: rows, with features in place of classes.
    """

    local: Tensor
    division: TensorSplit
    axis: Axis | None
    product: Product | None
    origin: tuple["LateTensor", Step] | None
    """The member that this one is derived from, and how."""
    family: Family
    full: Tensor | None
    passive: bool
    """True in a block of FSDP2. See `pass_late`."""

    @staticmethod
    def of(local: Tensor, split: TensorSplit, axis: Axis | None, *, product: Product | None = None) -> "LateTensor":
        """A tensor of full size for `local`.

        Args:
            local: this rank's shard, or what `product` computes it from.
            split: of the full tensor.
            axis: the ranks that have the shards; None where this rank has everything.
            product: computes the shard; None where `local` is the shard.
        """
        shape = list(local.shape)
        shape[split.dim] = split.size
        dtype = local.dtype if product is None else product.dtype
        sources = (local,) if product is None else (local, product.weight, product.bias)
        gate = next((source for source in sources if source is not None and source.requires_grad), None)
        # It needs a gradient where the shard does. Code past `__torch_function__` (an autograd function) then fails in
        # backward, where a gradient on meta is an error. Otherwise it would cut off the gradient in silence.
        stand_in = torch.empty(shape, device="meta", dtype=dtype, requires_grad=gate is not None)
        return LateTensor._new(stand_in, local, split, axis, product, None, Family(gate))

    @staticmethod
    def _new(
        stand_in: Tensor,
        local: Tensor,
        split: TensorSplit,
        axis: Axis | None,
        product: Product | None,
        origin: tuple["LateTensor", Step] | None,
        family: Family,
    ) -> "LateTensor":
        late = stand_in.as_subclass(LateTensor)
        late.local, late.division, late.axis, late.product = local, split, axis, product
        late.origin, late.family, late.full, late.passive = origin, family, None, False
        family.members.append(weakref.ref(late))
        return late

    def derived(
        self, step: Step, stand_in: Tensor, local: Tensor, *, dim: int | None = None, product: Product | None = None
    ) -> "LateTensor":
        """The result of `step`, with its shard.

        Args:
            step: gives the full result from the full tensor.
            stand_in: a tensor on meta with the result's shape and strides.
            local: of the result.
            dim: of the classes, if it is another one.
            product: of the result, if it is another one.
        """
        split = self.division if dim is None else TensorSplit(dim, self.division.pieces)
        return LateTensor._new(stand_in, local, split, self.axis, product or self.product, (self, step), self.family)

    def computed(self) -> Tensor:
        """The full tensor. Collective the first time."""
        if self.full is None:
            # The first need may be a metric's, without gradients, and the next one the loss. A checkpoint would save
            # what it computes the first time only.
            aside = saved_tensors_hooks(_same, _same) if in_checkpoint() else nullcontext()
            with torch.inference_mode(False), torch.enable_grad(), aside:
                for reference in self.family.members:
                    member = reference()
                    if member is not None:
                        member._compute()
        assert self.full is not None
        return self.full

    def _compute(self) -> None:
        if self.full is not None:
            return  # an error stopped an earlier try
        if self.origin is not None:
            base, step = self.origin
            assert base.full is not None
            self.full, self.origin = step(base.full), None
            return
        shard = self.local if self.product is None else self.product.of_rows(self.local)
        self.full = shard if self.axis is None else gather(shard, self.axis, self.division)

    # torch does not pass it to `__torch_function__`.
    def as_subclass(self, cls: Any) -> Any:
        return self.computed().as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        late, *rest = args or (kwargs.get("input"),)
        if isinstance(late, LateTensor):
            if func == _getter("requires_grad") and late.passive:
                return False
            if late.full is None:
                named = kwargs if args else {name: value for name, value in kwargs.items() if name != "input"}
                done = _without_full(late, func, rest, named)
                if done is not NotImplemented:
                    return done
        if func in OF_GRADIENT:
            _check_in_graph((args, kwargs))
        return func(*map_leaves(_computed, args), **map_leaves(_computed, kwargs))


def may_wait() -> bool:
    """Return True where a loss is likely to follow.

    A checkpoint, `torch.compile` and a transform of `torch.func` follow each operation. A backward, and code without
    gradients, need at once what they compute.
    """
    followed = torch.compiler.is_compiling() or in_checkpoint() or in_transform()
    return torch.is_grad_enabled() and not followed and not in_backward()


def compute_late(value: Any) -> Any:
    """`value` with every `LateTensor` in it computed, for code that cannot work with one."""
    return map_leaves(_computed, value)


def pass_late(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook in front of a block, before FSDP2's, which must find no `LateTensor` that needs a gradient.

    It passes tensors that do through an autograd function, which would get neither shard nor full tensor. The gradient
    flows through the shard all the same.
    """
    for leaf in leaves((args, kwargs)):
        if isinstance(leaf, LateTensor):
            leaf.passive = True


def _without_full(late: LateTensor, func: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    """What `func` gives for a late tensor, NotImplemented where that takes the full one."""
    if func in OF_LOCAL:
        return func(late.local, *rest, **kwargs)
    if func in OF_STAND_IN:
        return _on_stand_in(late, func, *rest, **kwargs)
    if func == _getter("_base"):
        return None  # FSDP2 checks for views, and this tensor is none
    gate = late.family.gate
    if func is Tensor.register_hook and gate is not None and _is_of_torch(*rest, **kwargs):
        return gate.register_hook(*rest, **kwargs)  # type: ignore[no-untyped-call]
    if func in ON_SHARDS and torch.is_grad_enabled() and (late.family.nested or may_wait()):
        return ON_SHARDS[func](late, func, *rest, **kwargs)
    return NotImplemented


def _is_of_torch(hook: Any) -> bool:
    """Return True for a hook of FSDP2, which asks when the backward gets there and not for the gradient."""
    return (getattr(hook, "__module__", None) or "").startswith(torch.distributed.__name__)


def _check_in_graph(arguments: Any) -> None:
    """Raise if a loss does not depend on a late tensor among `arguments`, in autograd's view."""
    if any(isinstance(leaf, LateTensor) and leaf.family.passed for leaf in leaves(arguments)):
        raise UnsupportedError(
            "The gradient of logits is requested after F.cross_entropy has computed its loss without them. Large"
            " logits, and those that tensor ranks divide, are computed when another operation first uses them. The loss"
            " does not depend on them, so their gradient would be missing. Call `logits.retain_grad()` before the loss:"
            " it computes them."
        )


def _getter(name: str) -> Any:
    """The function that `__torch_function__` gets where an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, LateTensor) else value


def _same(value: Any) -> Any:
    return value


def _on_stand_in(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result on meta. It is `late` itself where torch returns the tensor itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(late, *args, **kwargs)


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
    stand_in = late if result is probe else _on_stand_in(late, Tensor.to, result.dtype, copy=True)
    return _elementwise(late, _then(func, args, kwargs), stand_in)


def _scaled(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A product with one number."""
    if len(args) != 1 or kwargs or not isinstance(args[0], int | float):
        return NotImplemented
    return _elementwise(late, _then(func, args, kwargs), _on_stand_in(late, func, *args))


def _copied(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    stand_in = _on_stand_in(late, func, *args, **kwargs)
    return late if stand_in is late else late.derived(_then(func, args, kwargs), stand_in, late.local)


def _is_last(late: LateTensor) -> bool:
    return late.division.dim == late.local.dim() - 1


def _reshaped(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    stand_in = _on_stand_in(late, func, *args, **kwargs)
    if stand_in is late:
        return late
    size = stand_in.shape[-1] if stand_in.dim() else 0
    if not _is_last(late) or size != late.division.size or stand_in.dtype != late.dtype:
        return NotImplemented
    local = late.local.reshape(*stand_in.shape[:-1], late.local.shape[-1])
    return late.derived(_then(func, args, kwargs), stand_in, local, dim=local.dim() - 1)


def _permuted(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> LateTensor:
    sizes = func(torch.empty(*range(late.local.dim()), device="meta"), *args, **kwargs).shape
    order = list(sizes)  # dimension i of the tensor above has size i
    stand_in = _on_stand_in(late, func, *args, **kwargs)
    local, dim = late.local.permute(order), order.index(late.division.dim)
    return late.derived(_then(func, args, kwargs), stand_in, local, dim=dim)


def _indexed(late: LateTensor, func: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    rows = isinstance(index, Tensor)  # it picks rows by their numbers, or is a mask
    if not _is_last(late) or not all(map(_is_plain, () if rows else items)):
        return NotImplemented
    if rows and (type(index) is not Tensor or index.dtype not in (torch.bool, torch.int64)):
        return NotImplemented
    used = sum(_consumes(item) for item in items if item is not Ellipsis)
    after = () if rows or Ellipsis not in items else items[items.index(Ellipsis) + 1 :]
    if (after or used == late.local.dim()) and (rows or items[-1] != slice(None)):
        return NotImplemented
    index = index.clone() if rows else index  # the user's code may change it before the full tensor is computed
    local = late.local[index]
    if rows:
        trains = late.family.gate is not None
        shape = (*local.shape[:-1], late.division.size)
        stand_in = torch.empty(shape, device="meta", dtype=late.dtype, requires_grad=trains)
    else:
        stand_in = _on_stand_in(late, func, index)
    return late.derived(_then(func, (index,), {}), stand_in, local, dim=local.dim() - 1)


def _is_plain(item: Any) -> bool:
    if isinstance(item, slice):
        return all(part is None or isinstance(part, int) for part in (item.start, item.stop, item.step))
    return item is Ellipsis or (isinstance(item, int) and not isinstance(item, bool))


def _consumes(item: Any) -> int:
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


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
    if late.axis is not None and late.axis.weight != 1:
        return NotImplemented  # a sequence with positions as classes, whose gradients are weighed elsewhere
    classes = 1 if late.local.dim() > 1 else 0
    known = size_average is None and reduce is None and not target.is_floating_point()
    if late.division.dim != classes or not known or isinstance(target, LateTensor) or len(late.division.sections) > 1:
        return NotImplemented
    local = late.local.movedim(classes, -1)
    if target.shape != local.shape[:-1] or (weight is not None and weight.requires_grad):
        return NotImplemented
    late.family.passed = True
    cast = torch.is_autocast_enabled(local.device.type) and late.dtype != torch.float64
    how: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    if late.product is None:
        return _loss(late.division, late.axis, cast, local, target, label_smoothing=label_smoothing, **how)
    one = {**how, "reduction": "none", "label_smoothing": label_smoothing}
    losses = partial(_loss, late.division, late.axis, cast, **one)
    count = late.division.size // late.division.ranks
    dtype = torch.float32 if cast else late.product.dtype
    return cross_entropy_in_parts(local, late.product, target, losses, count, **how).to(dtype)


def _loss(split: TensorSplit, axis: Axis | None, cast: bool, logits: Tensor, target: Tensor, **how: Any) -> Tensor:
    logits = logits.float() if cast else logits
    return (
        F.cross_entropy(logits, target, **how)
        if axis is None
        else parallel_cross_entropy(logits, target, split, axis, **how)
    )


ON_SHARDS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _reshaped),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to), _cast),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone), _copied),
    **dict.fromkeys(
        (Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, torch.mul, torch.div), _scaled
    ),
}
"""Functions that run on the shard. They return NotImplemented for arguments that need the full tensor."""
OF_STAND_IN: frozenset[Any] = frozenset(
    {
        *map(_getter, ("shape", "ndim", "dtype", "layout", "requires_grad", "grad_fn", "is_leaf")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.is_floating_point, torch.numel, torch.is_floating_point),
    }
)
"""Functions that the tensor of full size answers."""
OF_LOCAL: frozenset[Any] = frozenset(
    {*map(_getter, ("device", "is_cuda", "is_cpu", "is_meta", "is_sparse")), Tensor.get_device}
)
"""Functions that give the same for the shard and the full tensor."""
OF_GRADIENT: frozenset[Any] = frozenset({Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad})
"""Functions that give the gradient of a tensor to the user's code."""
