"""Every layout of a job on a cluster, the ones that fit, the best of them."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, get_args

from lightning_3d.layout import SCHEDULES, Layout, OffloadMode, RecomputeMode, Schedule, ZeroStage
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import layers_on_rank
from lightning_3d.tools.planner.priced_layout import Plan, all_fit, price_layout, stages_memory
from lightning_3d.tools.planner.step_time import least_seconds

RECOMPUTE: tuple[RecomputeMode, ...] = ("none", "selective", "full")
OFFLOAD: tuple[OffloadMode, ...] = ("none", "all")


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Sizes that the user has fixed; None leaves one to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    zero: ZeroStage | None = None
    schedule: Schedule | None = None
    stages_per_rank: int | None = None
    micro: int | None = None
    recompute: RecomputeMode | None = None
    offload: OffloadMode | None = None
    sequence_parallel: bool | None = None
    shard: int | None = None
    """Data ranks that share one sharded copy."""


ANYTHING = Pins()


def leaders(job: Job, cluster: Cluster, pins: Pins = ANYTHING, most: int = 1, *, within: float = inf) -> list[Plan]:
    """The best plan of each tensor and pipeline size, `most` at most, fastest first; among equals the simplest.

    Offload is tried only where nothing fits without. A plan of more than `within` seconds a step may be left out.
    """
    bounds = [
        (least_seconds(job, one.layout, cluster, micro=one.micro, microbatches=one.microbatches), at, one)
        for at, one in enumerate(families(job, cluster, pins))
    ]
    bounds.sort(key=lambda one: one[:2])
    for offload in _offloads(pins):
        found: dict[tuple[int, int], tuple[Any, Plan]] = {}
        slowest = within
        for seconds, at, family in bounds:
            size = (family.layout.tensor_parallel_size, family.layout.pipeline_parallel_size)
            if seconds * (1 - 1e-9) > min(slowest, found[size][0][0] if size in found else inf):
                continue  # no member is fast enough, so none is priced
            for plan in fitting(job, cluster, family, pins, offload):
                rank = (*_order(plan), at)
                if size not in found or rank < found[size][0]:
                    found[size] = (rank, plan)
            times = sorted(rank[0] for rank, _ in found.values())
            slowest = times[most - 1] if len(times) >= most else within
        if found:
            return [plan for _, plan in sorted(found.values(), key=lambda one: one[0])][:most]
    return []


def _offloads(pins: Pins) -> tuple[OffloadMode, ...]:
    return OFFLOAD if pins.offload is None else (pins.offload,)


def can_fit(job: Job, cluster: Cluster, pins: Pins = ANYTHING) -> bool:
    """True where `leaders` would find a plan. Each split of the devices is tried with the least memory."""
    leanest_of: dict[tuple[int, int], Family] = {}
    for family in families(job, cluster, pins):  # the smallest microbatch and the schedule that holds least come first
        leanest_of.setdefault((family.layout.tensor_parallel_size, family.layout.pipeline_parallel_size), family)
    return any(
        _least_stage(job, cluster, family, pins, pins.recompute or "full", offload)
        for offload in _offloads(pins)
        for family in leanest_of.values()
    )


def leanest(job: Job, cluster: Cluster, pins: Pins = ANYTHING) -> Plan | None:
    """The plan that needs least memory per device, whether it fits or not; None where no layout divides at all."""
    recompute, offload = pins.recompute or "full", pins.offload or "all"
    lean = (
        price_layout(
            job,
            cluster,
            replace(family.layout, recompute=recompute, offload=offload, zero_stage=stage),
            micro=family.micro,
        )
        for family in families(job, cluster, pins)
        for stage in ((3, 1) if pins.zero is None else (pins.zero,))
    )
    return min(lean, key=lambda plan: plan.peak.total, default=None)


@dataclass(frozen=True)
class Family:
    """Layouts that differ only in ZeRO stage, recompute and offload."""

    layout: Layout
    micro: int
    microbatches: int


def families(job: Job, cluster: Cluster, pins: Pins) -> Iterator[Family]:
    """Every split of the devices, schedule and microbatch that divides the model and the batch."""
    for tensor, pipeline in _model_sizes(job, cluster, pins):
        data = cluster.devices // (tensor * pipeline)
        shared = job.options.context * job.options.experts
        if job.batch % data or data % shared or data % (pins.shard or 1):
            continue
        for micro in _micro_sizes(job.batch // data, pins):
            for schedule, chunks in schedules(pipeline, job.batch // data // micro, job.profile.layers, pins):
                layout = Layout(
                    data_parallel_size=data,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    schedule=schedule,
                    stages_per_rank=chunks,
                    zero_shard_size=pins.shard,
                    sequence_parallel=tensor > 1 and pins.sequence_parallel is not False,
                )
                yield Family(layout, micro, job.batch // data // micro)


def schedules(pipeline: int, microbatches: int, layers: int, pins: Pins) -> Iterator[tuple[Schedule, int]]:
    """Those that torch has for `microbatches` over `pipeline` ranks, with stages per rank.

    For others torch would run all forwards first.
    """
    if pipeline == 1:
        yield (pins.schedule or "1f1b"), 1
        return
    sizes = [1, *even_chunks(pipeline, layers)] if pins.stages_per_rank is None else [pins.stages_per_rank]
    for schedule in get_args(Schedule) if pins.schedule is None else (pins.schedule,):
        facts = SCHEDULES[schedule]
        for chunks in (facts.stages_per_rank,) if facts.stages_per_rank else sizes:
            fits = pipeline * chunks <= layers and facts.runs(pipeline, chunks, microbatches)
            fits = fits and (microbatches >= pipeline or not facts.halved_backward)  # fewer leave ranks idle for longer
            if fits and pins.stages_per_rank in (None, chunks):
                yield schedule, chunks


def even_chunks(pipeline: int, layers: int) -> list[int]:
    """Stages per rank with which the fullest rank has no more blocks than with one."""
    least = ceil(layers / pipeline)
    return [
        size for size in range(2, 9) if pipeline * size <= layers and ceil(layers / (pipeline * size)) * size == least
    ]


def fitting(job: Job, cluster: Cluster, family: Family, pins: Pins, offload: OffloadMode) -> Iterator[Plan]:
    """The members of `family` that fit. A member is skipped where one that costs less time fits as well."""
    for recompute in RECOMPUTE if pins.recompute is None else (pins.recompute,):
        stage = _least_stage(job, cluster, family, pins, recompute, offload)
        if stage is None:
            continue
        layout = replace(family.layout, zero_stage=stage, recompute=recompute, offload=offload)
        fewer = job if pins.recompute else fewest_recomputed(job, cluster, layout, family)
        yield price_layout(fewer, cluster, layout, micro=family.micro)
        hybrid = replace(layout, zero_shard_size=_node_share(layout, cluster, pins))
        if hybrid != layout and _fits(job, cluster, hybrid, family):
            yield price_layout(job, cluster, hybrid, micro=family.micro)
        if stage <= 1:
            return


def fewest_recomputed(job: Job, cluster: Cluster, layout: Layout, family: Family) -> Job:
    """`job` with the fewest blocks computed again that fit. All of them fit."""
    if layout.recompute != "full":
        return job
    blocks = layers_on_rank(job.profile, layout)

    def with_share(count: int) -> Job:
        return replace(job, options=replace(job.options, recomputed=count / blocks))

    fewer = range(1, blocks)
    return with_share(1 + bisect_left(fewer, True, key=lambda count: _fits(with_share(count), cluster, layout, family)))


def _node_share(layout: Layout, cluster: Cluster, pins: Pins) -> int | None:
    """Data ranks in a node, where ZeRO 3 over more of them could shard among these alone."""
    inside, ranks = cluster.domain // layout.tensor_parallel_size, layout.data_parallel_size
    able = layout.zero_stage == 3 and not layout.pipelined and pins.shard is None
    return inside if able and 1 < inside < ranks and ranks % inside == 0 else layout.zero_shard_size


def _least_stage(
    job: Job, cluster: Cluster, family: Family, pins: Pins, recompute: RecomputeMode, offload: OffloadMode
) -> ZeroStage | None:
    """The lowest ZeRO stage that fits: stage 1 sends what stage 0 sends, the higher ones more."""
    for stage in zero_stages(family.layout, offload, pins.zero):
        layout = replace(family.layout, zero_stage=stage, recompute=recompute, offload=offload)
        if _fits(job, cluster, layout, family):
            return stage
    return None


def _fits(job: Job, cluster: Cluster, layout: Layout, family: Family) -> bool:
    stages, micro, count = layout.ends, family.micro, family.microbatches
    return all_fit(stages_memory(job, cluster, layout, stages, micro=micro, microbatches=count), cluster)


def zero_stages(layout: Layout, offload: OffloadMode, fixed: ZeroStage | None) -> tuple[ZeroStage, ...]:
    """ZeRO stages to try. A pipeline has gathered weights and full gradients, so that stage 1 saves as much."""
    if fixed is not None:
        return (fixed,)
    if layout.gradient_ranks == 1 or layout.pipelined:
        return (3,) if offload == "all" and not layout.pipelined else (1,)
    return (3,) if offload == "all" else (1, 2, 3)


def _model_sizes(job: Job, cluster: Cluster, pins: Pins) -> Iterator[tuple[int, int]]:
    for tensor in divisors(cluster.domain) if pins.tensor is None else [pins.tensor]:
        if not job.profile.can_split(tensor) or cluster.devices % tensor:
            continue
        for pipeline in divisors(cluster.devices // tensor):
            if pins.pipeline in (None, pipeline) and pipeline <= job.profile.layers:
                yield tensor, pipeline


def _micro_sizes(per_rank: int, pins: Pins) -> list[int]:
    if pins.micro is not None:
        return [pins.micro] if per_rank % pins.micro == 0 else []
    sizes: list[int] = []
    for size in divisors(per_rank):  # of near ones the smallest: a batch may have very many divisors
        if not sizes or size >= _APART * sizes[-1] or size == per_rank:
            sizes.append(size)
    return sizes[:_MOST_SIZES]


_APART = 1.5
_MOST_SIZES = 12


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _order(plan: Plan) -> tuple[Any, ...]:
    layout = plan.layout
    simple = (layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.stages_per_rank)
    return (plan.time.total, *simple, layout.schedule != "1f1b")
