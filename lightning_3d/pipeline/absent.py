"""Placeholders on meta, without values, for the parameters and buffers that other stages own.

Code that reads the device of a placeholder (`next(self.parameters()).device`, Hugging Face's `.device`) wants to create
a tensor there. So a placeholder reports the device of the rank.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.materialize import ABSENT
from lightning_3d.sandbox.deferred import RECORDED

_DEVICE: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_INSIDE = os.path.join(os.path.dirname(torch.__file__), "_")
"""Prefix of the files of torch's private modules."""


class _StandsOn:
    stands_on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The device of the rank; meta for torch's own Python code, which computes on meta tensors."""
        inside = sys._getframe(1).f_code.co_filename.startswith(_INSIDE)
        return _DEVICE(self) if inside or self.stands_on is None else self.stands_on  # type: ignore[no-any-return]


class _AbsentParameter(_StandsOn, nn.Parameter):  # type: ignore[override]
    pass


setattr(_AbsentParameter, ABSENT, True)  # a copy has no attributes of its own


class _AbsentBuffer(_StandsOn, Tensor):  # type: ignore[override]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def absent_like(tensor: Tensor) -> Tensor:
    """A placeholder for `tensor` that reports the device of `tensor`."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = _AbsentParameter(empty, requires_grad=tensor.requires_grad)
    elif type(empty) is Tensor:  # tensors of a dry run have a class of their own
        empty = empty.as_subclass(_AbsentBuffer)
    empty.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != RECORDED})
    empty.__dict__.update({ABSENT: True, "stands_on": tensor.device})
    return empty
