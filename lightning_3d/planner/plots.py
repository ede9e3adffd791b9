"""Pictures of plans: memory per rank, the pipeline's timetable, cost against days. Needs matplotlib (`plots` extra)."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.memory import RankMemory
from lightning_3d.planner.plan_report import schedule_name
from lightning_3d.planner.priced_layout import Plan
from lightning_3d.planner.search import search
from lightning_3d.planner.step_time import pass_times
from lightning_3d.planner.timetable import timetable

MOST_RANKS, MOST_MICROBATCHES = 16, 24
"""Of a timetable that can still be read."""
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}


def draw(plans: Sequence[Plan], folder: str) -> list[Path]:
    """Write `memory.png`, `cost.png` and, for a best plan with a pipeline, `timetable.png` into `folder`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlannerError('--plot needs matplotlib: pip install "lightning-3d[plots]".') from None
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"--plot {folder} cannot be written: {error.strerror}.") from error
    pictures = {"memory": draw_memory, "cost": draw_cost}
    if plans[0].layout.pipeline_parallel_size > 1:
        pictures["timetable"] = draw_timetable
    written = []
    for name, picture in pictures.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        picture(plans, figure.subplots())
        written.append(target / f"{name}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def draw_memory(plans: Sequence[Plan], axes: Any) -> None:
    """Bars of the memory of the fullest rank of each plan, against that of a device."""
    bottom = [0.0] * len(plans)
    labels = [_label(plan) for plan in plans]
    for name in (field.name for field in fields(RankMemory) if field.name != "host"):
        sizes = [getattr(plan.peak, name) / 1e9 for plan in plans]
        axes.bar(labels, sizes, bottom=bottom, label=name)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.axhline(plans[0].cluster.accelerator.memory_gb, color="black", linestyle="--", label="device memory")
    axes.set_ylabel("GB on the fullest rank")
    axes.legend(fontsize="small")


def draw_cost(plans: Sequence[Plan], axes: Any) -> None:
    """Dollars (device-hours where there is no price) against days, for each accelerator with fewer and more devices."""
    priced = all(plan.dollars is not None for plan in plans)
    for best in {plan.cluster.accelerator.name: plan for plan in reversed(plans)}.values():
        line = list(with_other_sizes(best))
        days = [plan.seconds / 86400 for plan in line]
        costs = [plan.dollars if priced else plan.device_hours for plan in line]
        axes.plot(days, costs, marker="o", label=best.cluster.accelerator.name)
        for plan, day, cost in zip(line, days, costs, strict=True):
            axes.annotate(f" {plan.cluster.devices}", (day, cost), fontsize="small")
    axes.set_xlabel("days (the numbers are devices)")
    axes.set_ylabel("$" if priced else "device-hours")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def with_other_sizes(best: Plan) -> Iterator[Plan]:
    """The best plans with a quarter to four times the devices, as far as they fit."""
    for quarters in (1, 2, 4, 8, 16):
        devices = best.cluster.devices * quarters // 4
        if devices:
            yield from search(best.job, Cluster.of(best.cluster.accelerator, devices))[:1]


def draw_timetable(plans: Sequence[Plan], axes: Any) -> None:
    """The timetable of the best plan's pipeline: its first ranks and microbatches, where it has many."""
    layout, time = plans[0].layout, plans[0].time
    stages = min(layout.pipeline_parallel_size, MOST_RANKS)
    microbatches = max(stages, min(plans[0].microbatches, MOST_MICROBATCHES) // stages * stages)
    useful = (time.compute + time.traffic + time.launching) / plans[0].microbatches
    again = time.recompute / plans[0].microbatches
    times = pass_times(plans[0].job.profile, layout, useful=useful, again=again)
    shown = timetable(
        layout.schedule, stages=stages, microbatches=microbatches, chunks=layout.stages_per_rank, times=times
    )
    for done in shown.passes:
        later = 0.35 * (done.stage // stages) / max(1, layout.stages_per_rank - 1)
        axes.barh(
            done.rank, done.end - done.start, left=done.start, color=_COLOURS[done.kind], alpha=1 - later, edgecolor="w"
        )
    axes.invert_yaxis()
    axes.set_yticks(range(stages))
    axes.set_ylabel("pipeline rank")
    axes.set_xlabel("seconds")
    of = f"{stages} of {layout.pipeline_parallel_size} ranks, {microbatches} of {plans[0].microbatches} microbatches"
    axes.set_title(f"{schedule_name(layout)}: {of}, bubble {100 * shown.bubble_share:.1f}%")


def _label(plan: Plan) -> str:
    layout = plan.layout
    sizes = f"d{layout.data_parallel_size} t{layout.tensor_parallel_size} p{layout.pipeline_parallel_size}"
    return f"{sizes}\nZeRO {layout.zero_stage}"
