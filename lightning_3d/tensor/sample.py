"""The inputs a block is proven on: those of a recorded call, made small, with random numbers for activations."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

LONG = 12
"""Positions that a long sequence is cut to."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call. Activations are distinguished from masks and tables by `Sample.random`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool = True
    """Mode of the block when it was called so."""

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in a fixed order."""
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Tensor)]

    def mapped(self, change: Callable[[int, Tensor], Tensor]) -> "Sample":
        """The same call with `change(index, tensor)` for each tensor; other objects are copied, since calls change
        them."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        index, changed = 0, []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                changed.append(change(index, leaf))
                index += 1
            else:
                changed.append(copy.deepcopy(leaf))
        args, kwargs = tree_unflatten(changed, spec)
        return Sample(args, kwargs, self.training)

    def random(self, generator: torch.Generator) -> "Sample":
        """Fresh normal numbers in place of activations; masks, indices and flags as they are."""
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
        """The same values, with every floating tensor, also masks, visible to autograd."""
        return self.mapped(lambda _, tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))

    def signature(self) -> str:
        """What decides the code path of a call: structure and shapes, not values."""
        describe = lambda leaf: f"{tuple(leaf.shape)}{leaf.dtype}" if isinstance(leaf, Tensor) else _plain(leaf)  # noqa: E731
        leaves, nesting = tree_flatten((self.args, self.kwargs))
        return repr(([describe(leaf) for leaf in leaves], nesting))


def is_activation(tensor: Tensor) -> bool:
    """Whether a floating tensor may carry any value (a mask may not)."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return False
    if tensor.is_meta:
        return True
    values = tensor.detach()
    extreme = ~torch.isfinite(values) | (values.abs() >= 1e4)
    return not bool(extreme.any()) and not bool(((values == 0) | (values == 1)).all())


def recorded(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Sample:
    """A snapshot of a call, on the CPU and in fp32, or fp64 where it is so."""
    return Sample(args, kwargs, training).mapped(lambda _, tensor: plain_tensor(tensor))


def shortened(sample: Sample) -> list[Sample]:
    """The call at smaller sizes, the preferred ones first: other rows and positions, and at the end as recorded."""
    tensors = sample.tensors()
    hidden = next((tensor for tensor in tensors if is_activation(tensor)), None)
    if hidden is None:
        return [sample]
    batch = hidden.shape[0]
    length = hidden.shape[1] if hidden.dim() > 2 and hidden.shape[1] not in (batch, hidden.shape[-1]) else None
    sizes = ((2, LONG), (1, min(LONG, length or LONG) - 3), (1, LONG))
    return [*(sample.mapped(partial(_cut_tensor, batch, length, rows, most)) for rows, most in sizes), sample]


def _cut_tensor(batch: int, length: int | None, rows: int, most: int, _: int, tensor: Tensor) -> Tensor:
    if tensor.dim() and tensor.shape[0] == batch:
        tensor = tensor[: rows if tensor.dim() > 2 or length is not None else max(rows, most)]
    for dim in range(tensor.dim()):
        if length is not None and tensor.shape[dim] == length and length > most > 1:
            tensor = tensor.narrow(dim, 0, most)
    return tensor.clone()


def plain_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", working_dtype(tensor.dtype), copy=True)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which tensors of `dtype` are looked at: floats in fp32 at least."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__qualname__
