"""ZeRO stage 0: every data rank has everything; gradients are averaged bucket by bucket during backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_3d.comm import ReplicatedGradients
from lightning_3d.module.undo import UndoStack


class ReplicatedData:
    """Plain parameters, gradients synchronised by `comm.ReplicatedGradients`."""

    def __init__(self, replicas: ReplicatedGradients, undo: UndoStack) -> None:
        self.replicas = replicas
        undo.callback(replicas.detach)

    def gather(self) -> None: ...

    def forbid_writes(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish_forward(self) -> None: ...

    def before_backward(self, loss: Tensor) -> None: ...

    def after_backward(self) -> None:
        self.replicas.finish()

    def reduce(self) -> None:
        self.replicas.reduce()

    def grad_holder(self, name: str) -> Tensor | None:
        return None

    def accumulate_only(self, on: bool) -> None:
        self.replicas.accumulate_only(on)

    def discard_pending(self) -> None: ...

    def reshard(self) -> None: ...

    def gathered(self) -> Sequence[tuple[Tensor, nn.Parameter]]:
        return ()

    def gather_full(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return tensor

    def take_shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        return full
