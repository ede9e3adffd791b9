"""For CPU: a buffer without memory that records what FSDP2 copies in and out of it.

See [Note: unallocated buffers] in zero/fsdp_seam.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class CopyNotes:
    """The tensors that were copied into an unallocated buffer, and those that have its contents already."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []


class UnallocatedBuffer(torch.Tensor):
    """Has the shape, dtype and device of a buffer, and a `CopyNotes` in place of its contents.

    Knows the three operations by which FSDP2 fills and empties its buffers (read in torch 2.13); any other raises.
    """

    copies: CopyNotes

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, copies: CopyNotes
    ) -> "UnallocatedBuffer":
        buffer = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        buffer.copies = copies
        return buffer

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.default:
            buffer, (rows, rest) = args
            assert rest == -1
            return cls((rows, buffer.numel() // rows), *buffer._like())
        if func is torch.ops.fsdp.chunk_cat.default:
            kwargs["out"].copies.sources = list(args[0])
            return None
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            sources, buffer = args[:2]
            buffer.copies.sources = list(sources)
            return cls((args[3],), *buffer._like()), cls(buffer.shape, *buffer._like())
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            _copy_out(args[0].copies, kwargs["out"])
            return None
        raise NotImplementedError(f"FSDP2 did {func} with an unallocated buffer: this version of torch is not known.")

    def _like(self) -> tuple[torch.dtype, torch.device, CopyNotes]:
        return self.dtype, self.device, self.copies

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnallocatedBuffer({tuple(self.shape)})"


def _copy_out(copies: CopyNotes, out: Sequence[Tensor]) -> None:
    """Nothing is left to copy where the gather wrote to these very tensors."""
    for target, tensor in zip(copies.targets, out, strict=True):
        if target.data_ptr() != tensor.data_ptr():
            raise NotImplementedError("FSDP2 wants gathered parameters elsewhere: this version of torch is not known.")
