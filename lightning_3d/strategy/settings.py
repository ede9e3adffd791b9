"""`Settings`: the checked arguments of `Strategy3D`, each stored once. What others need in another form is derived."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args

from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.checkpoint import CheckpointFormat
from lightning_3d.comm.grad_sync import CommConfig, GradCompression, GradSync
from lightning_3d.errors import ConfigurationError, LayoutError, UnsupportedError, check_one_of
from lightning_3d.layout import DATA_AXIS, Layout, Schedule, ZeroStage, not_with_experts
from lightning_3d.parallel.parallel_plan import UserChoices
from lightning_3d.strategy.in_shards import Teardown
from lightning_3d.verify.first_step import Verify

StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]
Resume = Literal["auto"]

_OPEN = {DATA_AXIS: "auto"}
"""The size of an axis that is not given, where it is not None."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Strategy3D`. Its docstring explains them."""

    layout: Literal["given", "auto"]
    layout_class: type[Layout]
    sizes: Mapping[str, int | Literal["auto"] | None]
    """By axis; "auto" for data and None for another axis were not given."""
    expert_parallel_size: int
    zero_stage: ZeroStage | None
    zero_shard_size: int | None
    schedule: Schedule
    stages_per_rank: int
    num_microbatches: int | Literal["auto"]
    sequence_parallel: bool
    choices: UserChoices
    grad_sync: GradSync | Literal["auto"]
    grad_compression: GradCompression | None
    checkpoint_format: CheckpointFormat
    async_checkpoint: bool
    resume: Resume | None
    teardown: Teardown
    quiet: bool
    verify: Verify | None
    timeout: timedelta
    start_method: StartMethod
    process_group_backend: str | None

    def __post_init__(self) -> None:
        check_one_of("checkpoint_format", self.checkpoint_format, get_args(CheckpointFormat))
        if self.resume not in (None, "auto"):
            raise ConfigurationError(f'resume={self.resume!r} is neither None nor "auto".')
        check_one_of("layout", self.layout, ("given", "auto"))
        check_one_of("verify", self.verify, (None, *get_args(Verify)))
        check_one_of("teardown", self.teardown, get_args(Teardown))
        self._comm_config("ring", None)
        _ = self.base  # raises for sizes that no layout has

    @cached_property
    def base(self) -> Layout:
        """The layout, with 1 for each size that is not given."""
        recompute, offload = self.choices.recompute.mode, self.choices.offload
        sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in self.sizes.items() if size != _OPEN.get(axis)}
        return self.layout_class(
            **sizes,
            expert_parallel_size=self.expert_parallel_size,
            zero_stage=1 if self.zero_stage is None else self.zero_stage,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            num_microbatches=self.num_microbatches,
            sequence_parallel=self.sequence_parallel,
            recompute="full" if recompute == "auto" else recompute or "none",
            offload="none" if offload.parameters is None else "all",
        )

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that bound the choice of a layout, by the names of a `LayoutChooser`."""
        sizes = {axis: size for axis, size in self.sizes.items() if size != _OPEN.get(axis)}
        named = {short: sizes.get(f"{short}_parallel") for short in ("data", "tensor", "pipeline")}
        return named | {
            "context": None if self.base.context_parallel_size == 1 else self.base.context_parallel_size,
            "experts": None if self.expert_parallel_size == 1 else self.expert_parallel_size,
            "zero": self.zero_stage,
            "shard": self.zero_shard_size,
            "compression": self.grad_compression,
            "offload": self.choices.offload.alone,
        }

    @property
    def fills_data(self) -> bool:
        """True where data ranks are all that the other axes leave."""
        return self.sizes[DATA_AXIS] == _OPEN[DATA_AXIS]

    @property
    def offloads_states(self) -> bool:
        return self.choices.offload.optimizer is not None

    def fit(self, layout: Layout, world_size: int) -> Layout:
        """`layout`, if these settings allow it on so many ranks. Raise elsewhere."""
        layout.check_world(world_size)
        self.choices.offload.check(layout)
        check_experts(layout, self.zero_shard_size, self.grad_compression)
        return replace(layout, zero_shard_size=self.zero_shard_size)

    def comm_config(self, *, streams: bool, ranks_per_node: int) -> CommConfig:
        """The communication of the data axis; with `streams` the backend overlaps it by itself (CUDA)."""
        if streams and self.grad_sync in ("ring", "hierarchical"):
            rank_zero_warn(
                f'grad_sync="{self.grad_sync}" sends hop by hop on a GPU, and each hop is a launch that the next one'
                ' waits for. It is made for CPUs. grad_sync="auto" uses the collectives of NCCL, which overlap.'
            )
        return self._comm_config("native" if streams else "ring", ranks_per_node)

    def _comm_config(self, auto: GradSync, ranks_per_node: int | None) -> CommConfig:
        return CommConfig(
            grad_sync=auto if self.grad_sync == "auto" else self.grad_sync,
            grad_compression=self.grad_compression,
            ranks_per_node=ranks_per_node,
        )


def check_experts(layout: Layout, shard_size: int | None, compression: str | None) -> None:
    """Raise for settings under which ranks cannot share experts."""
    ranks, size = layout.gradient_ranks, layout.expert_parallel_size
    if size == 1:
        return
    if ranks % size:
        raise LayoutError(
            f"expert_parallel_size={size} does not divide the {ranks} data and context ranks of {layout}: each group of"
            f" {size} of them owns all experts. Use a divisor of {ranks}."
        )
    if refused := not_with_experts(layout, shard_size, compression):
        raise UnsupportedError(
            f"expert_parallel_size={size} together with {refused[0]} is not supported: it was"
            " never compared with one device. Leave one of the two out."
        )
