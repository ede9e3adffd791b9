"""The jobs of a Hydra sweep side by side: layout, loss, seconds of a step, memory, cost."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_3d.errors import ConfigurationError
from lightning_3d.measured import FILE
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.here import catalogue_name
from lightning_3d.planner.report import table
from lightning_3d.planner.units import show_bytes, show_dollars, show_hours, show_seconds

EXAMPLE = """\
examples:
  lightning-3d compare multirun/2026-01-31/12-00-00
  lightning-3d compare multirun/2026-01-31/12-00-00 --metric val_loss --price 2.5 --plot comparison.png
"""
OVERRIDES = "overrides.yaml"
"""What Hydra writes into `.hydra` of each job that it starts."""
HEADER = ("job", "layout", "devices", "loss", "step", "memory", "device-hours", "cost")


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """One job of a sweep; without `report` it did not come to the end of training."""

    name: str
    overrides: tuple[str, ...]
    report: dict[str, Any] | None

    def metric(self, wanted: str | None) -> float | None:
        """The value of `wanted`, else of what was logged as a loss."""
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
    parser.add_argument("--metric", metavar="NAME", help="what was logged as NAME (default: the loss)")
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of a device-hour (default: the catalogue's)")
    parser.add_argument("--plot", metavar="FILE", help='also draw a picture (pip install "lightning-3d[plots]")')


def run(args: Namespace) -> int:
    """Print a line for each job, those that failed too."""
    jobs = read_jobs(Path(args.folder))
    print(compared(jobs, metric=args.metric, price=args.price))
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
        raise ConfigurationError(f"{folder} holds no job of a Hydra sweep (no .hydra/{OVERRIDES} below it).")
    jobs = [_read(home, folder) for home in sorted(homes, key=_in_order)]
    if all(job.report is None for job in jobs):
        raise ConfigurationError(
            f"none of the {len(jobs)} jobs in {folder} left a {FILE}: Strategy3D writes it when `fit` ends."
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
    return table(header, rows)


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
    overrides = OmegaConf.to_container(OmegaConf.load(said)) if said.exists() else ()
    report = json.loads((home / FILE).read_text()) if (home / FILE).exists() else None
    return JobReport(name=str(home.relative_to(folder)), overrides=tuple(map(str, overrides or ())), report=report)


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
    sizes = [layout[f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline")]
    return f"d{sizes[0]} t{sizes[1]} p{sizes[2]} z{layout['zero_stage']}"
