"""The stand-ins for parameters and buffers of other stages: on meta, without values.

Code that reads the device of one (`next(self.parameters()).device`, Hugging Face's `.device`) will make a tensor there,
and means the device of the rank. Torch's own code for meta tensors needs the device meta.

Who reads is known from the caller's frame. A `__torch_function__` would do without, but makes each stand-in meet the
tensor subclasses of users and of torch, of which some refuse any other subclass.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.materialize import ABSENT

_DEVICE: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_INSIDE = os.path.join(os.path.dirname(torch.__file__), "_")
"""Beginning of the paths of torch's private modules."""


class _StandsOn:
    stands_on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The rank's, but for torch's private modules: they compute on meta in Python."""
        inside = sys._getframe(1).f_code.co_filename.startswith(_INSIDE)
        return _DEVICE(self) if inside or self.stands_on is None else self.stands_on  # type: ignore[no-any-return]


class _AbsentParameter(_StandsOn, nn.Parameter):  # type: ignore[override]
    pass


class _AbsentBuffer(_StandsOn, Tensor):  # type: ignore[override]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def absent_like(tensor: Tensor) -> Tensor:
    """The stand-in for `tensor`; its `device` is that of `tensor`."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = _AbsentParameter(empty, requires_grad=tensor.requires_grad)
    elif type(empty) is Tensor:  # those of a dry run are of a class of their own
        empty = empty.as_subclass(_AbsentBuffer)
    empty.__dict__.update(tensor.__dict__)
    empty.__dict__.update({ABSENT: True, "stands_on": tensor.device})
    return empty
