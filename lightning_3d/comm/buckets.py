"""Gradients that travel together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_3d.comm.collectives import Collectives
from lightning_3d.comm.compression import Compression
from lightning_3d.comm.ring import SMALL_BYTES
from lightning_3d.local import local


class Bucket:
    """Some parameters whose gradients are reduced in one collective.

    Large gradients are reduced in place. Small ones are packed into one buffer, reduced, and copied back, so that
    gradients stay the tensors that autograd made.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], packed: bool) -> None:
        self.parameters, self.packed = list(parameters), packed
        self.keys: list[str] = []
        self.awaited: set[nn.Parameter] = set()
        """Those whose gradient has not arrived yet in this backward."""

    def reduce(self, gradients: Sequence[Tensor | None], collectives: Collectives) -> None:
        """Average `gradients` (one per parameter; None counts as zero) over the ranks, in place."""
        if self.packed:
            buffer, views = self._pack(gradients)
            pieces = [buffer]
        else:
            pieces = views = [self._piece(*both) for both in zip(self.parameters, gradients, strict=True)]
        for together in [pieces] if collectives.takes_pieces else pieces:
            collectives.all_reduce(together, average=True)
        for gradient, view in zip(gradients, views, strict=True):
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                gradient.copy_(view)

    def _piece(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        """What travels of a large gradient: itself, if it lies as it must."""
        if gradient is None:
            return torch.zeros_like(local(parameter), memory_format=torch.contiguous_format)
        return gradient.contiguous()

    def compress(self, gradients: Sequence[Tensor | None], compression: Compression) -> None:
        """The same, lossily."""
        present = [
            torch.zeros_like(local(parameter)) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        compression.all_reduce(present, self.keys)

    def _pack(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        locals_ = [local(parameter) for parameter in self.parameters]
        buffer = torch.empty(sum(p.numel() for p in locals_), dtype=locals_[0].dtype, device=locals_[0].device)
        pieces = buffer.split([p.numel() for p in locals_])
        views = [piece.view(p.shape) for piece, p in zip(pieces, locals_, strict=True)]
        for gradient, view in zip(gradients, views, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        return buffer, views


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut `parameters`, in the order their gradients are expected, into buckets of one dtype and device each."""
    buckets: list[Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, _size(parameter) < SMALL_BYTES)
        gathered = open_.setdefault(kind, [])
        gathered.append(parameter)
        if sum(map(_size, gathered)) >= bucket_bytes:
            buckets.append(Bucket(open_.pop(kind), kind[2]))
    return buckets + [Bucket(gathered, kind[2]) for kind, gathered in open_.items()]


def _size(parameter: nn.Parameter) -> int:
    part = local(parameter)
    return part.numel() * part.element_size()
