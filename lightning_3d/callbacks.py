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


def use_callbacks(callbacks: Sequence[Callback], layout: Layout) -> Callable[[], None]:
    """Have those work that can; returns what undoes it.

    Raises for a callback that computes with whole parameters where ranks hold parts of them.
    """
    for callback in callbacks:
        if isinstance(callback, _WHOLE) and layout.holds_parts:
            raise UnsupportedError(
                f"{type(callback).__name__} computes with the module's whole parameters, of which a rank holds only a"
                f" part ({layout}). Use data parallelism with zero_stage=0, or average the weights of checkpoints after"
                " training."
            )
    return _finetune_by_identity()


def _finetune_by_identity() -> Callable[[], None]:
    """Have `BaseFinetuning` tell parameters apart by identity.

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
