"""Plans as pictures, and their page: memory of the fullest rank, cost against time, the timetable of the pipeline."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.module.amounts import show_bytes
from lightning_3d.pipeline.stage_costs import bubble_share
from lightning_3d.tools.pictures.kinds import TIMES, Bars, Curves, Lanes, Picture, Point
from lightning_3d.tools.pictures.page import Table, TableCell, Words, save_page
from lightning_3d.tools.pictures.timeline_pictures import most_seconds, pass_spans, scale, timetable
from lightning_3d.tools.planner.answers import Answer, catalogue_of, plan_cluster, profile_of, shape_of
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.memory import PlannedMemory
from lightning_3d.tools.planner.plan_report import (
    COLUMNS,
    COMPARED,
    columns_that_differ,
    job_lines,
    schedule_name,
    strategy_block,
)
from lightning_3d.tools.planner.priced_layout import Plan
from lightning_3d.tools.planner.search import leaders
from lightning_3d.tools.planner.step_time import pass_times

MOST_RANKS, FEWEST, MOST = 64, 16, 64
"""Ranks of a timetable that can still be read, and its microbatches: twice as many as ranks within the last two."""
GB = 1e9


def plan_pictures(plans: Sequence[Plan], deadline: float | None, budget: float | None) -> dict[str, Picture]:
    """Name of each picture -> the picture. A timetable is of the best plan with a pipeline."""
    title, peaks = "Memory of the fullest rank, by layout", [plan.peak for plan in plans]
    memory = bars_of_memory(title, map(layout_name, plans), peaks, plans[0])
    pictures: dict[str, Picture] = {"memory": memory, "cost": cost_curves(plans, deadline, budget)}
    staged = next((plan for plan in plans if plan.layout.pipelined), None)
    return pictures if staged is None else {**pictures, "timetable": plan_lanes(staged)}


def bars_of_memory(title: str, labels: Iterable[str], ranks: Sequence[PlannedMemory], plan: Plan) -> Bars:
    """The memory of each of `ranks`, against that of a device of `plan`."""
    parts = {
        field.name: tuple(getattr(rank, field.name) / GB for rank in ranks)
        for field in fields(PlannedMemory)
        if field.name != "host" and any(getattr(rank, field.name) for rank in ranks)
    }
    device = plan.cluster.accelerator
    return Bars(
        title=title,
        unit="GB",
        labels=tuple(labels),
        parts=parts,
        totals=tuple(show_bytes(rank.total) for rank in ranks),
        limit=device.memory_gb,
        limit_name=f"{device.name}: {device.memory_gb:g} GB",
    )


def cost_curves(plans: Sequence[Plan], deadline: float | None = None, budget: float | None = None) -> Curves:
    """Dollars (device-hours where there is no price) against time, for each accelerator with fewer and more devices."""
    priced = all(plan.dollars is not None for plan in plans)
    sizes = {
        best.cluster.accelerator.name: list(with_other_sizes(best))
        for best in {plan.cluster.accelerator.name: plan for plan in reversed(plans)}.values()
    }
    unit, name = long_unit(max([deadline or 0.0, *(plan.seconds for each in sizes.values() for plan in each)]))
    curves = {
        accelerator: tuple(Point(plan.seconds / unit, cost(plan, priced), str(plan.cluster.devices)) for plan in each)
        for accelerator, each in sizes.items()
    }
    return Curves(
        title=f"Cost and time of {plans[0].job.profile.name}, by number of devices",
        x=f"{name} (next to a point: devices)",
        y="$" if priced else "device-hours",
        curves=curves,
        deadline=None if deadline is None else (deadline / unit, "deadline"),
        budget=None if budget is None or not priced else (budget, "budget"),
    )


def long_unit(seconds: float) -> tuple[float, str]:
    """The unit, in seconds, in which the time of a training is a number of few digits, and its name."""
    return (3600.0, "hours") if seconds < 2 * 86400 else (86400.0, "days")


def cost(plan: Plan, priced: bool) -> float:
    """Dollars, or device-hours where not every plan is priced."""
    return plan.dollars if priced and plan.dollars is not None else plan.device_hours


def with_other_sizes(best: Plan) -> Iterator[Plan]:
    """`best`, and the best plans with a quarter to four times its devices, as far as they fit."""
    for quarters in (1, 2, 4, 8, 16):
        devices = best.cluster.devices * quarters // 4
        if quarters == 4:
            yield best
        elif devices:
            yield from leaders(best.job, Cluster.of(best.cluster.accelerator, devices))


def plan_lanes(plan: Plan) -> Lanes:
    """The timetable of a plan's pipeline: of its first ranks and microbatches, where it has many.

    The idle share in the title is that of the complete step. In the drawing it is larger: fewer microbatches hide less.
    """
    layout, time = plan.layout, plan.time
    stages = min(layout.sizes[PIPELINE_AXIS], MOST_RANKS)
    shown = min(plan.microbatches, MOST, max(FEWEST, 2 * stages))
    microbatches = max(stages, shown // stages * stages)
    useful = (time.compute + time.traffic + time.launching) / plan.microbatches
    times = pass_times(plan.job.profile, layout, useful=useful, again=time.recompute / plan.microbatches)
    passes = timetable(
        layout.schedule, stages=stages, microbatches=microbatches, chunks=layout.stages_per_rank, times=times
    )
    idle = bubble_share(
        layout.schedule,
        stages=layout.sizes[PIPELINE_AXIS],
        microbatches=plan.microbatches,
        chunks=layout.stages_per_rank,
        times=times,
    )
    title = (
        f"{schedule_name(layout)}, {layout.sizes[PIPELINE_AXIS]} ranks, {plan.microbatches} microbatches:"
        f" a rank idles {idle:.1%} of the pipeline's time"
    )
    if (stages, microbatches) != (layout.sizes[PIPELINE_AXIS], plan.microbatches):
        title += f" (drawn with {stages} ranks and {microbatches} microbatches)"
    factor, unit = scale(most_seconds(passes))
    return Lanes(title=title, unit=unit, spans=pass_spans(passes, stages, factor), lanes=stages)


def layout_name(plan: Plan) -> str:
    """A layout in a few characters, with the schedule of a pipeline."""
    name = f"{sizes_name(plan.layout)}, micro {plan.micro}"
    return name if not plan.layout.pipelined else f"{name}, {schedule_name(plan.layout)}"


def sizes_name(layout: Layout) -> str:
    """The sizes of the axes and the ZeRO stage in a few characters."""
    sizes = " ".join(f"{axis[0]}{size}" for axis, size in layout.by_data_first.items())
    return f"{sizes} z{layout.zero_stage}"


def plan_page(args: Namespace, result: Answer, pictures: Sequence[Picture], file: Path) -> Path:
    """The page of `lightning-3d plan --html`: layouts, memory, cost, and the same question with other numbers."""
    best = result.plans[0]
    about = Words(title="The training", lines=(*job_lines(best.job), *result.notes))
    strategy = Words(title="To train as in the first line", lines=tuple(strategy_block(best)), exact=True)
    title = f"{best.job.profile.name} on {best.cluster}"
    changes = _changes(args, result)
    return save_page(file, title, [about, plans_as_table(result.plans), strategy, *pictures, *changes])


def plans_as_table(plans: Sequence[Plan]) -> Table:
    """The table of `lightning-3d plan`, with the numbers that sort it."""
    columns = COMPARED if len({plan.cluster.accelerator.name for plan in plans}) > 1 else COLUMNS
    columns = columns_that_differ(plans, columns)
    rows = tuple(tuple(_cell(value(plan), show) for value, show in columns.values()) for plan in plans)
    return Table(title="Layouts, best first (a click on a name sorts)", header=tuple(columns), rows=rows)


def _cell(value: Any, show: Callable[[Any], str]) -> TableCell:
    """A number, or the first of several, sorts its row."""
    first = value[0] if isinstance(value, tuple) else value
    return TableCell(show(value), None if isinstance(first, str) else first or 0.0)


def _changes(args: Namespace, result: Answer) -> Iterator[Curves]:
    """Cost and time on the cluster of the best plan with another batch, sequence or price."""
    best = result.plans[0]
    batch = best.job.batch // best.job.options.context
    yield from _asked(args, result, "batch", "samples in a batch", batch)
    if shape_of(args) is not None:  # a module's samples are as long as its own
        yield from _asked(args, result, "sequence", "tokens in a sample", result.profile.tokens)
    price = best.cluster.accelerator.price
    if price is not None and best.dollars is not None:
        rate, name = price.dollars_per_hour, "$ for an hour of a device"
        points = tuple(Point(rate * times, best.dollars * times) for times in TIMES)
        yield Curves(title=f"Cost against {name}", x=name, y="$", curves={f"on {best.cluster}": points})


def _asked(args: Namespace, result: Answer, flag: str, name: str, value: int) -> Iterator[Curves]:
    """Cost and time of the best plan for other values of `flag`; all else stays as it is asked."""
    best, catalogue = result.plans[0], catalogue_of(args)
    found: list[tuple[int, Plan]] = []
    without: list[str] = []
    for other in sorted({max(1, round(value * times)) for times in TIMES}):
        asked = Namespace(**{**vars(args), flag: other})
        try:
            profile = profile_of(asked) if flag == "sequence" else result.profile
            found.append((other, plan_cluster(asked, profile, catalogue, best.cluster)[0]))
        except PlannerError:
            without.append(f"{other:,}")
    if not found:
        return
    priced = best.dollars is not None
    nothing = f" (no plan for {', '.join(without)})" if without else ""
    unit_seconds, name_of_unit = long_unit(max(plan.seconds for _, plan in found))
    measures: dict[str, tuple[str, Callable[[Plan], float]]] = {
        "Cost": ("$" if priced else "device-hours", lambda plan: cost(plan, priced)),
        "Time": (name_of_unit, lambda plan: plan.seconds / unit_seconds),
    }
    for what, (unit, measure) in measures.items():
        points = tuple(Point(other, measure(plan), sizes_name(plan.layout)) for other, plan in found)
        yield Curves(title=f"{what} against {name}{nothing}", x=name, y=unit, curves={f"on {best.cluster}": points})
