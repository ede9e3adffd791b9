"""Tensor plans of blocks that are too large to be proven on numbers in a dry run: what is declared is tried on shapes.

A proof runs a block whole and in shards, forward and backward, several times. For a block of a 70B model that takes
minutes and tens of gigabytes on a laptop; the real job does it before it trains. A block up to `PROVEN` parameters is
proven here as there, so that the plan is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.dryrun.pretend import Pretend
from lightning_3d.errors import UnsupportedError
from lightning_3d.tensor import infer, proof, scratch

PROVEN = 30_000_000
"""Parameters up to which a block is proven on numbers."""


def plan_large(pretend: Pretend, plan_unit: Callable[..., Any]) -> Callable[..., Any]:
    """`plan_unit` that tries the declared plan of a large block on shapes."""

    def plan(unit: nn.Module, sample: Any, size: int, kinds: Any, ways: Any, *rest: Any) -> Any:
        count = sum(parameter.numel() for parameter in unit.parameters())
        if count <= PROVEN:
            return plan_unit(unit, sample, size, kinds, ways, *rest)
        if not ways:
            raise UnsupportedError(
                f"{type(unit).__name__} has {count:,} parameters, too many to find out in a dry run how it is split"
                f" over tensor ranks (the most is {PROVEN:,}). Say how with tensor_plan={{...}}, or give the module"
                " narrower blocks for the dry run."
            )
        with _on_shapes(pretend):
            return plan_unit(unit, sample, size, kinds, ways, *rest)

    return plan


@contextmanager
def _on_shapes(pretend: Pretend) -> Iterator[None]:
    """Scratch copies are fake, two results agree if their shapes do, and one call is as good as two of other sizes."""

    def made(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
        return pretend.made(parameter)

    random, size, samples = scratch._random, proof._size, infer._samples
    scratch._random, proof._size, infer._samples = made, _no_size, partial(samples, most=1)
    try:
        yield
    finally:
        scratch._random, proof._size, infer._samples = random, size, samples


def _no_size(tensor: Tensor) -> float:
    return 0.0
