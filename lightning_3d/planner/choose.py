"""The layout for the devices that are there: what `strategy="3d"` and `layout="auto"` use. Pure, no process group."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout, ZeroStage
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import rank_memory
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.search import divisors, search
from lightning_3d.planner.states import Optimizer, Precision
from lightning_3d.planner.units import show_bytes, show_count

UNKNOWN_SHARE = 0.6
"""Share of a device that states may fill where activations are not known."""
FULL_SHARE = 0.9
"""Share of a device that states and activations may fill."""
GOOD_ENOUGH = 1.10
"""A simpler layout is taken if it costs at most this much more time."""


def choose_layout(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_per_device: int | None = None,
    precision: Precision = "32",
    optimizer: Optimizer = "adam",
) -> tuple[Layout, str]:
    """A layout of `profile` for every device of `cluster`, and three lines that say what was chosen and why.

    Plain data parallelism with ZeRO 1 wherever it fits; otherwise a measured profile (`profile_module`) is searched for
    the simplest layout within 10% of the fastest, and one that was only counted (`count_module`) gets the first of
    ZeRO 2, ZeRO 3, tensor inside the node, pipeline, whose states leave room for activations.
    """
    measured = profile.block_flops > 0 and batch_per_device is not None
    job = Job(
        profile=profile,
        samples=1,
        batch=(batch_per_device or 1) * cluster.devices,
        precision=precision,
        optimizer=optimizer,
    )
    plain = Layout(data_parallel_size=cluster.devices, zero_stage=1)
    memory, need = cluster.accelerator.memory_gb * 1e9, _need(job, cluster, plain)
    if need <= memory * (FULL_SHARE if measured else UNKNOWN_SHARE):
        return plain, _because(job, cluster, plain, need, measured, "fits, and sends least over the links")
    why = f"plain data parallelism with ZeRO 1 would need {show_bytes(need)}"
    if measured:
        plan = _searched(job, cluster)
        return plan.layout, _because(job, cluster, plan.layout, plan.peak.total, measured, why)
    layout = _counted(job, cluster)
    return layout, _because(job, cluster, layout, _need(job, cluster, layout), measured, why)


def _searched(job: Job, cluster: Cluster) -> Plan:
    plans = search(job, cluster)
    if not plans:
        raise PlannerError(f"{_what(job)} does not fit on {cluster} in any layout: use more or larger devices.")
    return min((plan for plan in plans if plan.time.total <= GOOD_ENOUGH * plans[0].time.total), key=_complexity)


def _complexity(plan: Plan) -> tuple[int, ...]:
    layout = plan.layout
    parts = (layout.pipeline_parallel_size > 1) + (layout.tensor_parallel_size > 1)
    split = layout.pipeline_parallel_size * layout.tensor_parallel_size
    return (parts, split, layout.recompute != "none", layout.zero_stage, layout.stages_per_rank)


def _counted(job: Job, cluster: Cluster) -> Layout:
    memory = cluster.accelerator.memory_gb * 1e9
    for room, recompute in ((UNKNOWN_SHARE * memory, "none"), (FULL_SHARE * memory, "full")):
        for layout in _simplest_first(job, cluster):
            if _need(job, cluster, layout) <= room:
                return replace(layout, recompute=recompute)  # type: ignore[arg-type]
    raise PlannerError(
        f"{_what(job)} does not fit on {cluster}: in every layout its states leave no room in"
        f" the {show_bytes(memory)} of a device. Use more or larger devices."
    )


def _simplest_first(job: Job, cluster: Cluster) -> Iterator[Layout]:
    """Tensor sizes within a node with ever higher ZeRO stages, then the largest of them with a pipeline."""
    stages: tuple[ZeroStage, ...] = (1, 2, 3)
    tensors = [size for size in divisors(cluster.devices_per_node) if job.profile.can_split(size)]
    for tensor in tensors:
        for stage in stages:
            sizes = Layout(tensor_parallel_size=tensor, zero_stage=stage, sequence_parallel=tensor > 1)
            yield sizes.fit(cluster.devices)
    for pipeline in divisors(cluster.devices // tensors[-1]):
        if 1 < pipeline <= job.profile.layers:
            yield Layout(
                tensor_parallel_size=tensors[-1],
                pipeline_parallel_size=pipeline,
                sequence_parallel=tensors[-1] > 1,
            ).fit(cluster.devices)


def _need(job: Job, cluster: Cluster, layout: Layout) -> float:
    micro = max(1, job.batch // layout.data_parallel_size)
    reserved = cluster.accelerator.reserved_gb * 1e9
    return rank_memory(job, layout, stage=0, micro=micro, microbatches=1, reserved=reserved).total


def _because(job: Job, cluster: Cluster, layout: Layout, need: float, measured: bool, why: str) -> str:
    what = "states and activations" if measured else "states, before activations,"
    return "\n".join(
        [
            f"layout: {layout} for {_what(job)} on {cluster}.",
            f"memory: {what} need {show_bytes(need)} of the {cluster.accelerator.memory_gb:g} GB of a device.",
            f"why: {why}.",
        ]
    )


def _what(job: Job) -> str:
    return f"{job.profile.name} ({show_count(job.profile.parameters)} parameters)"
