"""How many kernels a forward starts."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class KernelCount(TorchDispatchMode):
    """Counts the operations inside that compute or copy something; views start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += _computes(func)
        return func(*args, **(kwargs or {}))


def _computes(func: Any) -> bool:
    results = func._schema.returns
    view = bool(results) and all(one.alias_info is not None and not one.alias_info.is_write for one in results)
    return func.namespace != "prim" and func is not torch.ops.aten._unsafe_view.default and not view
