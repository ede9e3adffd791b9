"""Compare the jobs of a Hydra sweep: layout, loss, seconds per step, memory, cost."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from lightning_3d.commands.printable import printable
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.local_cluster import catalogue_name
from lightning_3d.planner.plain_yaml import read_plain
from lightning_3d.planner.plan_report import table
from lightning_3d.planner.show import real, show_bytes, show_dollars, show_hours, show_seconds
from lightning_3d.strategy.meter import FAILED, FILE

EXAMPLE = """\
examples:
  lightning-3d compare multirun/2026-01-31/12-00-00
  lightning-3d compare multirun/2026-01-31/12-00-00 --metric val_loss --price 2.5 --plot comparison.png
"""
OVERRIDES = "overrides.yaml"
"""File that Hydra writes into `.hydra` of each job."""
REASON = 300
"""Characters shown of the reason why a job failed."""
AXES = ("data", "tensor", "pipeline")
HEADER = ("job", "layout", "devices", "loss", "step", "memory", "device-hours", "cost")


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """One job of a sweep. `report` is None if it did not finish training."""

    name: str
    overrides: tuple[str, ...]
    report: dict[str, Any] | None
    reason: str = ""
    """Why there is no report."""

    def metric(self, wanted: str | None) -> float | None:
        """The value of `wanted`; without a name, that of the logged loss."""
        metrics: dict[str, float] = (self.report or {}).get("metrics", {})
        if wanted is not None:
            return metrics.get(wanted)
        return next((metrics[name] for name in _like_a_loss(metrics)), None)

    @property
    def device_hours(self) -> float:
        return self.report["seconds"] * self.report["devices"] / 3600 if self.report else 0.0


def configure(parser: ArgumentParser) -> None:
    """Add the flags of `lightning-3d compare`."""
    parser.add_argument("folder", help="directory of a sweep, such as multirun/2026-01-31/12-00-00")
    parser.add_argument("--metric", metavar="NAME", help="logged value to show (default: the loss)")
    parser.add_argument("--price", type=real, metavar="DOLLARS", help="price of a device-hour (default: catalogue)")
    parser.add_argument("--plot", metavar="FILE", help='also draw a picture (pip install "lightning-3d[plots]")')


def run(args: Namespace) -> int:
    """Print a line for each job, also for those that failed."""
    jobs = read_jobs(Path(args.folder))
    print(compared(jobs, metric=args.metric, price=args.price))
    for line in _failures(jobs):
        print(printable(line))
    if args.plot:
        draw(jobs, args.metric, Path(args.plot))
        print(f"drawn to {args.plot}")
    return 0


def read_jobs(folder: Path) -> list[JobReport]:
    """The jobs in `folder`, in the order they were numbered."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no directory: give that of a sweep, such as multirun/DATE/TIME.")
    started = {path.parents[1] for path in folder.rglob(f".hydra/{OVERRIDES}")}
    homes = started | {path.parent for path in folder.rglob(FILE)}
    if not homes:
        raise ConfigurationError(f"{folder} has no job of a Hydra sweep (no .hydra/{OVERRIDES} below it).")
    jobs = [_read(home, folder) for home in sorted(homes, key=_in_order)]
    if all(job.report is None for job in jobs):
        raise ConfigurationError(
            f"none of the {len(jobs)} jobs in {folder} left a {FILE}: Strategy3D writes it when `fit` ends."
            f" {next(_failures(jobs))}"
        )
    return jobs


def compared(jobs: Sequence[JobReport], *, metric: str | None = None, price: float | None = None) -> str:
    """The table. Of overrides only those are shown in which the jobs differ."""
    if metric is not None and all(job.metric(metric) is None for job in jobs):
        known = sorted({name for job in jobs for name in (job.report or {}).get("metrics", {})})
        raise ConfigurationError(f"no job logged {metric!r}: there is {', '.join(known) or 'nothing'}.")
    common = set.intersection(*(set(job.overrides) for job in jobs))
    header = (*HEADER[:3], metric or "loss", *HEADER[4:], "overrides")
    rows = [(*_cells(job, metric, price), _differing(job, common)) for job in jobs]
    return table(header, [[printable(cell) for cell in row] for row in rows])


def _failures(jobs: Sequence[JobReport]) -> Iterator[str]:
    for job in jobs:
        if job.report is None:
            yield f"job {job.name} did not finish: {shorten(job.reason, REASON, placeholder=' ...')}"


def draw(jobs: Sequence[JobReport], metric: str | None, file: Path) -> None:
    """Bars of loss, step time and memory for each job that ended."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError('--plot needs matplotlib: pip install "lightning-3d[plots]".') from None
    ended = [(job, job.report) for job in jobs if job.report is not None]
    labels = [f"{job.name}: {_short(report)}" for job, report in ended]
    panels = {
        metric or "loss": [job.metric(metric) or 0.0 for job, _ in ended],
        "seconds of a step": [report["step_seconds"] or 0.0 for _, report in ended],
        "GB on the fullest rank": [report["memory_bytes"] / 1e9 for _, report in ended],
    }
    figure = Figure(figsize=(11, 1.5 + 0.4 * len(ended)), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.barh(labels, values)
        axes.set_title(title, fontsize="medium")
    axes.invert_yaxis()
    figure.savefig(file, dpi=120)


def _read(home: Path, folder: Path) -> JobReport:
    said = home / ".hydra" / OVERRIDES
    overrides = read_plain(said, "the file of overrides") if said.exists() else ()
    if not isinstance(overrides, list | tuple):
        raise ConfigurationError(f"{said} is no list of overrides, as Hydra writes it.")
    name = str(home.relative_to(folder))
    report, reason = _report(home)
    return JobReport(name=name, overrides=tuple(map(str, overrides)), report=report, reason=reason)


def _report(home: Path) -> tuple[dict[str, Any] | None, str]:
    """The record of `fit` in `home`, or the reason why there is none."""
    for file in (FILE, FAILED):
        if not (home / file).exists():
            continue
        try:
            found = json.loads((home / file).read_text())
        except (OSError, ValueError, RecursionError) as error:
            return None, f"{file} cannot be read ({type(error).__name__})"
        if file == FILE:
            return (found, "") if _is_report(found) else (None, f"{FILE} is none of Strategy3D")
        return None, str(found.get("reason", "")) if isinstance(found, dict) else f"{FAILED} is none of Strategy3D"
    return None, "no reason on record: it failed outside of `fit`, or was killed"


def _is_report(found: Any) -> bool:
    """Return True if `found` has all that the table shows, as `measured.write` writes it."""
    try:
        layout, metrics, step = found["layout"], found["metrics"], found["step_seconds"]
        numbers = [found["devices"], found["seconds"], found["memory_bytes"], *metrics.values()]
        numbers += [layout[f"{axis}_parallel_size"] for axis in AXES] + ([] if step is None else [step])
        texts = [layout["said"], found["device"]]
    except (TypeError, KeyError, AttributeError):
        return False
    return all(isinstance(number, int | float) for number in numbers) and all(isinstance(text, str) for text in texts)


def _in_order(home: Path) -> tuple[int, str]:
    return (int(home.name) if home.name.isdigit() else 0, str(home))


def _like_a_loss(metrics: dict[str, float]) -> list[str]:
    """Names that end in loss: the validation's before the training's before others."""
    names = [name for name in metrics if name.removesuffix("_epoch").removesuffix("_step").endswith("loss")]
    return sorted(names, key=lambda name: (not name.startswith("val"), name.endswith("_step"), name))


def _cells(job: JobReport, metric: str | None, price: float | None) -> tuple[str, ...]:
    report = job.report
    if report is None:
        return (job.name, "did not finish", *["-"] * 6)
    loss, step = job.metric(metric), report["step_seconds"]
    dollars = price if price is not None else _price(report["device"])
    return (
        job.name,
        report["layout"]["said"],
        str(report["devices"]),
        "-" if loss is None else f"{loss:.6g}",
        "-" if step is None else show_seconds(step),
        show_bytes(report["memory_bytes"]),
        show_hours(job.device_hours),
        "-" if dollars is None else show_dollars(dollars * job.device_hours),
    )


def _price(device: str) -> float | None:
    """Of an hour of `device`, None where the catalogue does not know it."""
    name = catalogue_name(device)
    price = Catalogue.load().find(name).price if name else None
    return price.dollars_per_hour if price else None


def _differing(job: JobReport, common: set[str]) -> str:
    return " ".join(override for override in job.overrides if override not in common) or "-"


def _short(report: dict[str, Any]) -> str:
    layout = report["layout"]
    sizes = [layout[f"{axis}_parallel_size"] for axis in AXES]
    return f"d{sizes[0]} t{sizes[1]} p{sizes[2]} z{layout['zero_stage']}"
