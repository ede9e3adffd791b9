"""Tensors that appear full to the user's code and are computed, or gathered from shards, on first need.

`F.cross_entropy`, and the views and casts that lead to it, need no full tensor. Any other operation gets it. Gathering
is a collective that all tensor ranks reach, since they run the same code on the same batch. Outside training, where
code is likelier to differ by rank, layers return gathered tensors at once.

Context ranks divide positions. Behind the last block norms and products compute token by token, so on a part too. The
`local` tensor of a result may then be a late tensor itself, whose classes tensor ranks divide.

A tensor and the views and casts of it are a group. The first need of one computes all of them, by the operations that
the user's code has called. So a view shares its memory with its base, and a write is seen where torch shows it.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import in_backward, in_checkpoint, in_transform, no_subclasses
from lightning_3d.sandbox.trees import leaves, map_leaves
from lightning_3d.tensor.autograd_collectives import gather
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_product import Product

Step = Callable[[Tensor], Tensor]


@dataclass
class LateGroup:
    """A late tensor and those derived from it. All of them are computed, or none."""

    gate: Tensor | None
    """The gradients of all members pass through it. None if there are none."""
    members: list[Callable[[], "LateTensor | None"]] = field(default_factory=list)
    """Weak references in the order of creation."""
    loss_computed: bool = False
    """True once a loss, or a head on parts, has been computed without the full tensor."""
    in_checkpoint: bool = field(default_factory=lambda: not may_wait())
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
    group: LateGroup
    full: Tensor | None
    passive: bool
    """True in a block of FSDP2. See `pass_late`."""

    @staticmethod
    def of(local: Tensor, split: TensorSplit, axis: Axis | None, *, product: Product | None = None) -> "LateTensor":
        """A tensor of full size for `local`.

        `local` is this rank's shard, or what `product` computes it from. With no `axis` this rank has everything.
        """
        shape = list(local.shape)
        shape[split.dim] = split.size
        dtype = local.dtype if product is None else product.dtype
        sources = (local,) if product is None else (local, product.weight, product.bias)
        gate = next((source for source in sources if source is not None and source.requires_grad), None)
        # It needs a gradient where the shard does. Code past `__torch_function__` (an autograd function) then fails in
        # backward, where a gradient on meta is an error. Otherwise it would cut off the gradient in silence.
        stand_in = torch.empty(shape, device="meta", dtype=dtype, requires_grad=gate is not None)
        return LateTensor._new(stand_in, local, split, axis, product, None, LateGroup(gate))

    @staticmethod
    def _new(
        stand_in: Tensor,
        local: Tensor,
        split: TensorSplit,
        axis: Axis | None,
        product: Product | None,
        origin: tuple["LateTensor", Step] | None,
        group: LateGroup,
    ) -> "LateTensor":
        late = stand_in.as_subclass(LateTensor)
        late.local, late.division, late.axis, late.product = local, split, axis, product
        late.origin, late.group, late.full, late.passive = origin, group, None, False
        group.members.append(weakref.ref(late))
        return late

    def derived(
        self,
        step: Step,
        stand_in: Tensor,
        local: Tensor,
        *,
        split: TensorSplit | None = None,
        product: Product | None = None,
    ) -> "LateTensor":
        """The result of `step`, which gives it from the full tensor; with its shard, and another split or product.

        `stand_in` is on meta, with the result's shape and strides.
        """
        origin, division = (self, step), split or self.division
        return LateTensor._new(stand_in, local, division, self.axis, product or self.product, origin, self.group)

    def with_rows(self, rows: Tensor) -> "LateTensor":
        """A result of this one, of which each rank has computed its own positions."""
        return LateTensor.of(rows, self.division, self.axis)

    def computed(self) -> Tensor:
        """The full tensor. Collective the first time."""
        if self.full is None:
            # The first need may be a metric's, without gradients, and the next one the loss. A checkpoint would save
            # what it computes the first time only.
            aside = saved_tensors_hooks(_same, _same) if in_checkpoint() else nullcontext()
            with torch.inference_mode(False), torch.enable_grad(), aside:
                for reference in self.group.members:
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
        head = self.local if isinstance(self.local, LateTensor) else None
        if head is not None and head.product is not None:  # its rows are smaller than its results
            assert self.axis is not None
            rows = gather(head.local, self.axis, self.division)
            self.full = LateTensor.of(rows, head.division, head.axis, product=head.product).computed()
            return
        shard = compute_late(self.local) if self.product is None else self.product.of_rows(self.local)
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
        if is_part(late):
            _tell_once(late, func)
        return func(*map_leaves(_computed, args), **map_leaves(_computed, kwargs))


def may_wait() -> bool:
    """Return True where a loss is likely to follow.

    A checkpoint, `torch.compile` and a transform of `torch.func` follow each operation. A backward, and code without
    gradients, need at once what they compute.
    """
    followed = torch.compiler.is_compiling() or in_checkpoint() or in_transform()
    return torch.is_grad_enabled() and not followed and not in_backward()


def is_part(value: Any) -> TypeGuard[LateTensor]:
    """True for a tensor of which this rank has positions alone, as context ranks divide them."""
    return isinstance(value, LateTensor) and value.full is None and value.axis is not None and value.axis.weight != 1


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
    """The result of `func` for a late tensor, NotImplemented where that takes the full one."""
    if func in OF_LOCAL:
        return func(late.local, *rest, **kwargs)
    if func in OF_STAND_IN:
        return on_stand_in(late, func, *rest, **kwargs)
    if func == _getter("_base"):
        return None  # FSDP2 checks for views, and this tensor is none
    gate = late.group.gate
    if func is Tensor.register_hook and gate is not None and _is_of_torch(*rest, **kwargs):
        return gate.register_hook(*rest, **kwargs)  # type: ignore[no-untyped-call]
    if func in ON_SHARDS and torch.is_grad_enabled() and (late.group.in_checkpoint or may_wait()):
        return ON_SHARDS[func](late, func, *rest, **kwargs)
    return NotImplemented


def _is_of_torch(hook: Any) -> bool:
    """Return True for a hook of FSDP2, which asks when the backward gets there and not for the gradient."""
    return (getattr(hook, "__module__", None) or "").startswith(torch.distributed.__name__)


def _check_in_graph(arguments: Any) -> None:
    """Raise if a loss does not depend on a late tensor among `arguments`, in autograd's view."""
    if any(isinstance(leaf, LateTensor) and leaf.group.loss_computed for leaf in leaves(arguments)):
        raise UnsupportedError(
            "A gradient by logits or hidden states is requested after F.cross_entropy has computed its loss without"
            " them. Large logits, those that tensor ranks divide, and what context ranks divide behind the last block,"
            " are computed when another operation first uses them. The loss does not depend on them, so their gradient"
            " would be missing. Call `x.retain_grad()` for them before the loss: it computes them."
        )


def _tell_once(late: LateTensor, func: Any) -> None:
    """Tell the user of the first use of hidden states, or logits, that needs the parts of all context ranks."""
    axis, rows = late.axis, late
    while rows.origin is not None:
        rows = rows.origin[0]
    if axis is None or axis.announced or rows.dim() < 3:  # losses of tokens are few numbers
        return
    axis.announced = True
    rows = rows.local if isinstance(rows.local, LateTensor) and rows.local.product is not None else rows
    size = rows.local.numel() * rows.local.dtype.itemsize * axis.size / 2**20
    rank_zero_info(
        f"Each context rank gathers {size:.1f} MiB behind the last block in each step, and computes on all positions"
        f" from there: {getattr(func, '__name__', 'other code')} needs them. Norms, linears and F.cross_entropy do not."
    )


def _getter(name: str) -> Any:
    """The function that `__torch_function__` gets where an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, LateTensor) else value


def _same(value: Any) -> Any:
    return value


def on_stand_in(late: LateTensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result on meta. It is `late` itself where torch returns the tensor itself."""
    with no_subclasses():
        return func(late, *args, **kwargs)


ON_SHARDS: dict[Any, Callable[..., Any]] = {}
"""Functions that run on the shard, of `late_operations`. They return NotImplemented where they need the full tensor."""
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
