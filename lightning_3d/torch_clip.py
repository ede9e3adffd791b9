"""`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_` and `get_total_norm`, as users call them, over a module that is
divided.

They see the gradients of this rank: under a pipeline those of its stages alone, and plain and sharded ones among each
other, which torch does not mix. Users import the functions by name, so it is what these call that is replaced. Private
to torch, read in 2.13; `tests/same/test_clip.py` and `test_numbers.py` fail when they call something else.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_3d.local import local

_NORM, _GROUPED = "_get_total_norm", "_group_tensors_by_device_and_dtype"
Norm = Callable[[list[nn.Parameter], float], Tensor]


def clip_as_one_device(module: nn.Module, norm: Norm) -> Callable[[], None]:
    """Have torch's functions clip parameters of `module` by what one device would; returns what undoes it.

    Args:
        norm: the p-norm of the gradients of some parameters, wherever they live. Collective.
    """
    before = {name: getattr(clip_grad, name) for name in (_NORM, _GROUPED)}

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        grads: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = of_module(grads, float(norm_type))
        if total is None:
            return before[_NORM](grads, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped"
                " (error_if_nonfinite=True)."
            )
        return total.to(grads[0].dtype if grads and grads[0].is_floating_point() else torch.get_default_dtype())

    def of_module(grads: list[Tensor], norm_type: float) -> Tensor | None:
        """None where none of them is the module's."""
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
        if caller.f_code.co_name == _NORM:  # torch's own, which the user called: the norm of the whole norm is itself
            total = of_module(tensors[0], caller.f_locals["norm_type"])
            if total is not None:
                return {(total.device, total.dtype): ([[total]], [0])}
        return before[_GROUPED]([[local(each) for each in some] for some in tensors], *args, **kwargs)

    for name, function in ((_NORM, total_norm), (_GROUPED, grouped)):
        setattr(clip_grad, name, function)

    def undo() -> None:
        for name, function in before.items():
            setattr(clip_grad, name, function)

    return undo
