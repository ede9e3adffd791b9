"""`Layout`: the number of ranks of each axis and the place of each rank. `SCHEDULES`: the facts of each schedule.

Pure data, no process group. The planner reads it without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from lightning_3d.errors import LayoutError, check_one_of

ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal[
    "1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "loopedbfs", "zbv_zero_bubble", "dualpipev"
]
GradCompression = Literal["bf16", "fp16", "int8", "powersgd"]
INT8_CHUNK = 1024
"""Numbers of a gradient that share one fp32 scale."""
COMPRESSED_BYTES = MappingProxyType({"bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / INT8_CHUNK})
"""Bytes of one number of a gradient. PowerSGD sends two thin matrices in place of each matrix."""
POWERSGD_RANK = 4
LARGE_LOGITS, LOGITS_PART = 2**29, 2**27
"""Bytes of a rank's logits from which their loss is computed in parts, and of one part. Backward repeats the product,
which costs more than smaller logits save. Some five times a part is in use at a time."""
APART_BYTES = 4 * 2**20
"""Parameters of a module outside of the blocks, in bytes, from which on ZeRO 3 gathers and frees it by itself."""
RecomputeMode = Literal["none", "selective", "full"]
OffloadMode = Literal["none", "all"]
PIPELINE_AXIS, DATA_AXIS, TENSOR_AXIS = "pipeline_parallel", "data_parallel", "tensor_parallel"
CONTEXT_AXIS, EXPERT_AXIS = "context_parallel", "expert_parallel"
AXES = (PIPELINE_AXIS, DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
"""Outermost first: neighbours on the tensor axis have neighbouring ranks, so they sit in one node."""
ALWAYS = {PIPELINE_AXIS, DATA_AXIS, TENSOR_AXIS}
"""Axes that a layout names with one rank too."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds (or any unit) that a rank spends on one microbatch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """The facts of a schedule. A rank of `p` pipeline ranks has `v` stages, and a batch has `m` microbatches.

    The formulas are from the papers on GPipe, PipeDream-Flush (1F1B), interleaving (Narayanan et al. 2021),
    breadth-first pipelines (Lamy-Poirier 2022), zero bubble (Qi et al. 2023, 2024) and DualPipe (DeepSeek 2024).
    """

    torch_class: str | None
    """The class of torch whose order is used; None where torch's order is wrong, and ours is used."""
    idle: Callable[[int, int, PassTimes, bool], float]
    """Idle time of a rank in a step, from `p - 1`, `v`, the times of its passes and `joined`.

    `joined` is True where all ranks wait for the last one before the next step.
    """
    in_flight: Callable[[int, int, int], float]
    """The most microbatches whose activations the first rank has at once, from `p`, `v` and `m`, up to `m`."""
    runs: Callable[[int, int, int], bool] = lambda p, v, m: True
    """True where torch has an order for `p`, `v` and `m`. For other numbers all forwards run before all backwards."""
    needs: str = ""
    """The condition of `runs` in words."""
    stages_per_rank: int | None = None
    """Stages of a rank; None where the user chooses."""
    v_shaped: bool = False
    """True where stages lie on the ranks in their order, and then in the reverse order."""
    halved_backward: bool = False
    """True where gradients of weights are computed later than those of inputs."""
    fewer_on_later_ranks: bool = False
    """True where each rank has the activations of one microbatch less than the rank before it."""


def _zbv_idle(ramp: int, v: int, times: PassTimes, joined: bool) -> float:
    """Nothing where the three passes take equally long and ranks need not wait for one another."""
    f, b, w = times.forward, times.backward_input, times.backward_weight
    longest = max(f, b)
    uneven = longest / 2 if joined else abs(f - b) / 2
    return ramp * max(longest - w, uneven) + (ramp - 1) * max(0.0, w - longest) / 2


def _dualpipev_idle(ramp: int, v: int, times: PassTimes, joined: bool) -> float:
    """A long backward does not hide behind forwards. It takes turns with the passes of the other direction."""
    f, b, w = times.forward, times.backward_input, times.backward_weight
    filling = ramp * max(f, f + b - w) / 2
    return max(filling, ramp * (b - min(b, w) / 2) - f / 2, ramp * (f - (b + w) / 2))


def _interleaved_zero_bubble_idle(ramp: int, v: int, times: PassTimes, joined: bool) -> float:
    late = times.backward_input + max(0.0, times.forward - times.backward_weight)
    return ramp * (max(times.forward, late) if joined else late) / v


_V_SHAPED: Any = {
    "runs": lambda p, v, m: m >= 2 * p,
    "needs": "2 microbatches and 2 blocks for each of the pipeline's ranks",
    "stages_per_rank": 2,
    "v_shaped": True,
    "halved_backward": True,
}
SCHEDULES: Mapping[str, ScheduleFacts] = MappingProxyType(
    {
        "1f1b": ScheduleFacts(
            torch_class=None,
            idle=lambda ramp, v, times, joined: ramp * times.total,
            in_flight=lambda p, v, m: p,
            stages_per_rank=1,
            fewer_on_later_ranks=True,
        ),
        "gpipe": ScheduleFacts(
            torch_class="ScheduleGPipe",
            idle=lambda ramp, v, times, joined: ramp * times.total,
            in_flight=lambda p, v, m: m,
            stages_per_rank=1,
        ),
        "interleaved_1f1b": ScheduleFacts(
            torch_class="ScheduleInterleaved1F1B",
            idle=lambda ramp, v, times, joined: ramp * times.total / v,
            in_flight=lambda p, v, m: p * (1 + (p - 1) / (p * v)) if v > 1 else p,
            runs=lambda p, v, m: v > 1 and m % p == 0,
            needs="microbatches that are a multiple of the pipeline's ranks, and 2 blocks on each",
            fewer_on_later_ranks=True,
        ),
        "interleaved_zero_bubble": ScheduleFacts(
            torch_class="ScheduleInterleavedZeroBubble",
            idle=_interleaved_zero_bubble_idle,
            in_flight=lambda p, v, m: p,
            runs=lambda p, v, m: m % (max(1, m // p) if v == 1 else p) == 0,
            needs="microbatches that are a multiple of the pipeline's ranks",
            halved_backward=True,
        ),
        "loopedbfs": ScheduleFacts(
            torch_class="ScheduleLoopedBFS",
            idle=lambda ramp, v, times, joined: ramp * times.total / v,
            in_flight=lambda p, v, m: m,
            runs=lambda p, v, m: v > 1 and m >= p,
            needs="a microbatch for each of the pipeline's ranks, and 2 blocks on each",
        ),
        "zbv_zero_bubble": ScheduleFacts(
            torch_class="ScheduleZBVZeroBubble", idle=_zbv_idle, in_flight=lambda p, v, m: p, **_V_SHAPED
        ),
        "dualpipev": ScheduleFacts(
            torch_class="ScheduleDualPipeV",
            idle=_dualpipev_idle,
            in_flight=lambda p, v, m: p + 0.5 if p > 1 else 1,
            **_V_SHAPED,
        ),
    }
)
HALVED_BACKWARD = tuple(name for name, facts in SCHEDULES.items() if facts.halved_backward)


def stage_ranks(schedule: str, ranks: int, per_rank: int) -> tuple[int, ...]:
    """The rank of each stage: round after round, or down and up again for the V-shaped schedules."""
    if SCHEDULES[schedule].v_shaped:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * per_rank))


@cache
def stages_by_rank(schedule: str, ranks: int, per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank. A search of layouts asks thousands of times."""
    own: tuple[list[int], ...] = tuple([] for _ in range(ranks))
    for stage, rank in enumerate(stage_ranks(schedule, ranks, per_rank)):
        own[rank].append(stage)
    return tuple(map(tuple, own))


def short_name(axis: str) -> str:
    """The word for `axis` in messages: "tensor" for "tensor_parallel"."""
    return axis.removesuffix("_parallel")


class Coordinate(dict[str, int]):
    """The place of one rank: its index on each axis, outermost first."""

    @property
    def data(self) -> int:
        return self[DATA_AXIS]

    @property
    def leads(self) -> bool:
        """True for the first of the peers that work on the same samples."""
        return not any(index for axis, index in self.items() if axis != DATA_AXIS)

    def __str__(self) -> str:
        return ", ".join(f"{short_name(axis)} {index}" for axis, index in self.items())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes and settings of each. `Layout.fit` computes the size that the user left at "auto"."""

    data_parallel_size: int = 1
    """Ranks that see different data."""
    context_parallel_size: int = 1
    """Ranks that see the same samples, and have a part of each long sequence inside of the blocks."""
    tensor_parallel_size: int = 1
    """Ranks that share every large matrix."""
    pipeline_parallel_size: int = 1
    """Ranks that own different blocks."""
    expert_parallel_size: int = 1  # data and context ranks that share the experts of a block
    zero_stage: ZeroStage = 1
    """States that the data axis shards: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zero_shard_size: int | None = None
    """Data ranks that share one sharded copy (hybrid shard where smaller than `data_parallel_size`)."""
    schedule: Schedule = "1f1b"
    """Order of forwards and backwards in the pipeline."""
    stages_per_rank: int = 1
    """Virtual stages of each pipeline rank (more than one only for the interleaved, `loopedbfs` and V schedules)."""
    num_microbatches: int | Literal["auto"] = "auto"
    """Microbatches of one batch for the pipeline."""
    sequence_parallel: bool = False
    """Also shard norms and dropout along the sequence, over the tensor axis."""
    recompute: RecomputeMode = "none"
    """Activations that are computed again in backward instead of stored."""
    offload: OffloadMode = "none"
    """Parameters outside of the device: "all" moves those of sharded stages, with gradients and optimizer states."""

    axes: ClassVar[tuple[str, ...]] = AXES

    def __post_init__(self) -> None:
        for name in (*(f"{axis}_size" for axis in (*self.axes, EXPERT_AXIS)), "stages_per_rank"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"{name}={size!r} must be a whole number of at least 1.")
        check_one_of("zero_stage", self.zero_stage, get_args(ZeroStage), LayoutError)
        check_one_of("schedule", self.schedule, tuple(SCHEDULES), LayoutError)
        check_one_of("recompute", self.recompute, get_args(RecomputeMode), LayoutError)
        check_one_of("offload", self.offload, get_args(OffloadMode), LayoutError)
        if self.num_microbatches != "auto" and (
            not isinstance(self.num_microbatches, int) or self.num_microbatches < 1
        ):
            raise LayoutError(
                f'num_microbatches={self.num_microbatches!r} must be "auto" or a whole number of at least 1.'
            )
        shard = self.zero_shard_size
        if shard is not None and (shard < 1 or self.data_parallel_size % shard):
            raise LayoutError(
                f"zero_shard_size={shard} must divide data_parallel_size={self.data_parallel_size}: each group of"
                f" {shard} data ranks holds one sharded copy."
            )

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis -> number of ranks, outermost first. An axis `x` is the field `x_size`."""
        sizes = {axis: getattr(self, f"{axis}_size") for axis in self.axes}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ALWAYS}

    @property
    def by_data_first(self) -> dict[str, int]:
        """The sizes in the order of messages: data, and then the axes of peers, innermost first."""
        return {axis: self.sizes[axis] for axis in (DATA_AXIS, *self.peer_axes)}

    @property
    def peer_axes(self) -> tuple[str, ...]:
        """Axes whose ranks work on the same samples, innermost first."""
        return tuple(axis for axis in reversed([*self.sizes]) if axis != DATA_AXIS)

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def peers(self) -> int:
        """Ranks that work on the same samples, and have one copy of the module together."""
        return self.world_size // self.data_parallel_size

    @property
    def pipelined(self) -> bool:
        return self.pipeline_parallel_size > 1

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank; one stage where there is no pipeline."""
        ranks = self.pipeline_parallel_size
        return stages_by_rank(self.schedule, ranks, self.stages_per_rank) if ranks > 1 else ((0,),)

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))

    @property
    def shards_data(self) -> bool:
        """True where the data axis shards something. One rank does so for parameters that are not on its device."""
        alone = self.offload == "all" and self.zero_stage == 3 and not self.pipelined
        return self.zero_stage > 0 and (self.gradient_ranks > 1 or alone)

    @property
    def holds_parts(self) -> bool:
        """True where a rank has only a shard of the parameters."""
        return self.tensor_parallel_size > 1 or self.expert_parallel_size > 1 or self.pipelined or self.shards_data

    @property
    def shard_size(self) -> int:
        """Data ranks that share one sharded copy."""
        return self.zero_shard_size or self.data_parallel_size

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of a parameter are averaged: data and context ranks."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def shards(self) -> int:
        """Data and context ranks among which states are divided; 1 where nothing is."""
        return self.shard_size * self.context_parallel_size if self.zero_stage else 1

    @property
    def streams_weights(self) -> bool:
        """True where full weights exist only block by block. A pipeline gathers them once for its step."""
        return self.zero_stage == 3 and self.shards > 1 and not self.pipelined

    @property
    def last_rank(self) -> int:
        """The pipeline rank that owns what comes after the blocks: the first one of a V."""
        return 0 if SCHEDULES[self.schedule].v_shaped else self.pipeline_parallel_size - 1

    @property
    def ends(self) -> list[int]:
        """The first and the last pipeline rank, between which the others lie; one where there is no pipeline."""
        return sorted({0, self.pipeline_parallel_size - 1})

    @property
    def splits_backward(self) -> bool:
        """True where gradients of weights are computed separately, which those of recomputed blocks are not."""
        return self.schedule in HALVED_BACKWARD and self.pipelined and self.recompute == "none"

    def transfers(self, stage: int) -> int:
        """Sends, and as many receives, of a pipeline rank for each microbatch. Stages of one rank exchange nothing."""
        own, count = self.stages[stage], self.num_stages
        next_to = (near for virtual in own for near in (virtual - 1, virtual + 1))
        return sum(0 <= near < count and near not in own for near in next_to)

    def held(self, stage: int, microbatches: int) -> float:
        """The most microbatches whose activations pipeline rank `stage` has at once: one without a pipeline.

        A microbatch on one of the stages of a rank counts as a part. `SCHEDULES` has the formulas.
        """
        if not self.pipelined:
            return 1
        facts = SCHEDULES[self.schedule]
        most = facts.in_flight(self.pipeline_parallel_size, self.stages_per_rank, microbatches)
        held = min(microbatches, most)
        return max(1, min(microbatches, held - stage)) if stage and facts.fewer_on_later_ranks else held

    def accumulates(self, microbatches: int) -> bool:
        """Return True if a rank adds up gradients of several microbatches before it reduces them."""
        return self.pipelined or (self.zero_stage <= 1 and microbatches > 1)

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a layout of {self.world_size} ranks.")
        indices, sizes = {}, self.sizes
        for axis in reversed([*sizes]):
            rank, indices[axis] = divmod(rank, sizes[axis])
        return Coordinate({axis: indices[axis] for axis in sizes})

    def rank(self, indices: Mapping[str, int]) -> int:
        """The global rank with `indices`; 0 on an axis that is not given."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + indices.get(axis, 0)
        return rank

    def peers_of(self, data: int) -> list[int]:
        """The ranks that work on the samples of data rank `data`."""
        axes = [axis for axis in self.sizes if axis != DATA_AXIS]
        places = product(*(range(self.sizes[axis]) for axis in axes))
        return [self.rank({DATA_AXIS: data, **dict(zip(axes, place, strict=True))}) for place in places]

    def fit(self, world_size: int) -> "Layout":
        """This layout with the data axis taking whatever `world_size` leaves, the other axes as they are."""
        if world_size % self.peers:
            sizes = " x ".join(f"{axis}_size={self.sizes[axis]}" for axis in self.peer_axes)
            raise LayoutError(
                f"{world_size} ranks cannot be split into {sizes} = {self.peers} ranks per copy of the model:"
                f" {world_size} is not a multiple of {self.peers}. Use a multiple of {self.peers}, or smaller sizes."
            )
        return replace(self, data_parallel_size=world_size // self.peers)

    def check_world(self, world_size: int) -> None:
        """Raise unless the degrees multiply to `world_size`."""
        if self.world_size != world_size:
            sizes = " x ".join(f"{axis}_size={size}" for axis, size in self.by_data_first.items())
            raise LayoutError(
                f'{sizes} = {self.world_size} ranks, but the job has {world_size}. Set data_parallel_size="auto", or'
                f" start {self.world_size} processes (devices x num_nodes)."
            )

    def __str__(self) -> str:
        sizes = " x ".join(f"{short_name(axis)} {size}" for axis, size in self.by_data_first.items())
        experts = f", experts over {size} ranks" if (size := self.expert_parallel_size) > 1 else ""
        return f"{sizes}, ZeRO {self.zero_stage}{experts}"


def not_with_experts(layout: Layout, shard_size: int | None, compression: str | None) -> list[str]:
    """The settings under which experts over data ranks were never compared with one device."""
    refused = {
        f"zero_shard_size={shard_size}": shard_size not in (None, layout.data_parallel_size),
        f"grad_compression={compression!r}": compression is not None,
        "offload of parameters": layout.offload == "all",
        "sequence_parallel": layout.sequence_parallel,
        f"schedule={layout.schedule!r}": layout.pipelined and layout.schedule in HALVED_BACKWARD,
    }
    return [what for what, used in refused.items() if used]
