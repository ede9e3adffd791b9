"""Lossy encodings of fp32 rows in fewer bytes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_3d.layout import INT8_CHUNK


class Codec(ABC):
    """Encodes each row of an fp32 matrix by itself. A row can be sent and decoded without the others.

    `widths` are the numbers of a row that belong to each parameter. The encoding of a parameter does not depend on the
    other parameters of the row. Its copies on other tensor ranks or stages are in other rows and must stay equal.
    """

    @abstractmethod
    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        """Rows of the wire's type."""

    @abstractmethod
    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        """fp32 rows. Infinities and NaNs that went in come out as one or the other."""


class Half(Codec):
    """bf16 or fp16. Finite values beyond the type's range become its largest one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.largest = dtype, torch.finfo(dtype).max

    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        return torch.where(rows.isinf(), rows, rows.clamp(-self.largest, self.largest)).to(self.dtype)

    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        return wire.float()


class Int8(Codec):
    """One byte per number and one fp32 scale per `chunk` numbers of a parameter."""

    def __init__(self, chunk: int = INT8_CHUNK) -> None:
        self.chunk = chunk

    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        padded = [pad(part, (0, -part.shape[1] % self.chunk)) for part in rows.split(list(widths), dim=1)]
        chunks = torch.cat(padded, dim=1).view(len(rows), -1, self.chunk)
        scales = chunks.abs().amax(dim=2, keepdim=True) / 127
        steps = (chunks / scales.where(scales > 0, torch.ones_like(scales))).round_().nan_to_num_(0).to(torch.int8)
        filled = steps.flatten(1).split([part.shape[1] for part in padded], dim=1)
        sent = [part[:, :width] for part, width in zip(filled, widths, strict=True)]
        return torch.cat([*sent, scales.flatten(1).view(torch.int8)], dim=1)

    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        counts = [-(-width // self.chunk) for width in widths]
        steps, scales = wire.split([sum(widths), 4 * sum(counts)], dim=1)
        parts = []
        for part, scale in zip(
            steps.split(list(widths), dim=1),
            scales.clone(memory_format=torch.contiguous_format).view(torch.float32).split(counts, dim=1),  # aligned
            strict=True,
        ):
            parts.append(part * scale.repeat_interleave(self.chunk, dim=1)[:, : part.shape[1]])
        return torch.cat(parts, dim=1)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}
)
"""By the name in `grad_compression`."""
