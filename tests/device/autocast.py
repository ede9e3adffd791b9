"""Mixed precision of the card: the operations that CUDA casts, as far as modules of tests have them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HALF = [
    "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "conv1d", "conv2d", "conv3d",
    "scaled_dot_product_attention",
]  # fmt: skip
_FULL = [
    "softmax.int", "log_softmax.int", "layer_norm", "rms_norm", "cross_entropy_loss", "nll_loss", "nll_loss_nd",
    "mse_loss", "binary_cross_entropy_with_logits", "norm.Scalar", "cumsum", "exp", "log", "pow.Tensor_Scalar", "rsqrt",
]  # fmt: skip
_KEY = "AutocastPrivateUse1"


def register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for names, half in ((_HALF, True), (_FULL, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _casting(op, half), _KEY)
    return library


def _casting(op: Any, half: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("card") if half else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if is_cast and value.device.type == "card" else value
