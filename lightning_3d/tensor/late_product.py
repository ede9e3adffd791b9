"""The product of an output head, not computed yet: a loss may compute it in parts, and never have all logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import LARGE_LOGITS as LARGE
from lightning_3d.module.torch_private import version_of
from lightning_3d.tensor.overlap import as_autocast_would, autocast_dtype


def is_large(input: Tensor, classes: int, ranks: int = 1) -> bool:
    """Return True if the logits of `input` are large. The answer is the same on all of `ranks` that divide them."""
    return input.numel() // max(1, input.shape[-1]) * classes * autocast_dtype(input).itemsize >= LARGE * ranks


@dataclass(frozen=True)
class Product:
    """`F.linear` with this weight and bias, and functions of each element after it."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """Of the result."""
    written: tuple[tuple[Tensor, int], ...]
    """The tensors that the head was called with, each with its version."""
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, "Product"]:
        """Return the rows to multiply, and the product. Both have the precision of the call, whatever it is later."""
        used = [tensor for tensor in (input, weight, bias) if tensor is not None]
        written = tuple((tensor, version_of(tensor)) for tensor in used if not tensor.is_inference())
        rows, weight = as_autocast_would(input), as_autocast_would(weight)
        bias = None if bias is None else as_autocast_would(bias)
        if not rows.requires_grad:  # FSDP2 hooks the gradient of the logits, and parameters would collect hooks
            weight, bias = weight.view_as(weight), None if bias is None else bias.view_as(bias)
        return rows, cls(weight, bias, rows.dtype, written)

    def then(self, step: Callable[[Tensor], Tensor], dtype: torch.dtype) -> "Product":
        """This product and then `step`, a function of each element with a result of type `dtype`."""
        return replace(self, dtype=dtype, steps=(*self.steps, step))

    def of_rows(self, rows: Tensor) -> Tensor:
        self.check_unwritten()
        with torch.autocast(rows.device.type, enabled=False):
            return self.finish(F.linear(rows, self.weight, self.bias))

    def finish(self, result: Tensor) -> Tensor:
        for step in self.steps:
            result = step(result)
        return result

    def check_unwritten(self) -> None:
        """Raise where the result would be that of other values than at the time of the call."""
        if any(version_of(tensor) != version for tensor, version in self.written):
            raise UnsupportedError(
                "Logits are used after the input or the weight of their head has changed. Large logits are computed"
                " when they are first used, so these would be wrong. Use them before the change, or keep"
                " `logits.detach()`, which computes them."
            )
