"""Samples or tokens of the batches of this rank, from their shapes."""

from typing import Any

import torch
from torch import Tensor

from lightning_3d.sandbox.trees import leaves

_IDS = (torch.int64, torch.int32)


class BatchSize:
    """Adds up. The first batch decides: one with a table of integers (samples x positions) is counted in tokens."""

    def __init__(self) -> None:
        self.unit = ""
        self._total, self._batches = 0, 0

    def add(self, batch: Any) -> None:
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        ids = next((tensor for tensor in tensors if tensor.ndim == 2 and tensor.dtype in _IDS), None)
        if not self.unit:
            self.unit = "samples" if ids is None else "tokens"
        self._batches += 1
        if self.unit == "tokens" and ids is not None:
            self._total += ids.numel()
        elif tensors:
            self._total += tensors[0].shape[0]

    @property
    def mean(self) -> float:
        """Of a batch."""
        return self._total / max(1, self._batches)
