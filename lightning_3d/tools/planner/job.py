"""`Job`: a model, its data, batch, precision and optimizer, the same in every layout."""

from dataclasses import dataclass, replace
from math import lcm, log2
from typing import Literal

from lightning_3d.errors import PlannerError
from lightning_3d.layout import GradCompression, Layout
from lightning_3d.optim.state_bytes import NumberBytes, Optimizer, Precision, StateBytes, number_bytes
from lightning_3d.tools.planner.profile import Profile

Offloaded = Literal["optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices of a plan that a `Layout` does not have."""

    recomputed: float = 1.0
    """Share of the blocks that `recompute="full"` computes again."""
    compression: GradCompression | None = None
    """Of gradients on the links."""
    offload: Offloaded | None = None
    """One kind of data in host memory; `Layout.offload` moves all states or none."""
    fp8: bool = False
    """Products of 8-bit numbers."""
    context: int = 1
    """Data ranks that share each sample: each has a slice of its tokens."""
    experts: int = 1
    """Data ranks that share the experts of a block: each owns some of them."""
    imbalance: float = 1.0
    """Tokens of the rank with the fullest experts, over the mean of these ranks."""

    @property
    def not_run(self) -> tuple[str, ...]:
        """The choices that this package prices and cannot run."""
        return ("fp8",) if self.fp8 else ()


TOKENS_PER_PARAMETER = 20
"""Assumed where no amount of data is given: compute-optimal for a decoder (Hoffmann et al. 2022)."""
MOST_SAMPLES = 10**9
"""Largest batch: the search tries its divisors."""


@dataclass(frozen=True, kw_only=True)
class Job:
    profile: Profile
    samples: float
    """Samples seen in the whole training."""
    batch: int
    """Samples per optimizer step, all devices together."""
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adam"
    sustained: float | None = None
    """FLOP/s per device known from elsewhere, in place of the estimate."""
    options: Options = Options()

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
        return number_bytes(self.precision).states(self.optimizer)

    def numbers(self, layout: Layout) -> NumberBytes:
        """Bytes of a number of each kind under `layout`."""
        numbers = number_bytes(self.precision, sharded=layout.zero_stage > 0 and layout.gradient_ranks > 1)
        return replace(numbers, half=1) if self.options.fp8 and numbers.half < 4 else numbers

    def recomputed(self, layout: Layout, *, selective: bool = False) -> float:
        """Share of the blocks that backward computes again with their products, or also without (`selective`)."""
        return {"none": 0.0, "selective": float(selective), "full": self.options.recomputed}[layout.recompute]

    def whole_mixers(self, layout: Layout) -> bool:
        """Return True where blocks that mix positions by other means than attention are not cut."""
        return self.options.context > 1 and (layout.tensor_parallel_size > 1 or self.options.experts > 1)

    def states(self, parameters: float, trained: float) -> StateBytes:
        """Bytes of `parameters`, of which `trained` have gradients and moments."""
        return self.per_parameter.times(parameters, trained, trained)


def usual_batch(profile: Profile, devices: int, micro: int = 1, data: int = 1) -> int:
    """Samples per step of models of this size (0.5M to 4M tokens), more for many devices.

    Each of `data` data ranks has a microbatch at least.

    Where samples are no tokens, each device has those of the example. The number is a power of two times the odd part
    of the devices and of `micro`, so that it divides in many ways.
    """
    if profile.tokens == 1 and profile.example_samples:
        return lcm(profile.example_samples, micro) * devices
    usual = next(tokens for size, tokens in _USUAL_TOKENS if profile.parameters < size)
    most = _MOST_TIMES * max(1, round(usual / profile.tokens))
    samples = min(most, max(usual / profile.tokens, devices / DEVICES_PER_SAMPLE))
    shared = max(size for size in range(1, min(devices, most) + 1) if devices % size == 0 and size % 2)
    step = lcm(shared, micro)
    usual_samples = step * 2 ** max(0, round(log2(samples / step)))
    return usual_samples if usual_samples >= data * micro else lcm(data * micro, step)


DEVICES_PER_SAMPLE = 2
"""Most devices for each sample: with fewer samples, even the largest models leave a pipeline idle."""
_MOST_TIMES = 4
"""As many times the usual batch is assumed for many devices at most."""
_USUAL_TOKENS = ((1e9, 0.5e6), (10e9, 1e6), (100e9, 2e6), (float("inf"), 4e6))
