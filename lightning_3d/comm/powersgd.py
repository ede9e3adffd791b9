"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): send a gradient matrix as two thin ones."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_3d.axes.group import Group
from lightning_3d.comm.compression import Compression

RIGHT = "/right"
"""Under a key and this, every rank keeps the same subspace, where the next step starts."""


class PowerSGD(Compression):
    """One step of subspace iteration per gradient: an m x n matrix travels as (m + n) * rank numbers.

    What has fewer numbers than that (biases, norms, a rank close to full) is averaged exactly.
    """

    def __init__(self, collectives: Group, rank: int, *, error_feedback: bool = True) -> None:
        super().__init__(collectives, error_feedback=error_feedback)
        self.rank = rank

    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        matrices = [_matrix(gradient) for gradient in gradients]
        for gradient, average in zip(gradients, self._average(matrices, keys), strict=True):
            gradient.copy_(average.view(gradient.shape))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        matrices = [piece.view(-1, width) for piece, width in zip(inputs, widths, strict=True)]
        for output, average in zip(outputs, self._average(matrices, keys), strict=True):
            output.copy_(average.reshape(self.collectives.size, -1)[self.collectives.rank])

    def _average(self, matrices: Sequence[Tensor], keys: Sequence[str]) -> list[Tensor]:
        """Return the approximate mean of each matrix, in fp32."""
        values = {key: matrix.detach().float().clone() for key, matrix in zip(keys, matrices, strict=True)}
        for key, matrix in values.items():
            self.recall(key, matrix)  # also what is sent exactly: another codec may have left something over
        thin = {key: matrix for key, matrix in values.items() if self._pays(matrix)}
        self._together([matrix for key, matrix in values.items() if key not in thin])
        lefts = {key: matrix @ self._right(key, matrix) for key, matrix in thin.items()}
        self._together(list(lefts.values()))
        lefts = {key: torch.linalg.qr(left).Q for key, left in lefts.items()}
        rights = {key: matrix.T @ lefts[key] for key, matrix in thin.items()}
        self._together(list(rights.values()))
        for key, matrix in thin.items():
            values[key] = lefts[key] @ rights[key].T
            self.remember(key, matrix, values[key])
            self.memory[key + RIGHT] = rights[key].nan_to_num(0.0, 0.0, 0.0)
        return list(values.values())

    def _pays(self, matrix: Tensor) -> bool:
        return sum(matrix.shape) * min(self.rank, *matrix.shape) < matrix.numel()

    def _right(self, key: str, matrix: Tensor) -> Tensor:
        """The subspace of the last step, or a random one that is the same on every rank."""
        kept = self.memory.get(key + RIGHT)
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        if kept is not None and kept.shape == shape and kept.any():
            return kept.to(matrix.device)
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(shape, generator=generator).to(matrix.device)

    def _together(self, tensors: Sequence[Tensor]) -> None:
        """Average several tensors in one collective, in place."""
        if not tensors:
            return
        buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.collectives.all_reduce(buffer, average=True)
        for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.reshape(1, -1) if gradient.dim() < 2 else gradient.reshape(gradient.shape[0], -1)
