"""What the strategy asks of a data-parallel engine, whatever the ZeRO stage."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn


class DataParallel(Protocol):
    """Gradient synchronisation over the data axis, in the order in which a step calls it."""

    @property
    def swaps(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """What was registered before -> what is registered now."""

    def begin(self) -> None:
        """Before a forward: parameters are whole, or on their way, from here on."""

    def end(self) -> None:
        """After a forward without backward (evaluation)."""

    def before_backward(self, loss: Tensor) -> None:
        """Before `loss.backward()`."""

    def after_backward(self) -> None:
        """After `loss.backward()`: on return `.grad` holds the mean over the data axis, unless held."""

    def reduce(self) -> None:
        """Average what backwards have accumulated locally until now, outside of a backward (pipelines do this)."""

    def hold(self, held: bool) -> None:
        """Whether backwards only accumulate locally (all but the last batch of an accumulation window)."""

    def rest(self) -> None:
        """Between steps: the parameters of a sharded stage are sharded again, whoever gathered them."""

    def undo(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Make the module plain and whole again; what was registered -> what is registered now. Collective."""

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """`tensor`, sharded like `parameter` over the data axis, in one piece. Collective."""

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, sharded like `parameter` over the data axis."""


class NoData:
    """One data rank: nothing to synchronise."""

    swaps: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None: ...

    def reduce(self) -> None: ...

    def hold(self, held: bool) -> None: ...

    def rest(self) -> None: ...

    def undo(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return tensor

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return whole
