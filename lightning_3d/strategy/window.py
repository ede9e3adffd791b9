"""`Window`: the batches whose gradients one optimizer step adds up. `EarlyGradients`: those of a pipelined step.

On one device Lightning runs a step, zeroes the gradients of the window before, and runs backward. Data ranks reduce
gradients after the last batch only; until then each adds up its own, on the tensors that its backward gives them to.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_3d.precision import Precision3D
from lightning_3d.zero import DataParallel


@dataclass
class Window:
    """The accumulation window of the present batch."""

    trainer: Trainer
    module: LightningModule
    data: DataParallel
    last: bool = True
    """True on the last batch: gradients are reduced over the data ranks after it."""

    @property
    def first(self) -> bool:
        """True on the first batch, by Lightning's rule for zeroing gradients: an epoch may end within a window."""
        automatic: bool = self.module.automatic_optimization  # type: ignore[assignment]
        return automatic and self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0

    def scale(self, plugin: Precision3D) -> float | Tensor:
        """The factor on the loss of a batch before backward: its share of the window, times the loss scale."""
        return plugin.loss_factor() / self.trainer.accumulate_grad_batches

    def begin(self) -> None:
        """Begin a batch. The first discards gradients that no optimizer step followed and zeroing does not reach."""
        if self.first:
            self.data.discard_pending()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Batches inside only add gradients: none is the last of its window."""
        self.last = False
        self.data.accumulate_only(True)
        try:
            yield
        finally:
            self.last = True
            self.data.accumulate_only(False)

    def zeroed(self) -> set[nn.Parameter]:
        """The parameters whose gradients Lightning zeroes for sure: those of optimizers, unless a hook decides."""
        if is_overridden("optimizer_zero_grad", self.module):
            return set()
        return {p for optimizer in self.trainer.optimizers for group in optimizer.param_groups for p in group["params"]}


class EarlyGradients:
    """Gradients of a step that runs its own backward, before Lightning zeroes those of the window before.

    Args:
        module: has the parameters.
        zeroed: gives the parameters whose old gradients are zeroed after the step. They are freed before it, which
            makes room for the new ones.
    """

    def __init__(self, module: nn.Module, zeroed: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.module, self.zeroed = module, zeroed
        self.new: dict[nn.Parameter, Tensor] = {}
        self.older: dict[nn.Parameter, Tensor] = {}
        """Gradients of earlier windows that may have to stay."""

    @contextmanager
    def computing(self, first: bool) -> Iterator[None]:
        """The context of a step. In the first of a window, old gradients are there again after it."""
        if first:
            zeroed = set(self.zeroed())
            self.older = {p: grad for p, grad in self._taken().items() if p not in zeroed}
        yield
        if first:
            self.new = self._taken()
            for parameter, grad in self.older.items():
                parameter.grad = grad

    def give(self, first: bool, last: bool) -> None:
        """Give the parameters their gradients, after the zeroing.

        Older ones that were not zeroed are added with the last batch of the window. Those of ties are summed already,
        and the new ones are not before.
        """
        if first:
            self.older = {parameter: parameter.grad for parameter in self.older if parameter.grad is not None}
            for parameter in self.older:
                parameter.grad = None
        _add(self.new)
        self.new = {}
        if last:
            _add(self.older)
            self.older = {}

    def _taken(self) -> dict[nn.Parameter, Tensor]:
        """All gradients, which the parameters then have no more."""
        taken = {parameter: parameter.grad for parameter in self.module.parameters() if parameter.grad is not None}
        for parameter in taken:
            parameter.grad = None
        return taken


def _add(gradients: dict[nn.Parameter, Tensor]) -> None:
    for parameter, grad in gradients.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
