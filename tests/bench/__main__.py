"""Speed and memory of `Strategy3D` and its peers: `python -m tests.bench [--only NAME ...] [--rounds N]`.

All contestants train the same module on the same global batches. They take turns of a few steps, in another order in
each round, and only ratios within a round count. A peer that is not installed, and one that fails, is a line.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.contestants import ALL, CONTESTANTS
from tests.bench.modules import Task
from tests.bench.turns import Job, race

PACKAGES = ("torch", "lightning", "lightning-3d", "transformers", "deepspeed", "accelerate", "timm", "diffusers")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def row(job: Job, jobs: dict[str, Job], steps: int) -> dict[str, Any]:
    """What one contestant measured, and its ratios to others."""
    if job.error or not job.turns:
        return {"name": job.name, "ranks": job.world, "error": job.error or "no full round"}
    middle, low, high = (1e3 * value / steps for value in quartiles(job.turns))
    ratios = {}
    for base, limit in CONTESTANTS[job.name].limits:
        if base in jobs and not jobs[base].error:
            pairs = zip(job.turns, jobs[base].turns, strict=True)
            ratio, least, most = quartiles([mine / theirs for mine, theirs in pairs])
            cpu = statistics.median(mine / theirs for mine, theirs in zip(job.cpus, jobs[base].cpus, strict=True))
            memory = job.found["peak"] / jobs[base].found["peak"]
            ratios[base] = {"ratio": ratio, "low": least, "high": most, "limit": limit, "cpu": cpu, "memory": memory}
    return {
        "name": job.name, "ranks": job.world, "ms": middle, "low": low, "high": high,
        "host_ms": 1e3 * statistics.median(job.hosts), "cpu_ms": 1e3 * statistics.median(job.cpus),
        "peak_MB": job.found["peak"] / 1e6, "start_peak_MB": job.found["start_peak"] / 1e6,
        "sent_MB": job.found["sent"] / 1e6, "first_step_s": job.found["started"],
        "first_step_cpu_s": job.found["started_cpu"], "loss": job.loss, "ratios": ratios,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | ranks | step ms (quartiles) | CPU ms | host ms | peak MB | start MB | sent MB | first step s | its CPU s | loss | ratio |"
    ]
    lines.append("|---|" + "---:|" * 10 + "---|")
    for found in rows:
        if "error" in found:
            lines.append(f"| {found['name']} | {found['ranks']} | {found['error']} |" + " |" * 9)
            continue
        ratios = "; ".join(
            f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f}) of {base}, target {r['limit']}, CPU {r['cpu']:.2f}, memory {r['memory']:.2f}"
            for base, r in found["ratios"].items()
        )
        lines.append(
            f"| {found['name']} | {found['ranks']} | {found['ms']:.0f} ({found['low']:.0f}-{found['high']:.0f}) "
            f"| {found['cpu_ms']:.0f} | {found['host_ms']:.0f} | {found['peak_MB']:.0f} | {found['start_peak_MB']:.0f} "
            f"| {found['sent_MB']:.1f} | {found['first_step_s']:.1f} | {found['first_step_cpu_s']:.1f} | {found['loss']:.4f} | {ratios} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of the median step with quartiles, and of the peak of memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [found for found in reversed(rows) if "error" not in found]
    names = [found["name"] for found in rows]
    colors = ["tab:blue" if name.startswith("3D") else "tab:gray" for name in names]
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(11, 1.2 + 0.32 * len(rows)), layout="tight")
    spread = [[f["ms"] - f["low"] for f in rows], [f["high"] - f["ms"] for f in rows]]
    left.barh(names, [found["ms"] for found in rows], xerr=spread, color=colors)
    left.set(xlabel="median step in ms, with quartiles", title=title)
    right.barh(names, [found["peak_MB"] for found in rows], color=colors)
    right.set(xlabel="peak memory of a rank in a step, MB", title="blue: Strategy3D")
    figure.savefig(path, dpi=110)


def machine() -> dict[str, Any]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(_module(name))}
    count = torch.cuda.device_count()
    device = f"{count} x {torch.cuda.get_device_name()}" if count else f"{platform.machine()}, {_cores()} cores"
    return {"device": device, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), **found}


def _module(name: str) -> str:
    return name.replace("-", "_")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def compiled_extensions(folder: Path) -> None:
    """Let peers compile their operations into a folder of the bench, where a compilation that was killed is begun again.

    torch waits without end for the lock that such a one leaves.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    for lock in folder.glob("**/lock"):
        lock.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a contestant counts as stuck")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the table, JSON and plot")
    default = Task()
    parser.add_argument("--kind", choices=ALL, default=default.kind)
    for name in ("width", "blocks", "rows", "length"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    asked = parser.parse_args()
    task = Task(asked.kind, asked.width, asked.blocks, asked.rows, asked.length)
    jobs: dict[str, Job] = {}
    for name in asked.only:
        contestant = CONTESTANTS[name]
        if asked.kind not in contestant.kinds:
            continue
        jobs[name] = job = Job(name, partial(contestant.train, task), contestant.world)
        if contestant.needs and importlib.util.find_spec(contestant.needs) is None:
            job.error = f"{contestant.needs} is not installed"
        elif torch.cuda.is_available() and torch.cuda.device_count() < contestant.world:
            job.error = f"{contestant.world} devices are needed, {torch.cuda.device_count()} are here"
    ready = [job for job in jobs.values() if not job.error]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    compiled_extensions(asked.out.resolve() / "extensions")
    race(ready, asked.steps, asked.rounds, asked.limit, lambda text: print(text, flush=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would lose what the full rounds measured
    rows = [row(job, jobs, asked.steps) for job in jobs.values()]
    title = f"{task.kind}, width {task.width}, {task.blocks} blocks, {task.rows} x {task.length}"
    report = {"task": title, "machine": machine(), "rounds": asked.rounds, "steps": asked.steps, "rows": rows}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / f"{task.kind}.json").write_text(json.dumps(report, indent=1))
    (asked.out / f"{task.kind}.md").write_text(table(rows) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(rows, asked.out / f"{task.kind}.png", title)
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(f"{title}; {asked.rounds} rounds of {asked.steps} steps\n{table(rows)}")


if __name__ == "__main__":
    main()
