"""What the strategy asks of a data-parallel engine, whatever the ZeRO stage."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn


class DataParallel(Protocol):
    """Gradient synchronisation over the data axis, in the order in which a step calls it."""

    def gather(self) -> None:
        """Before a forward: parameters are whole, or on their way, from here on."""

    def forbid_writes(self) -> AbstractContextManager[Any]:
        """Entered around a training step: it raises where the step changes weights in a way that would be lost."""

    def finish_forward(self) -> None:
        """After a forward without backward (evaluation)."""

    def before_backward(self, loss: Tensor) -> None:
        """Before `loss.backward()`."""

    def after_backward(self) -> None:
        """After `loss.backward()`: on return `.grad` holds the mean over the data axis, unless held."""

    def reduce(self) -> None:
        """Average what backwards have accumulated locally until now, outside of a backward (pipelines do this)."""

    def grad_holder(self, name: str) -> Tensor | None:
        """The tensor on which the gradient of a parameter accumulates before it is reduced; None: the parameter."""

    def accumulate_only(self, held: bool) -> None:
        """Whether backwards only accumulate locally (all but the last batch of an accumulation window)."""

    def discard_pending(self) -> None:
        """Forget gradients of batches that no optimizer step followed, where `zero_grad` does not reach them."""

    def reshard(self) -> None:
        """Between steps: the parameters of a sharded stage are sharded again, whoever gathered them."""

    def gathered(self) -> Sequence[tuple[Tensor, nn.Parameter]]:
        """Each parameter that is whole now, and the shard that it was made of."""

    def undo(self) -> None:
        """Take the axis off the module again. Collective."""

    def gather_full(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """`tensor`, sharded like `parameter` over the data axis, in one piece. Collective."""

    def take_shard(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, sharded like `parameter` over the data axis."""


class NoData:
    """One data rank: nothing to synchronise."""

    def gather(self) -> None: ...

    def forbid_writes(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish_forward(self) -> None: ...

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def reduce(self) -> None: ...

    def grad_holder(self, name: str) -> Tensor | None:
        return None

    def accumulate_only(self, held: bool) -> None: ...

    def discard_pending(self) -> None: ...

    def reshard(self) -> None: ...

    def gathered(self) -> Sequence[tuple[Tensor, nn.Parameter]]:
        return ()

    def undo(self) -> None: ...

    def gather_full(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return tensor

    def take_shard(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return whole
