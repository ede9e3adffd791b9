"""Parameters that an optimizer is given once the module is placed: nothing divides them or reduces their gradients."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.zero.replaced_step import replace_step


def refuse_new_parameters(optimizer: Optimizer, module: nn.Module, layout: Layout) -> Callable[[], None]:
    """Have `optimizer.step` raise for parameters that `module` does not have now; returns what undoes it.

    Tensor ranks need nothing done: they compute the same gradients. Looked at in the step, since parameters come by
    `add_param_group` of the optimizer, by that of Lightning's wrapper, or into a group's list.
    """
    if layout.data_parallel_size * layout.pipeline_parallel_size == 1:
        return lambda: None
    placed, known, original = set(module.parameters()), _count(optimizer), optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if _count(self) != known:
            _refuse([each for group in self.param_groups for each in group["params"] if each not in placed], self)
            known = _count(self)
        return original(*args, **kwargs)

    return replace_step(optimizer, step)


def _refuse(new: list[nn.Parameter], optimizer: Optimizer) -> None:
    if new:
        raise UnsupportedError(
            f"{type(optimizer).__name__} was given {len(new)} parameters (shape {tuple(new[0].shape)}, ...) that the"
            " module did not have when it was placed on its ranks: their gradients are not averaged over the data"
            " ranks, and other pipeline stages do not know of them. Make their modules in __init__, setup or"
            " configure_model; add_param_group may be given their parameters when they are to train."
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
