"""Every layout of a job on a cluster, the ones that fit, the best of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from lightning_3d.layout import Layout, Offload, Recompute, Schedule, ZeroStage
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.priced_layout import Plan, ends_memory, price_layout

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD: tuple[Offload, ...] = ("none", "all")


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Sizes that the user has fixed; None leaves one to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    zero: ZeroStage | None = None
    schedule: Schedule | None = None
    chunks: int | None = None
    micro: int | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None
    sequence_parallel: bool | None = None


ANYTHING = Pins()


def search(job: Job, cluster: Cluster, pins: Pins = ANYTHING) -> list[Plan]:
    """Plans that fit, fastest first; among equals the simplest. Offload is tried only where nothing fits without."""
    members = list(families(job, cluster, pins))
    for offload in _offloads(pins):
        plans = [plan for family in members for plan in fitting(job, cluster, family, pins, offload)]
        if plans:
            return sorted(plans, key=_order)
    return []


def _offloads(pins: Pins) -> tuple[Offload, ...]:
    return OFFLOAD if pins.offload is None else (pins.offload,)


def can_fit(job: Job, cluster: Cluster, pins: Pins = ANYTHING) -> bool:
    """True where `search` would find a plan. Each split of the devices is tried with the least memory."""
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


def distinct(plans: list[Plan], most: int) -> list[Plan]:
    """The best plan of each tensor and pipeline size, `most` at most."""
    best: dict[Any, Plan] = {}
    for plan in plans:
        best.setdefault((plan.layout.tensor_parallel_size, plan.layout.pipeline_parallel_size), plan)
    return list(best.values())[:most]


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
        if job.batch % data:
            continue
        for micro in _micro_sizes(job.batch // data, pins):
            for schedule, chunks in schedules(pipeline, job.batch // data // micro, job.profile.layers, pins):
                layout = Layout(
                    data_parallel_size=data,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    schedule=schedule,
                    stages_per_rank=chunks,
                    sequence_parallel=tensor > 1 and pins.sequence_parallel is not False,
                )
                yield Family(layout, micro, job.batch // data // micro)


def schedules(pipeline: int, microbatches: int, layers: int, pins: Pins) -> Iterator[tuple[Schedule, int]]:
    """Schedules that can run `microbatches` over `pipeline` ranks, with stages per rank."""
    if pipeline == 1:
        yield (pins.schedule or "1f1b"), 1
        return
    sizes = even_chunks(pipeline, layers) if pins.chunks is None else [pins.chunks]
    for schedule, chunks in _all_schedules(pipeline, microbatches, layers, sizes):
        if pins.schedule in (None, schedule) and pins.chunks in (None, chunks):
            yield schedule, chunks


def even_chunks(pipeline: int, layers: int) -> list[int]:
    """Stages per rank with which the fullest rank has no more blocks than with one."""
    least = ceil(layers / pipeline)
    return [
        size for size in range(2, 9) if pipeline * size <= layers and ceil(layers / (pipeline * size)) * size == least
    ]


def fitting(job: Job, cluster: Cluster, family: Family, pins: Pins, offload: Offload) -> Iterator[Plan]:
    """The members of `family` that fit. A member is skipped where one that costs less time fits as well."""
    for recompute in RECOMPUTE if pins.recompute is None else (pins.recompute,):
        stage = _least_stage(job, cluster, family, pins, recompute, offload)
        if stage is None:
            continue
        layout = replace(family.layout, zero_stage=stage, recompute=recompute, offload=offload)
        yield price_layout(job, cluster, layout, micro=family.micro)
        if stage <= 1:
            return


def _least_stage(
    job: Job, cluster: Cluster, family: Family, pins: Pins, recompute: Recompute, offload: Offload
) -> ZeroStage | None:
    """The lowest ZeRO stage that fits: stage 1 sends what stage 0 sends, the higher ones more."""
    for stage in _stages(family.layout, pins, offload):
        layout = replace(family.layout, zero_stage=stage, recompute=recompute, offload=offload)
        memory = ends_memory(job, cluster, layout, micro=family.micro, microbatches=family.microbatches)
        device = cluster.accelerator
        if all(end.total <= device.memory_gb * 1e9 and end.host <= device.host_memory_gb * 1e9 for end in memory):
            return stage
    return None


def _stages(layout: Layout, pins: Pins, offload: Offload) -> tuple[ZeroStage, ...]:
    if pins.zero is not None:
        return (pins.zero,)
    plain = layout.data_parallel_size == 1 or layout.pipeline_parallel_size > 1
    if offload == "all" and layout.pipeline_parallel_size == 1:
        return (3,)
    return (1,) if plain else (1, 2, 3)


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


def _all_schedules(pipeline: int, microbatches: int, layers: int, sizes: list[int]) -> Iterator[tuple[Schedule, int]]:
    """Those that torch has for so many microbatches (for others it would run all forwards first), `sizes` stages on a
    rank where a schedule has several."""
    yield "1f1b", 1
    yield "gpipe", 1
    if microbatches % max(1, microbatches // pipeline) == 0:
        yield "interleaved_zero_bubble", 1
    for chunks in sizes:
        if chunks > 1 and pipeline * chunks <= layers:
            if microbatches % pipeline == 0:
                yield "interleaved_1f1b", chunks
                yield "interleaved_zero_bubble", chunks
            if microbatches >= pipeline:
                yield "loopedbfs", chunks
    if layers >= 2 * pipeline and microbatches >= 2 * pipeline:
        yield "zbv_zero_bubble", 2
        yield "dualpipev", 2


def divisors(number: int) -> list[int]:
    """Divisors of `number`, smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _order(plan: Plan) -> tuple[Any, ...]:
    layout = plan.layout
    simple = (layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.stages_per_rank)
    return (plan.time.total, *simple, layout.schedule != "1f1b")
