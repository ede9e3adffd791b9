"""`Layout`: the number of ranks of each axis and the place of each rank. Pure data, no process group."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_3d.errors import LayoutError

ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "loopedbfs"
]
ONE_STAGE: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
V_SHAPED: tuple[Schedule, ...] = ("zbv_zero_bubble", "dualpipev")
"""Schedules with two stages on each rank: the order of ranks down, and up again."""
HALVED_BACKWARD: tuple[Schedule, ...] = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that compute the gradients of weights later than those of inputs."""
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "all"]
PIPELINE_AXIS, DATA_AXIS, TENSOR_AXIS = "pipeline_parallel", "data_parallel", "tensor_parallel"
AXES = (PIPELINE_AXIS, DATA_AXIS, TENSOR_AXIS)
"""Outermost first: neighbours on the tensor axis have neighbouring ranks, so they sit in one node."""


@dataclass(frozen=True)
class Coordinate:
    """The place of one rank on each axis."""

    pipeline: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes and settings of each. Sizes are numbers here: `Layout.fit` turns "auto" into one."""

    data_parallel_size: int = 1
    """Ranks that see different data."""
    tensor_parallel_size: int = 1
    """Ranks that share every large matrix."""
    pipeline_parallel_size: int = 1
    """Ranks that own different blocks."""
    zero_stage: ZeroStage = 1
    """States that the data axis shards: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    zero_shard_size: int | None = None
    """Data ranks that share one sharded copy (hybrid shard where smaller than `data_parallel_size`)."""
    schedule: Schedule = "1f1b"
    """Order of forwards and backwards in the pipeline."""
    stages_per_rank: int = 1
    """Virtual stages of each pipeline rank (more than one only for the interleaved and V schedules)."""
    num_microbatches: int | Literal["auto"] = "auto"
    """Microbatches of one batch for the pipeline."""
    sequence_parallel: bool = False
    """Also shard norms and dropout along the sequence, over the tensor axis."""
    recompute: Recompute = "none"
    """Activations that are computed again in backward instead of stored."""
    offload: Offload = "none"
    """States in host memory: "all" moves parameters, gradients and optimizer states of sharded stages there."""

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "stages_per_rank"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"{name}={size!r} must be a whole number of at least 1.")
        _one_of("zero_stage", self.zero_stage, get_args(ZeroStage))
        _one_of("schedule", self.schedule, get_args(Schedule))
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("offload", self.offload, get_args(Offload))
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
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes in the order of `AXES`."""
        return (self.pipeline_parallel_size, self.data_parallel_size, self.tensor_parallel_size)

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_size * self.stages_per_rank

    @property
    def holds_parts(self) -> bool:
        """True where a rank has only a shard of the parameters."""
        split = self.tensor_parallel_size * self.pipeline_parallel_size > 1
        return split or (self.data_parallel_size > 1 and self.zero_stage > 0)

    def coordinate(self, rank: int) -> Coordinate:
        """The place of global `rank`."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a layout of {self.world_size} ranks.")
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Coordinate(pipeline=pipeline, data=data, tensor=tensor)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at `coordinate`."""
        row = coordinate.pipeline * self.data_parallel_size + coordinate.data
        return row * self.tensor_parallel_size + coordinate.tensor

    def fit(self, world_size: int) -> "Layout":
        """This layout with the data axis taking whatever `world_size` leaves, tensor and pipeline as they are."""
        model = self.tensor_parallel_size * self.pipeline_parallel_size
        if world_size % model:
            raise LayoutError(
                f"{world_size} ranks cannot be split into tensor_parallel_size={self.tensor_parallel_size} x"
                f" pipeline_parallel_size={self.pipeline_parallel_size} = {model} ranks per copy of the model:"
                f" {world_size} is not a multiple of {model}. Use a multiple of {model} devices or smaller sizes."
            )
        return replace(self, data_parallel_size=world_size // model)

    def check_world(self, world_size: int) -> None:
        """Raise unless the degrees multiply to `world_size`."""
        if self.world_size != world_size:
            raise LayoutError(
                f"data_parallel_size={self.data_parallel_size} x tensor_parallel_size={self.tensor_parallel_size} x"
                f" pipeline_parallel_size={self.pipeline_parallel_size} = {self.world_size} ranks, but the job has"
                f' {world_size}. Set data_parallel_size="auto", or start {self.world_size} processes'
                " (devices x num_nodes)."
            )

    def __str__(self) -> str:
        return (
            f"data {self.data_parallel_size} x tensor {self.tensor_parallel_size} x"
            f" pipeline {self.pipeline_parallel_size}, ZeRO {self.zero_stage}"
        )


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise LayoutError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")
