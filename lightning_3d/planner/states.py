"""Memory that weights, gradients and optimizer take, per rank and ZeRO stage.

From Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020). Bytes; the
paper's GB is 1e9.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_3d.errors import PlannerError
from lightning_3d.layout import ZeroStage

Precision = Literal["32", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
Optimizer = Literal["adam", "sgd-momentum", "sgd"]
_MOMENTS = {"adam": 2, "sgd-momentum": 1, "sgd": 0}


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
        """These bytes for `parameters` parameters."""
        return StateBytes(
            weights=self.weights * parameters,
            gradients=self.gradients * parameters,
            optimizer=self.optimizer * parameters,
        )


def moments_of(optimizer: Optimizer) -> int:
    """States of a parameter's size that `optimizer` keeps."""
    if optimizer not in _MOMENTS:
        raise PlannerError(f"optimizer {optimizer!r} is not one of {', '.join(_MOMENTS)}.")
    return _MOMENTS[optimizer]


def state_bytes(precision: Precision = "16-mixed", optimizer: Optimizer = "adam") -> StateBytes:
    """Bytes per parameter as papers count them: 16 for mixed-precision Adam (2 + 2 + 12) and fp32 Adam (4 + 4 + 8).

    `number_bytes` has those of this strategy, which casts fp32 weights: 4 + 4 + 8.
    """
    moments = moments_of(optimizer)
    if precision == "32":
        return StateBytes(weights=4, gradients=4, optimizer=4 * moments)
    if precision.endswith("-mixed"):
        return StateBytes(weights=2, gradients=2, optimizer=4 + 4 * moments)
    return StateBytes(weights=2, gradients=2, optimizer=2 * moments)


def sharded_states(per_parameter: StateBytes, parameters: float, *, stage: ZeroStage, ranks: int) -> StateBytes:
    """Bytes on one of `ranks` data-parallel ranks: stage 1 shards the optimizer, 2 also gradients, 3 also weights."""
    if stage not in get_args(ZeroStage):
        raise PlannerError(f"ZeRO stage {stage!r} is not one of 0, 1, 2 and 3.")
    if ranks < 1:
        raise PlannerError(f"states cannot be shared by {ranks} ranks: give at least 1.")
    whole = per_parameter.of(parameters)
    return StateBytes(
        weights=whole.weights / (ranks if stage >= 3 else 1),
        gradients=whole.gradients / (ranks if stage >= 2 else 1),
        optimizer=whole.optimizer / (ranks if stage >= 1 else 1),
    )


def largest_model(memory: float, *, stage: ZeroStage, ranks: int, per_parameter: StateBytes | None = None) -> float:
    """Parameters whose states alone fill `memory` bytes on each of `ranks` ranks."""
    return memory / sharded_states(per_parameter or StateBytes(), 1, stage=stage, ranks=ranks).total
