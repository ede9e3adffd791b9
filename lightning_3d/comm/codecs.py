"""Fewer bytes for the same numbers: fp32 rows to bytes and back."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Encodes each row of an fp32 matrix on its own, so that a row can be sent and decoded alone."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Rows of the wire's type."""

    @abstractmethod
    def decode(self, wire: Tensor, width: int) -> Tensor:
        """fp32 rows of `width` numbers. Infinities and NaNs that went in come out as one or the other."""


class Half(Codec):
    """bf16 or fp16. Finite values beyond the type's range become its largest one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.largest = dtype, torch.finfo(dtype).max

    def encode(self, rows: Tensor) -> Tensor:
        return torch.where(rows.isinf(), rows, rows.clamp(-self.largest, self.largest)).to(self.dtype)

    def decode(self, wire: Tensor, width: int) -> Tensor:
        return wire.float()


class Int8(Codec):
    """One byte per number and one fp32 scale per `chunk` numbers."""

    def __init__(self, chunk: int = 1024) -> None:
        self.chunk = chunk

    def encode(self, rows: Tensor) -> Tensor:
        chunks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % self.chunk)).view(rows.shape[0], -1, self.chunk)
        scales = chunks.abs().amax(dim=2, keepdim=True) / 127
        steps = (chunks / scales.where(scales > 0, torch.ones_like(scales))).round().nan_to_num(0).to(torch.int8)
        return torch.cat([steps.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)

    def decode(self, wire: Tensor, width: int) -> Tensor:
        count = -(-width // self.chunk)
        steps, scales = wire.split([count * self.chunk, count * 4], dim=1)
        chunks = steps.contiguous().view(torch.int8).view(len(wire), count, self.chunk)
        return (chunks * scales.contiguous().view(torch.float32).unsqueeze(2)).view(len(wire), -1)[:, :width]
