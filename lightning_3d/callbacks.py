"""Lightning's own callbacks that reach into parameters."""

from collections.abc import Callable, Iterable, Sequence

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim import Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout

_WHOLE = (WeightAveraging, StochasticWeightAveraging, ModelPruning)


def check_callbacks(callbacks: Sequence[Callback], layout: Layout) -> None:
    """Raise for a callback that computes with whole parameters where ranks hold parts of them."""
    if not layout.holds_parts:
        return
    for callback in callbacks:
        if isinstance(callback, _WHOLE):
            raise UnsupportedError(
                f"{type(callback).__name__} computes with the module's whole parameters, of which a rank holds only a"
                f" part ({layout}). Use data parallelism with zero_stage=0, or average the weights of checkpoints after"
                " training."
            )


def finetune_by_identity() -> Callable[[], None]:
    """Have `BaseFinetuning` tell parameters apart by identity; returns what undoes it.

    It compares their values, which is impossible where another stage holds them and takes messages where they are
    sharded. Its `filter_on_optimizer` was read in Lightning 2.6.
    """
    original = BaseFinetuning.__dict__["filter_on_optimizer"]

    def new_ones(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in known]

    BaseFinetuning.filter_on_optimizer = staticmethod(new_ones)  # type: ignore[method-assign]

    def undo() -> None:
        BaseFinetuning.filter_on_optimizer = original  # type: ignore[method-assign]

    return undo
