"""Bytes of weights, gradients and optimizer states of one number in each precision."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_3d.layout import Layout

Precision = Literal["32", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
PRECISIONS: dict[str, Precision] = {name: name for name in get_args(Precision)}
"""By the name that Lightning has for them; another is planned as "32"."""
Optimizer = Literal["adam", "sgd-momentum", "sgd"]
MOMENTS: dict[Optimizer, int] = {"adam": 2, "sgd-momentum": 1, "sgd": 0}
"""States of a parameter's size."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one parameter costs on one device with nothing sharded."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Optimizer moments and, in mixed precision, the fp32 master weights."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def of(self, parameters: float) -> "StateBytes":
        return self.times(parameters, parameters, parameters)

    def times(self, weights: float, gradients: float, optimizer: float) -> "StateBytes":
        return StateBytes(
            weights=self.weights * weights, gradients=self.gradients * gradients, optimizer=self.optimizer * optimizer
        )


@dataclass(frozen=True, kw_only=True)
class NumberBytes:
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
        return StateBytes(weights=self.weight, gradients=self.gradient, optimizer=self.weight * MOMENTS[optimizer])


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


def offloaded(states: StateBytes, layout: Layout, *, optimizer: bool = False) -> tuple[StateBytes, float]:
    """The states that stay on the device, and the bytes in host memory. `optimizer` offloads only those of it.

    A pipeline has gathered weights and full gradients for its step, so that only the optimizer can leave it.
    """
    if layout.offload == "none" and not optimizer:
        return states, 0.0
    if layout.pipelined or optimizer:
        return states.times(1, 1, 0), states.optimizer
    return states.of(0), states.total
