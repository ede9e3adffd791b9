"""The page of `lightning-3d plan --html`: layouts, memory, cost, and the same question with other numbers."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.tools.pictures.kinds import TIMES, Curves, Picture, Point
from lightning_3d.tools.pictures.page import Table, TableCell, Words, save_page
from lightning_3d.tools.pictures.plan_pictures import cost, long_unit, sizes_name
from lightning_3d.tools.planner.answers import Answer, catalogue_of, plan_cluster, profile_of, shape_of
from lightning_3d.tools.planner.plan_report import COLUMNS, COMPARED, columns_that_differ, job_lines, strategy_block
from lightning_3d.tools.planner.priced_layout import Plan


def plan_page(args: Namespace, result: Answer, pictures: Sequence[Picture], file: Path) -> Path:
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
