"""The norm of all gradients, each element counted once, wherever it lives.

Users call `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_` and `get_total_norm` over a module that is sharded.
There torch has the gradients of this rank alone: under a pipeline those of its stages. It also does not mix plain and
sharded ones. Users import these functions by name, so the functions that they call are replaced. Those are private to
torch, read in 2.13; `tests/same/test_clip.py` and `test_numbers.py` fail when torch calls others.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from lightning_3d.axes.group import Group
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import DATA_AXIS, EXPERT_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Coordinate
from lightning_3d.module.torch_private import named_range
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.mesh import DIVIDED_BY, EXPERT_REPLICAS
from lightning_3d.ranks.shards import local, sharded_axes, unsharded

Counted = Callable[[nn.Parameter], bool]


def counted_here(parameter: Tensor, coordinate: Coordinate, shard_size: int, replica: int = 0) -> bool:
    """Return True if this rank is the one that counts its shard of `parameter`.

    Along an axis that shards the parameter every rank counts its own; along one that replicates it only the first.
    """
    axes = sharded_axes(parameter)
    if EXPERT_AXIS in axes:
        return (replica == 0 or EXPERT_REPLICAS in axes) and coordinate[TENSOR_AXIS] == 0
    split = {axis for name in axes for axis in DIVIDED_BY.get(name, {name})}
    split |= {PIPELINE_AXIS}  # each stage counts its own parameters
    first = shard_size if DATA_AXIS in split else 1
    peers = (axis in split or index == 0 for axis, index in coordinate.items() if axis != DATA_AXIS)
    return coordinate.data < first and all(peers)


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], counted: Counted, norm_type: float, device: torch.device) -> Tensor:
    """Return the norm that one process would compute. Collective over the world; the same bits on every rank."""
    if not norm_type > 0:
        raise ConfigurationError(
            f"grad_norm({norm_type}): the norms of the parts that ranks hold can be put together for a norm type above"
            " 0 only. Use 1.0, 2.0 or float('inf')."
        )
    mine = [local(p.grad) for p in parameters if p.grad is not None and counted(p)]
    norms = [each.to(device, non_blocking=True) for each in _norms([grad for grad in mine if grad.numel()], norm_type)]
    norm = torch.cat(norms) if norms else torch.zeros(1, dtype=torch.double, device=device)
    if math.isinf(norm_type):
        return _largest(norm)
    total = (norm**norm_type).sum()
    with named_range(_SENT):
        Group().all_reduce(total)
    return total ** (1.0 / norm_type)


def _norms(grads: Sequence[Tensor], norm_type: float) -> Iterator[Tensor]:
    """Yield the norms of the `grads` of each device and type, from one launch."""
    for some in _alike(grads):
        wide = torch.promote_types(some[0].dtype, torch.float32)  # complex where it is: the norm is of absolute values
        yield torch.stack(torch._foreach_norm(some, norm_type, dtype=wide)).double()


def _alike(grads: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """The `grads` of each device and type."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    return alike.values()


def _largest(norm: Tensor) -> Tensor:
    """Return the largest norm. Not every backend's maximum passes NaN on, so that it is sent as a second number."""
    both = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf).max(), norm.isnan().any().to(norm)])
    with named_range(_SENT):
        Group().all_max(both)
    return torch.where(both[1] > 0, math.nan, both[0])


_SENT = "all_reduce of the gradient norm"
"""Name of a range in a trace."""
_NORM, _GROUPED = "_get_total_norm", "_group_tensors_by_device_and_dtype"
Norm = Callable[[list[nn.Parameter], float], Tensor]


def clip_like_one_device(module: nn.Module, norm: Norm) -> Callable[[], None]:
    """Have torch's functions clip parameters of `module` by one device's `norm`, collective; returns what undoes it."""
    before = {name: getattr(clip_grad, name) for name in (_NORM, _GROUPED)}

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        grads: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = of_module(grads, float(norm_type))
        if total is None:
            return before[_NORM](grads, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped"
                " (error_if_nonfinite=True)."
            )
        return total.to(grads[0].dtype if grads and grads[0].is_floating_point() else torch.get_default_dtype())

    def of_module(grads: list[Tensor], norm_type: float) -> Tensor | None:
        """Return the norm of `grads`; None where none of them is the module's."""
        owners = {id(parameter.grad): parameter for parameter in module.parameters() if parameter.grad is not None}
        here = [grad for grad in grads if not grad.is_meta]
        mine = [owners[id(grad)] for grad in here if id(grad) in owners]
        if here and not mine:
            return None
        # also where there is none: this stage may hold none of the parameters that another one clips
        total = norm(mine, norm_type)
        if others := [grad for grad in here if id(grad) not in owners]:
            beside = before[_NORM](others, norm_type, False)
            total = torch.linalg.vector_norm(torch.stack([total, beside.to(total)]), norm_type)
        return total

    def grouped(lists: Iterable[Iterable[Tensor]], *args: Any, **kwargs: Any) -> Any:
        tensors, caller = [list(some) for some in lists], sys._getframe(1)
        if caller.f_code.co_name == _NORM:  # torch's own, which the user called: the norm of the full norm is itself
            total = of_module(tensors[0], caller.f_locals["norm_type"])
            if total is None:  # of weights, say
                norms = [torch.linalg.vector_norm(each, caller.f_locals["norm_type"]) for each in tensors[0]]
                total = torch.stack([unsharded(each) if isinstance(each, DTensor) else each for each in norms])
            return {(total.device, total.dtype): ([[total]], [0])}
        return before[_GROUPED]([[local(each) for each in some] for some in tensors], *args, **kwargs)

    undo = UndoStack()
    undo.set(clip_grad, _NORM, total_norm)
    undo.set(clip_grad, _GROUPED, grouped)
    return undo.close
