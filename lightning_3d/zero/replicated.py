"""ZeRO stage 0: every data rank holds everything; gradients are averaged bucket by bucket during backward."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from lightning_3d.comm import Replicas


class ReplicatedData:
    """Plain parameters, gradients synchronised by `comm.Replicas`."""

    swaps: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None:
        self.replicas.finish()

    def reduce(self) -> None:
        self.replicas.reduce()

    def hold(self, held: bool) -> None:
        self.replicas.hold(held)

    def rest(self) -> None: ...

    def undo(self) -> Mapping[nn.Parameter, nn.Parameter]:
        self.replicas.detach()
        return {}

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return tensor

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return whole
