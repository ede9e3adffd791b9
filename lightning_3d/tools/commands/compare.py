"""Compare the jobs of Hydra sweeps and single runs: layout, loss, seconds per step, memory, cost."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any

from lightning_3d.checkpoint.remote_path import Place, located
from lightning_3d.errors import ConfigurationError, PlannerError, printable
from lightning_3d.launch.hydra_job import FAILED, FILE
from lightning_3d.layout import ALWAYS, AXES, DATA_AXIS, EXPERT_AXIS
from lightning_3d.module.amounts import MOST, real, show_bytes, show_dollars, show_hours, show_seconds
from lightning_3d.tools.pictures.drawing import save_png
from lightning_3d.tools.pictures.kinds import TIMES, Bars, Curves, Point
from lightning_3d.tools.pictures.page import Part, Table, TableCell, Words, save_page
from lightning_3d.tools.pictures.timeline_pictures import scale
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Accelerator
from lightning_3d.tools.planner.local_cluster import catalogue_name
from lightning_3d.tools.planner.plain_yaml import read_plain
from lightning_3d.tools.planner.plan_report import table

EXAMPLE = """\
examples:
  lightning-3d compare multirun/2026-01-31/12-00-00
  lightning-3d compare multirun/2026-01-31/12-00-00 --metric val_loss --price 2.5 --plot comparison.png
  lightning-3d compare multirun/2026-01-31/12-00-00 --html comparison.html
  lightning-3d compare outputs/2026-01-31/12-00-00 outputs/2026-01-31/13-00-00
"""
OVERRIDES = "overrides.yaml"
"""File that Hydra writes into `.hydra` of each job."""
REASON = 300
"""Characters shown of the reason why a job failed."""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
HEADER = ("job", "layout", "devices", "loss", "step", "samples", "steps", "samples/s", "memory", "device-hours", "cost")


@dataclass(frozen=True, kw_only=True, eq=False)
class JobReport:
    """One job of a sweep. `report` is None if it did not finish training."""

    name: str
    overrides: tuple[str, ...]
    report: dict[str, Any] | None
    reason: str = ""
    """Why there is no report."""
    device: Accelerator | None = None
    """Its devices, where the catalogue has them."""

    def number(self, name: str) -> float | None:
        """A number of the report; None where an older version wrote it, which had none."""
        return (self.report or {}).get(name)

    @property
    def rate(self) -> float | None:
        samples, seconds = self.number("step_samples"), self.number("step_seconds")
        return samples / seconds if samples and seconds else None

    def metric(self, wanted: str | None) -> float | None:
        """The value of `wanted`; without a name, that of the logged loss."""
        metrics: dict[str, float] = (self.report or {}).get("metrics", {})
        if wanted is not None:
            return metrics.get(wanted)
        return next((metrics[name] for name in _like_a_loss(metrics)), None)

    def price(self, given: float | None) -> float | None:
        """Dollars for an hour of a device: `given`, or that of the catalogue, None where it has none."""
        listed = self.device.price if self.device is not None else None
        return given if given is not None or listed is None else listed.dollars_per_hour

    @property
    def device_hours(self) -> float:
        return self.report["seconds"] * self.report["devices"] / 3600 if self.report else 0.0


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="+", help="directories of sweeps or of single runs, such as multirun/2026-01-31/12-00-00"
    )
    parser.add_argument("--metric", metavar="NAME", help="logged value to show (default: the loss)")
    parser.add_argument("--price", type=real, metavar="DOLLARS", help="price of a device-hour (default: catalogue)")
    parser.add_argument("--plot", metavar="FILE", help='also draw a picture (pip install "lightning-3d[plots]")')
    parser.add_argument("--html", metavar="FILE", help="also write a page with a table to sort and more pictures")


def run(args: Namespace) -> int:
    """Print a line for each job, also for those that failed."""
    jobs = read_jobs(*map(located, args.folder))
    print(compared(jobs, metric=args.metric, price=args.price))
    for line in (*_other_batches(jobs), *_failures(jobs)):
        print(printable(line))
    if args.plot:
        file = save_png(Path(args.plot), sweep_pictures(jobs, args.metric), side_by_side=True)
        print(printable(f"wrote {file}"))
    if args.html:
        print(printable(f"wrote {sweep_page(jobs, args.metric, args.price, Path(args.html))}"))
    return 0


def read_jobs(*folders: Place) -> list[JobReport]:
    """The jobs in each of `folders`, in the order they were numbered. Their names begin where the folders differ."""
    alike = takewhile(
        lambda each: len(set(each)) == 1, zip(*(folder.absolute().parts for folder in folders), strict=False)
    )
    top = len(list(alike))
    homes = dict.fromkeys(home for folder in folders for home in _homes(folder.absolute()))
    jobs = [_read(home, "/".join(home.parts[top:]) or ".") for home in homes]
    if all(job.report is None for job in jobs):
        raise ConfigurationError(
            f"none of the {len(jobs)} jobs in {', '.join(map(str, folders))} left a {FILE}: Strategy3D writes it when"
            f" `fit` ends. {next(_failures(jobs))}"
        )
    known = {name: catalogue_name(name) for name in {job.report["device"] for job in jobs if job.report is not None}}
    devices = {name: Catalogue.load().find(listed) if listed else None for name, listed in known.items()}
    return [job if job.report is None else replace(job, device=devices[job.report["device"]]) for job in jobs]


def _homes(folder: Place) -> list[Place]:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no directory: give that of a sweep, such as multirun/DATE/TIME.")
    started = {path.parent.parent for path in folder.rglob(f".hydra/{OVERRIDES}")}
    homes = started | {path.parent for path in folder.rglob(FILE)}
    if not homes:
        raise ConfigurationError(f"{folder} has no job of a Hydra sweep (no .hydra/{OVERRIDES} below it).")
    return sorted(homes, key=lambda home: (int(home.name) if home.name.isdigit() else 0, str(home)))


def compared(jobs: Sequence[JobReport], *, metric: str | None = None, price: float | None = None) -> str:
    """The table. Of overrides only those are shown in which the jobs differ."""
    if metric is not None and all(job.metric(metric) is None for job in jobs):
        known = sorted({name for job in jobs for name in (job.report or {}).get("metrics", {})})
        raise ConfigurationError(f"no job logged {metric!r}: there is {', '.join(known) or 'nothing'}.")
    jobs_table = _table(jobs, metric, price)
    return table(jobs_table.header, [[printable(cell.text) for cell in row] for row in jobs_table.rows])


def _table(jobs: Sequence[JobReport], metric: str | None, price: float | None) -> Table:
    header = (*HEADER[:3], metric or HEADER[3], *HEADER[4:], "overrides")
    rows = tuple(
        (*_cells(job, metric, price), TableCell(own or "-")) for job, own in zip(jobs, swept(jobs), strict=True)
    )
    return Table(title="Jobs (a click on a name sorts)", header=header, rows=rows)


def swept(jobs: Sequence[JobReport]) -> list[str]:
    """The overrides of each job that not all have."""
    known = [set(job.overrides) for job in jobs if job.overrides or job.report is not None]
    common = set.intersection(*known) if known else set()
    return [" ".join(each for each in job.overrides if each not in common) for job in jobs]


def _other_batches(jobs: Sequence[JobReport]) -> Iterator[str]:
    """A warning where layouts trained on other batches: their losses and steps say little about the layouts."""
    sizes = {job.number("step_samples") for job in jobs} - {None}
    if len(sizes) > 1:
        shown = ", ".join(f"{size:,.0f}" for size in sorted(filter(None, sizes)))
        yield (
            f"these jobs trained on batches of {shown} samples a step: compare samples/s, and losses at equal samples."
            " A layout with fewer data ranks needs a larger batch of the loader for the same step."
        )


def _failures(jobs: Sequence[JobReport]) -> Iterator[str]:
    for job in jobs:
        if job.report is None:
            yield f"job {job.name} did not finish: {shorten(job.reason, REASON, placeholder=' ...')}"


def sweep_pictures(jobs: Sequence[JobReport], metric: str | None) -> list[Bars]:
    """Loss, step time and memory of each job that ended."""
    ended = [(job, job.report) for job in jobs if job.report is not None]
    own = dict(zip(jobs, swept(jobs), strict=True))
    labels = tuple(f"{job.name}: {own[job] or _short(report)}" for job, report in ended)
    seconds = [report["step_seconds"] for _, report in ended]
    factor, unit = scale(max((each for each in seconds if each is not None), default=1.0))
    name, loss = metric or "loss", tuple(_finite(job.metric(metric)) for job, _ in ended)
    limit = {None if job.device is None else job.device.memory_gb for job, _ in ended}
    known = limit.pop() if len(limit) == 1 else None
    return [
        Bars(title=metric or "Loss", unit=name, labels=labels, parts={name: loss}, from_zero=False),
        Bars(
            title="Time of a step",
            unit=unit,
            labels=labels,
            parts={"step": tuple(None if each is None else each * factor for each in seconds)},
            totals=tuple("-" if each is None else show_seconds(each) for each in seconds),
        ),
        Bars(
            title="Memory of the fullest rank",
            unit="GB",
            labels=labels,
            parts={"memory": tuple(report["memory_bytes"] / 1e9 for _, report in ended)},
            totals=tuple(show_bytes(report["memory_bytes"]) for _, report in ended),
            limit=known,
            limit_name="" if known is None else f"a device: {known:g} GB",
        ),
    ]


def sweep_curves(jobs: Sequence[JobReport], price: float | None) -> Iterator[Curves]:
    """Cost against time, both against each override that is a number and differs, and cost against the price."""
    ended = [(job, job.report) for job in jobs if job.report is not None]
    prices = [job.price(price) for job, _ in ended]
    rates = [each for each in prices if each is not None]
    priced = len(rates) == len(ended)
    rates = rates if priced else [1.0] * len(ended)
    hours = [report["seconds"] / 3600 for _, report in ended]
    costs = [job.device_hours * rate for (job, _), rate in zip(ended, rates, strict=True)]
    names = [f"job {job.name}: {report['layout']['said']}" for job, report in ended]
    unit = "$" if priced else "device-hours"
    short = [job.name for job, _ in ended]
    points = {"jobs": tuple(map(Point, hours, costs, short))}
    yield Curves(title="Cost and time of each job", x="hours", y=unit, curves=points, joined=False)
    for key, values in _numbers(ended).items():
        for what, y, measured in (("Cost", unit, costs), ("Time", "hours", hours)):
            found = sorted((values[at], measured[at], short[at]) for at in values)
            curve = {"jobs": tuple(Point(*each) for each in found)}
            yield Curves(title=f"{what} against {key}", x=key, y=y, curves=curve, joined=False)
    if priced:
        yield Curves(
            title="Cost against the price of a device",
            x="$ for an hour of a device",
            y="$",
            curves={
                name: tuple(Point(rate * times, job.device_hours * rate * times) for times in TIMES)
                for name, (job, _), rate in zip(names, ended, rates, strict=True)
            },
        )


def _numbers(ended: Sequence[tuple[JobReport, dict[str, Any]]]) -> dict[str, dict[int, float]]:
    """Key of an override -> its number in each job, by the job's place, where at least two differ."""
    found: dict[str, dict[int, float]] = {}
    for at, (job, _) in enumerate(ended):
        for override in job.overrides:
            key, _, text = override.partition("=")
            number = _finite(float(text)) if _NUMBER.fullmatch(text) else None
            if number is not None:
                found.setdefault(key, {})[at] = number
    return {key: values for key, values in found.items() if len(set(values.values())) > 1}


def sweep_page(jobs: Sequence[JobReport], metric: str | None, price: float | None, file: Path) -> Path:
    failed, others = tuple(_failures(jobs)), tuple(_other_batches(jobs))
    words = [Words(title="Jobs that did not finish", lines=failed)] if failed else []
    words += [Words(title="Batches", lines=others)] if others else []
    parts: list[Part] = [_table(jobs, metric, price), *words, *sweep_pictures(jobs, metric), *sweep_curves(jobs, price)]
    return save_page(file, f"Comparison of {len(jobs)} jobs", parts)


def _read(home: Place, name: str) -> JobReport:
    overrides_file = home / ".hydra" / OVERRIDES
    try:
        overrides = read_plain(overrides_file, "the file of overrides") if overrides_file.exists() else ()
    except PlannerError as error:  # one job does not refuse the others
        overrides = str(error)
    if not isinstance(overrides, list | tuple):
        return JobReport(name=name, overrides=(), report=None, reason=f"no list of overrides: {overrides}")
    report, reason = _report(home)
    return JobReport(name=name, overrides=tuple(map(str, overrides)), report=report, reason=reason)


def _report(home: Place) -> tuple[dict[str, Any] | None, str]:
    """The record of `fit` in `home`, or the reason why there is none."""
    for file in (FILE, FAILED):
        if not (home / file).exists():
            continue
        try:
            found = json.loads((home / file).read_text())
        except (OSError, ValueError, RecursionError) as error:
            return None, f"{file} cannot be read ({type(error).__name__})"
        if file == FILE:
            return (found, "") if _is_report(found) else (None, f"{FILE} is not a file of Strategy3D")
        known = isinstance(found, dict)
        return None, str(found.get("reason", "")) if known else f"{FAILED} is not a file of Strategy3D"
    return None, "no reason on record: it failed outside of `fit`, or was killed"


def _is_report(found: Any) -> bool:
    """Return True if `found` has all that the table shows, as `measured.write` writes it."""
    try:
        layout, metrics, step = found["layout"], found["metrics"], found["step_seconds"]
        sizes = [found[key] for key in ("steps", "step_samples") if found.get(key) is not None]
        sizes += [found["devices"], found["seconds"], found["memory_bytes"], *([] if step is None else [step])]
        sizes += [*_sizes(layout).values(), layout["zero_stage"]]
        numbers, texts = [*metrics.values()], [layout["said"], found["device"]]
    except (TypeError, KeyError, AttributeError):
        return False
    return (
        all(isinstance(size, int | float) and 0 <= size <= MOST for size in sizes)
        and all(isinstance(number, float) or (isinstance(number, int) and abs(number) <= MOST) for number in numbers)
        and all(isinstance(text, str) for text in texts)
    )


def _like_a_loss(metrics: dict[str, float]) -> list[str]:
    """Names that end in loss: the validation's before the training's before others."""
    names = [name for name in metrics if name.removesuffix("_epoch").removesuffix("_step").endswith("loss")]
    return sorted(names, key=lambda name: (not name.startswith("val"), name.endswith("_step"), name))


def _cells(job: JobReport, metric: str | None, price: float | None) -> tuple[TableCell, ...]:
    report = job.report
    if report is None:
        return (TableCell(job.name), TableCell("did not finish"), *[TableCell("-")] * (len(HEADER) - 2))
    dollars = job.price(price)
    return (
        TableCell(job.name),
        TableCell(report["layout"]["said"]),
        _number_cell(report["devices"], str),
        _number_cell(job.metric(metric), "{:.6g}".format),
        _number_cell(report["step_seconds"], show_seconds),
        _number_cell(job.number("step_samples"), "{:,.0f}".format),
        _number_cell(job.number("steps"), "{:,.0f}".format),
        _number_cell(job.rate, "{:,.4g}".format),
        _number_cell(report["memory_bytes"], show_bytes),
        _number_cell(job.device_hours, show_hours),
        _number_cell(None if dollars is None else dollars * job.device_hours, show_dollars),
    )


def _number_cell(number: float | None, show: Callable[[float], str]) -> TableCell:
    """A number, which also sorts its row where it is finite."""
    key = _finite(number)
    return TableCell("-" if number is None else show(number), None if key is None else float(key))


def _finite(number: float | None) -> float | None:
    """`number`, None where it is no finite one."""
    return number if number is not None and isfinite(number) else None


def _short(report: dict[str, Any]) -> str:
    shown = [f"{axis[0]}{size}" for axis, size in _sizes(report["layout"]).items() if axis in ALWAYS or size > 1]
    return f"{' '.join(shown)} z{report['layout']['zero_stage']}"


def _sizes(layout: dict[str, Any]) -> dict[str, Any]:
    """The size of each axis, data first. Reports of older versions have those of `ALWAYS` alone."""
    first = dict.fromkeys((DATA_AXIS, *reversed(AXES), EXPERT_AXIS))
    return {axis: layout[f"{axis}_size"] if axis in ALWAYS else layout.get(f"{axis}_size", 1) for axis in first}
