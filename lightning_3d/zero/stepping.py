"""How each kind of optimizer steps on parameters of which ranks hold parts, or losses of which they hold parts."""

from collections.abc import Callable

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.zero.local_step import ELEMENTWISE, step_on_shards
from lightning_3d.zero.search_step import search_as_one
from lightning_3d.zero.users_step import Watch, step_as_told
from lightning_3d.zero.whole_step import WHOLE, Convert, step_on_wholes


def step_as_on_one_device(
    optimizer: Optimizer,
    whole: Convert,
    part: Convert,
    mean: Callable[[Tensor], Tensor],
    watch: Watch,
    pipelined: bool,
) -> Callable[[], None]:
    """Have `optimizer.step` do what it would with everything in one place; returns what undoes it.

    Args:
        optimizer: any; of one that is none of torch's the parameters are DTensors.
        whole: makes a tensor that is divided like a parameter whole.
        part: this rank's part of a whole tensor.
        mean: of a loss over the data ranks.
        watch: what to enter around a step that is none of torch's, given its name and what to do instead.
        pipelined: whether the rank holds some stages only.
    """
    if isinstance(optimizer, LBFGS):
        return search_as_one(optimizer, whole, part, mean)
    if isinstance(optimizer, WHOLE):
        return step_on_wholes(optimizer, whole, part)
    if type(optimizer) in ELEMENTWISE:
        return step_on_shards(optimizer)
    return step_as_told(optimizer, watch, pipelined)
