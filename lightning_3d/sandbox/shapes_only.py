"""Fake tensors for building modules: conditions on values have an answer."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class ShapesOnly(FakeTensorMode):
    """torch's mode, which refuses to read values. An initializer like `trunc_normal_` asks if any is out of bounds."""

    answers = True
    """False where code that reads values is refused."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.answers and func is torch.ops.aten._local_scalar_dense.default:
            return value_of(args[0])
        return super().dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShapesOnly":
        """This mode: a copied fake parameter of another mode is taken for a real one, and its views for new memory."""
        return self


def value_of(tensor: Tensor) -> Any:
    """The value of a fake tensor: False for a condition, else 1."""
    return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
