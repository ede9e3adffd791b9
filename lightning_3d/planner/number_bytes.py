"""Bytes of a number in each precision, as the strategy trains: the one place that knows what mixed precision keeps."""

from dataclasses import dataclass, replace

from lightning_3d.planner.states import Optimizer, Precision, StateBytes, moments_of


@dataclass(frozen=True, kw_only=True)
class NumberBytes:
    """Bytes of one number of each kind."""

    weight: int
    """Of a weight as the optimizer steps it."""
    gathered: int
    """Of a weight that ZeRO gathers for a step; also on the links."""
    half: int
    """Of a gathered weight that autocast would cast for every use."""
    cast: int
    """Of the copy of a matrix that autocast makes for products. Backward keeps it."""
    gradient: int
    """Of a gradient, when it is computed, reduced and stepped."""
    product: int
    """Of a result of a product."""
    stream: int
    """Of a number that passes from block to block."""

    def states(self, optimizer: Optimizer) -> StateBytes:
        """Bytes of one parameter between steps, with nothing sharded."""
        return StateBytes(weights=self.weight, gradients=self.gradient, optimizer=self.weight * moments_of(optimizer))


_FULL = NumberBytes(weight=4, gathered=4, half=4, cast=0, gradient=4, product=4, stream=4)
_HALF = NumberBytes(weight=2, gathered=2, half=2, cast=0, gradient=2, product=2, stream=2)
_MIXED = NumberBytes(weight=4, gathered=4, half=4, cast=2, gradient=4, product=2, stream=4)
"""Autocast: fp32 weights, gradients and sums; products in 16 bits, of weights that each forward casts."""
_GATHERED_IN_HALF = replace(_MIXED, half=2)
"""ZeRO gathers the weights of products in 16 bits, as `zero/half_weights.py` does. Others are cast as without ZeRO."""


def number_bytes(precision: Precision, *, sharded: bool = False) -> NumberBytes:
    """Bytes under `precision`; `sharded` where ZeRO gathers the weights."""
    if precision.endswith("-mixed"):
        return _GATHERED_IN_HALF if sharded else _MIXED
    return _FULL if precision == "32" else _HALF
