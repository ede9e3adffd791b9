"""Published trainings, priced in their layouts. `python -m tests.planner.published` prints the table of the docs."""

from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import yaml

from lightning_3d.layout import Layout
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.job import Job, Options
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.priced_layout import Plan, price_layout
from lightning_3d.tools.planner.transformer import Transformer

DATA = yaml.safe_load((Path(__file__).parent / "published_runs.yaml").read_text())
SOURCES, SHAPES, RUNS = DATA["sources"], DATA["shapes"], DATA["runs"]
CATALOGUE = Catalogue.load()
PRECISION = "bf16-true"
"""These frameworks pass 16-bit numbers between blocks and over links."""


@dataclass(frozen=True)
class Compared:
    """A published number, and that of the plan. A ratio above 1 is a plan that is too fast."""

    run: dict
    plan: Plan
    measured: float
    planned: float

    @property
    def ratio(self):
        faster = self.planned / self.measured
        return 1 / faster if "seconds" in self.run else faster


def priced(run):
    name = run["model"]
    shape = Transformer(name=name, **SHAPES[name]) if name in SHAPES else named_model(name)
    if "sequence" in run:
        shape = shape.with_sequence(run["sequence"])
    own = {"attention_share": None} if run.get("kernels") == "fused" else {}  # as --kernels fused
    cluster = CATALOGUE.cluster(run["cluster"], **{**own, **run.get("set", {})})
    tensor, pipeline, chunks = (run.get(name, 1) for name in ("tensor", "pipeline", "chunks"))
    context, recompute = run.get("context", 1), run.get("recompute", "none")
    partly = isinstance(recompute, float)
    layout = Layout(
        data_parallel_size=cluster.devices // tensor // pipeline,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        zero_stage=run.get("zero", 0),
        zero_shard_size=run.get("shard"),
        schedule=run.get("schedule", "interleaved_1f1b" if chunks > 1 else "1f1b"),
        stages_per_rank=chunks,
        sequence_parallel=run.get("sequence_parallel", False),
        recompute="full" if partly else recompute,
    )
    options = Options(
        fp8=run.get("fp8", False),
        context=context,
        experts=run.get("experts", 1),
        offload=run.get("offload"),
        recomputed=recompute if partly else 1.0,
    )
    kinds = {"attention": run.get("attention", "flash"), "kernels": run.get("kernels", "eager"), "fp8": options.fp8}
    profile = shape.profile(precision=PRECISION, **kinds).sliced(context)
    batch = run["batch"] * context
    job = Job(profile=profile, samples=batch, batch=batch, precision=PRECISION, options=options)
    return price_layout(job, cluster, layout, micro=run["micro"])


def compared(run):
    plan = priced(run)
    peak = plan.cluster.accelerator.peak(PRECISION) / 1e12
    planned = {
        "tokens": plan.tokens_per_second / plan.cluster.devices,
        "tflops": plan.hfu * peak,
        "seconds": plan.time.total,
        "mfu": 100 * plan.mfu,
    }
    unit = next(unit for unit in planned if unit in run)
    return Compared(run, plan, run[unit], planned[unit])


def mean(ratios):
    return exp(sum(map(log, ratios)) / len(ratios))


def family(run):
    if "tpu" in run["cluster"] or "trainium" in run["cluster"]:
        return "TPU" if "tpu" in run["cluster"] else "Trainium"
    if run["model"].startswith(("mixtral", "qwen3", "deepseek")):
        return "experts"
    return "long" if run.get("sequence", 0) > LONG else "fp8" if run.get("fp8") else "dense"


FAMILIES = ("dense", "fp8", "long", "experts", "TPU", "Trainium")
LONG = 16384
"""Tokens of a sample above which attention is most of the work."""


def families(found):
    lines = ["| rows | number | mean | from | to | said not to fit |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(name for name in FAMILIES for one in found if family(one.run) == name):
        own = [one for one in found if family(one.run) == name]
        ratios = [one.ratio for one in own]
        cells = (name, str(len(own)), f"{mean(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}")
        lines.append(f"| {' | '.join(cells)} | {sum(not one.plan.fits for one in own)} |")
    return "\n".join(lines)


UNITS = {"tokens": "tokens/s", "tflops": "TFLOP/s", "seconds": "s a step", "mfu": "% MFU"}


def table(found):
    lines = [
        "| training | layout | measured | planned | planned / measured | a rank of | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        unit = next(text for unit, text in UNITS.items() if unit in one.run)
        layout, plan = one.plan.layout, one.plan
        sizes = f"d{layout.data_parallel_size} t{layout.tensor_parallel_size} p{layout.pipeline_parallel_size}"
        extra = [f"c{plan.job.options.context}"] * (plan.job.options.context > 1)
        extra += [f"e{plan.job.options.experts}"] * (plan.job.options.experts > 1)
        cells = (
            one.run["name"],
            " ".join([sizes, *extra, f"ZeRO {layout.zero_stage}"]),
            f"{one.measured:,.4g} {unit}" if one.measured < 1000 else f"{one.measured:,.0f} {unit}",
            f"{one.planned:,.3g}" if one.planned < 1000 else f"{one.planned:,.0f}",
            f"{one.ratio:.2f}",
            f"{one.plan.peak.total / 1e9:.0f} of {one.plan.cluster.accelerator.memory_gb:g} GB"
            + ", too much" * (not one.plan.fits),
            ("fitted" if one.run.get("fit") else "known" if one.run.get("known") else "held back")
            + ", new" * ("collected" in one.run),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sources():
    return "\n".join(f"- {source['title']} ({source['date']}): {source['note']}." for source in SOURCES.values())


if __name__ == "__main__":
    rows = [compared(run) for run in RUNS]
    print(families(rows), table(rows), sources(), sep="\n\n")
