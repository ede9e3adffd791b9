"""Calls that a block is proven on: those of a recorded run, cut short, with random numbers for activations."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sandbox.trees import form, leaves, map_leaves, tensors_in, unshared

LONG = 12
"""Positions that a long sequence is cut to."""
LARGE_CALL, POSITIONS = 2**26, 1024
"""Bytes of arguments of which a copy for each block is too much, and the positions that are kept of each."""
SIDES = ((1, 8), (2, 4))
"""Rows, and pixels of the longer side, that images are cut to."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call. `random` tells activations from masks and tables."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool = True
    """Mode of the block in the recorded call."""
    elements: int = 0
    """Of its hidden states, before anything was cut."""

    @property
    def form(self) -> Any:
        return form_of((self.args, self.kwargs))

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in a fixed order."""
        return tensors_in((self.args, self.kwargs))

    def mapped(self, change: Callable[[int, Tensor], Tensor]) -> "Sample":
        """The call with `change(index, tensor)` for each tensor. Other objects are copied: calls may change them."""
        args, kwargs = each_numbered(change, unshared((self.args, self.kwargs)), copy.deepcopy)
        return Sample(args, kwargs, self.training, self.elements)

    def random(self, generator: torch.Generator) -> "Sample":
        """The call with new normal numbers for activations. Masks, indices and flags keep their values."""
        return self.mapped(
            lambda _, tensor: (
                torch.randn(tensor.shape, generator=generator).to(tensor.dtype).requires_grad_()
                if is_activation(tensor)
                else tensor
            )
        )

    def fresh(self) -> "Sample":
        """The same values as new leaves of autograd."""
        return self.mapped(lambda _, tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))

    def followed(self) -> "Sample":
        """The same values, all floating tensors (masks too) as leaves that need a gradient."""
        return self.mapped(lambda _, tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))

    def signature(self) -> str:
        """Structure and shapes, which decide the code path of a call. Values do not count."""
        describe = lambda leaf: f"{tuple(leaf.shape)}{leaf.dtype}" if isinstance(leaf, Tensor) else _plain(leaf)  # noqa: E731
        arguments = (self.args, self.kwargs)
        return repr(([describe(leaf) for leaf in leaves(arguments)], form(arguments)))


def form_of(value: Any) -> Any:
    """Structure, dimensions and flags of an argument: they decide what a block's code does with it."""
    if isinstance(value, Tensor):
        return value.dim(), value.is_floating_point()
    if isinstance(value, tuple | list):
        return isinstance(value, tuple), *map(form_of, value)
    if isinstance(value, dict):
        return tuple((key, form_of(item)) for key, item in value.items())
    return value if isinstance(value, bool | str | None) else type(value).__qualname__


def each_numbered(
    change: Callable[[int, Tensor], Tensor], value: Any, other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """`value` with `change(index, tensor)` for its tensors, counted in order, and `other(leaf)` for other leaves."""
    count = iter(range(1_000_000))
    return map_leaves(lambda leaf: change(next(count), leaf) if isinstance(leaf, Tensor) else other(leaf), value)


def is_activation(tensor: Tensor) -> bool:
    """True for a floating tensor that may have any value. A mask may not."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return False
    if tensor.is_meta:
        return True
    values = tensor.detach()
    extreme = ~torch.isfinite(values) | (values.abs() >= 1e4)
    return not bool(extreme.any()) and not bool(((values == 0) | (values == 1)).all())


def recorded(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Sample:
    """A snapshot of a call, on the CPU and in fp32 (fp64 stays fp64). Of a large one, some rows and positions."""
    tensors = tensors_in((args, kwargs))
    hidden = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1), None)
    call = Sample(args, kwargs, training, 0 if hidden is None else hidden.numel())
    if sum(tensor.nbytes for tensor in tensors) > LARGE_CALL and hidden is not None and hidden.dim() == 3:
        call = shortened(call, [(2, POSITIONS)])[0]
    return call.mapped(lambda _, tensor: plain_tensor(tensor))


def shortened(sample: Sample, sizes: Sequence[tuple[int, int]] = ()) -> list[Sample]:
    """The call at smaller sizes (other rows and positions), preferred ones first, and the recorded size last."""
    hidden = next((tensor for tensor in sample.tensors() if is_activation(tensor)), None)
    if hidden is None:
        return [sample]
    batch = hidden.shape[0]
    length = hidden.shape[1] if hidden.dim() > 2 and hidden.shape[1] not in (batch, hidden.shape[-1]) else None
    if not sizes:
        sizes = ((2, LONG), (1, min(LONG, length or LONG) - 3), (1, LONG))
    cuts = [partial(_cut_tensor, batch, length, rows, most) for rows, most in sizes]
    if hidden.dim() > 3:  # perhaps an image: rows, channels, pixels
        parts = [(rows, -(-max(hidden.shape[2:]) // side)) for rows, side in SIDES]
        cuts = [*(partial(_cut_image, hidden.shape, rows, count) for rows, count in parts), *cuts]
    return [*map(sample.mapped, cuts), sample]


def _cut_tensor(batch: int, length: int | None, rows: int, most: int, _: int, tensor: Tensor) -> Tensor:
    if tensor.dim() and tensor.shape[0] == batch:
        tensor = tensor[: rows if tensor.dim() > 2 or length is not None else max(rows, most)]
    for dim in range(tensor.dim()):
        if length is not None and tensor.shape[dim] == length and length > most > 1:
            tensor = tensor.narrow(dim, 0, most)
    return tensor.clone()


def _cut_image(whole: torch.Size, rows: int, parts: int, _: int, tensor: Tensor) -> Tensor:
    """The first of `parts` pieces of each side of an image. Other tensors have fewer rows."""
    if tensor.dim() and tensor.shape[0] == whole[0]:
        tensor = tensor[:rows]
    if tensor.dim() == len(whole):
        for dim in range(2, tensor.dim()):
            size = tensor.shape[dim]
            tensor = tensor.narrow(dim, 0, min(size, max(size // parts, 1)))
    return tensor.clone()


def plain_tensor(tensor: Tensor) -> Tensor:
    """A detached copy on the CPU, in the working precision."""
    return tensor.detach().to("cpu", working_dtype(tensor.dtype), copy=True)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which blocks are studied: fp32 for all floats but fp64."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__qualname__
