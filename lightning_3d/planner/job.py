"""`Job`: what is to be trained, with the choices that hold for every layout of it."""

from dataclasses import dataclass

from lightning_3d.errors import PlannerError
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.states import Optimizer, Precision, StateBytes, state_bytes

MOST_SAMPLES = 10**9
"""In a batch: its divisors are gone through."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, how much data it sees, and how."""

    profile: Profile
    samples: float
    """Samples seen in the whole training."""
    batch: int
    """Samples per optimizer step, all devices together."""
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adam"
    sustained: float | None = None
    """FLOP/s per device known from elsewhere, in place of the estimate."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlannerError(f"a batch of {self.batch} samples cannot be trained on: give at least 1.")
        if self.batch > MOST_SAMPLES:
            raise PlannerError(f"a batch of more than {MOST_SAMPLES:,} samples is larger than any: give a smaller one.")

    @property
    def steps(self) -> float:
        return self.samples / self.batch

    @property
    def per_parameter(self) -> StateBytes:
        return state_bytes(self.precision, self.optimizer)


def usual_batch(profile: Profile, devices: int) -> int:
    """Samples per step that models of this size are trained with (0.5M to 4M tokens), divisible by `devices` or, where
    there are more devices than samples, by as many of them as can see different samples."""
    usual = next(tokens for size, tokens in _USUAL_TOKENS if profile.parameters < size)
    samples = max(1, round(usual / profile.tokens))
    data = max(size for size in range(1, min(devices, samples) + 1) if devices % size == 0)
    return max(1, round(samples / data)) * data


_USUAL_TOKENS = ((1e9, 0.5e6), (10e9, 1e6), (100e9, 2e6), (float("inf"), 4e6))
