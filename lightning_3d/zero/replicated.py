"""ZeRO stage 0: every data rank has everything; gradients are averaged bucket by bucket during backward."""

from lightning_3d.comm import ReplicatedGradients
from lightning_3d.module.undo import UndoStack
from lightning_3d.zero.data_parallel import DataParallel


class ReplicatedData(DataParallel):
    """Plain parameters, gradients synchronised by `comm.ReplicatedGradients`."""

    def __init__(self, replicas: ReplicatedGradients, undo: UndoStack) -> None:
        self.replicas = replicas
        undo.callback(replicas.detach)

    def after_backward(self) -> None:
        self.replicas.finish()

    def reduce(self) -> None:
        self.replicas.reduce()

    def accumulate_only(self, on: bool) -> None:
        self.replicas.accumulate_only(on)
