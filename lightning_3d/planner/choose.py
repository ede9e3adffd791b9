"""The layout for the devices that are there: what `strategy="3d"` and `layout="auto"` use. Pure, no process group."""

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
    room = cluster.accelerator.memory_gb * 1e9 * (0.9 if measured else UNKNOWN_SHARE)
    if _need(job, cluster, plain) <= room:
        return plain, _because(job, cluster, plain, room, measured, "fits, and sends least over the links")
    layout = _searched(job, cluster) if measured else _counted(job, cluster, room)
    why = f"plain data parallelism with ZeRO 1 would need {show_bytes(_need(job, cluster, plain))}"
    return layout, _because(job, cluster, layout, room, measured, why)


def _searched(job: Job, cluster: Cluster) -> Layout:
    plans = search(job, cluster)
    if not plans:
        raise PlannerError(f"{_what(job)} does not fit on {cluster} in any layout: use more or larger devices.")
    near = [plan for plan in plans if plan.time.total <= GOOD_ENOUGH * plans[0].time.total]
    return min(near, key=_complexity).layout


def _complexity(plan: Plan) -> tuple[int, ...]:
    layout = plan.layout
    parts = (layout.pipeline_parallel_size > 1) + (layout.tensor_parallel_size > 1)
    split = layout.pipeline_parallel_size * layout.tensor_parallel_size
    return (parts, split, layout.recompute != "none", layout.zero_stage, layout.stages_per_rank)


def _counted(job: Job, cluster: Cluster, room: float) -> Layout:
    tensors = [size for size in divisors(cluster.devices_per_node) if job.profile.can_split(size)]
    for tensor in tensors:
        layout = Layout(tensor_parallel_size=tensor, sequence_parallel=tensor > 1).fit(cluster.devices)
        stages: tuple[ZeroStage, ...] = (1, 2, 3)
        for stage in stages:
            if _need(job, cluster, replace(layout, zero_stage=stage)) <= room:
                return replace(layout, zero_stage=stage)
    for pipeline in divisors(cluster.devices // tensors[-1]):
        layout = Layout(
            tensor_parallel_size=tensors[-1], pipeline_parallel_size=pipeline, sequence_parallel=tensors[-1] > 1
        ).fit(cluster.devices)
        if pipeline <= job.profile.layers and _need(job, cluster, layout) <= room:
            return layout
    raise PlannerError(
        f"{_what(job)} does not fit on {cluster}: its states leave no room in {show_bytes(room)} per device in any"
        " layout. Use more or larger devices."
    )


def _need(job: Job, cluster: Cluster, layout: Layout) -> float:
    micro = max(1, job.batch // layout.data_parallel_size)
    reserved = 0.0 if cluster.accelerator.name.startswith("cpu") else cluster.accelerator.reserved_gb * 1e9
    return rank_memory(job, layout, stage=0, micro=micro, microbatches=1, reserved=reserved).total


def _because(job: Job, cluster: Cluster, layout: Layout, room: float, measured: bool, why: str) -> str:
    what = "states and activations" if measured else "states, before activations,"
    need = show_bytes(_need(job, cluster, layout))
    return "\n".join(
        [
            f"layout: {layout} for {_what(job)} on {cluster}.",
            f"memory: {what} need {need} per device, of {show_bytes(room)} set aside.",
            f"why: {why}.",
        ]
    )


def _what(job: Job) -> str:
    return f"{job.profile.name} ({show_count(job.profile.parameters)} parameters)"
