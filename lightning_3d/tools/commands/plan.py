"""Devices, layout, time and cost of a training, before anything runs."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from lightning_3d.errors import PlannerError, printable
from lightning_3d.module.amounts import parse_count, real
from lightning_3d.tools.planner.answers import Answer, answer, deadline_of, refuse_ignored
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.plain_yaml import read_plain
from lightning_3d.tools.planner.plan_report import folded, strategy_line
from lightning_3d.tools.planner.priced_layout import Plan

EXAMPLE = """\
examples:
  lightning-3d plan llama-7b --tokens 300B --cluster 16x8xh100
  lightning-3d plan llama-70b --tokens 1T --accelerator h100 --gpus-for "30 days"
  lightning-3d plan 13b --tokens 260B --accelerator a100-80g --max-cost 500000
  lightning-3d plan 7b --tokens 140B --cluster 8x8xa100-80g --compare a100-80g,h100,tpu-v4
  lightning-3d plan 7b --tokens 140B --compare 8xh100,16xh100
  lightning-3d plan --cluster 8xa100-80g --price 3 --for "100 hours"
  lightning-3d plan path/to/config.json --tokens 50B --cluster 8xa100-80g --sequence 4096 --batch 256
  lightning-3d plan my_package.model.LitGPT --arg n_layer=24 --inputs 8x1024:int64 --tokens 10B --cluster 8xh100
  lightning-3d plan gpt3-175b --tokens 300B --cluster 1024xa100-80g --sustained 140 --recompute full
  lightning-3d plan llama-7b --tokens 300B --accelerator h100 --gpus-for "30 days" --html plan.html
"""
FLAGS: dict[str, dict[str, dict[str, Any]]] = read_plain(Path(__file__).with_name("plan_flags.yaml"), "table of flags")


def configure(parser: ArgumentParser) -> None:
    question_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=int, default=5, metavar="N", help="layouts to show (default 5)")
    group.add_argument("--json", action="store_true", help="print data for programs")
    group.add_argument("--plot", metavar="FOLDER", help="draw memory, pipeline timetable and cost as PNG into FOLDER")
    group.add_argument("--html", metavar="FILE", help="the same on a page, with other batches, sequences and prices")


def question_flags(parser: ArgumentParser) -> None:
    """Add the flags that say what is trained, on what, and how much of the layout is given."""
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for names, given in flags.items():
            known: dict[str, Any] = {}
            if "type" in given:
                known["type"] = _TYPES[given["type"]]
            if "choices" in given:
                known["choices"] = [value for kind in given["choices"].split() for value in _values(kind)]
            group.add_argument(*names.split(), **{**given, **known})


def _values(kind: str) -> tuple[Any, ...]:
    """The values of a Literal of this package, given as `module:name`."""
    module, _, name = kind.partition(":")
    return get_args(getattr(import_module(f"lightning_3d.{module}"), name))


def run(args: Namespace) -> int:
    if args.top < 1:
        raise PlannerError(f"--top {args.top} shows nothing: give at least 1.")
    refuse_ignored(args)
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # a module of the user's may print
        result = answer(args)
    plans = [_plan_data(plan) for plan in result.plans]
    data = {"job": _job_data(result.plans[0].job), "plans": plans, "notes": list(result.notes)}
    print(json.dumps(data, indent=2, allow_nan=False) if args.json else folded(printable(result.text)))
    for path in _pictures(args, result):
        if not args.json:
            print(printable(f"wrote {path}"))
    return 0


def _pictures(args: Namespace, result: Answer) -> Iterator[Path]:
    """Draw what `args` ask for. Name each file that is written."""
    if args.plot is None and args.html is None:
        return
    from lightning_3d.tools.pictures.plan_pictures import plan_page, plan_pictures

    pictures = plan_pictures(result.plans, deadline_of(args), args.max_cost)
    if args.plot is not None:
        from lightning_3d.tools.pictures.drawing import save_png

        for name, picture in pictures.items():
            yield save_png(Path(args.plot) / f"{name}.png", [picture])
    if args.html is not None:
        yield plan_page(args, result, [*pictures.values()], Path(args.html))


def _plan_data(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: bytes, seconds, dollars. Lists have the first and the last pipeline rank."""
    return {
        "layout": asdict(plan.layout),
        "options": asdict(plan.job.options),
        "not_run_by_this_package": list(plan.job.options.not_run),
        "cluster": {
            "name": str(plan.cluster),
            "accelerator": plan.cluster.accelerator.name,
            "nodes": plan.cluster.nodes,
            "devices": plan.cluster.devices,
        },
        "microbatch_samples": plan.micro,
        "microbatches": plan.microbatches,
        "strategy": strategy_line(plan),
        "state_bytes": [asdict(plan.states(stage)) for stage in plan.layout.ends],
        "sent_bytes": [plan.sent(stage) for stage in plan.layout.ends],
        "memory_bytes": [{**asdict(memory), "total": memory.total} for memory in plan.memory],
        "device_memory_bytes": plan.cluster.accelerator.memory_gb * 1e9,
        "fits": plan.fits,
        "step_seconds": {**asdict(plan.time), "total": plan.time.total},
        "limited_by": plan.time.limit,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "steps": plan.job.steps,
        "tokens_per_second": plan.tokens_per_second,
        "days": plan.seconds / 86400,
        "device_hours": plan.device_hours,
        "dollars": plan.dollars,
        "kwh": plan.kwh,
    }


def _job_data(job: Job) -> dict[str, Any]:
    return {
        "model": job.profile.name,
        "parameters": job.profile.parameters,
        "active_parameters": job.profile.active,
        "layers": job.profile.layers,
        "tokens_per_sample": job.profile.tokens,
        "samples": job.samples,
        "batch": job.batch,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "model_flops_per_step": job.profile.model_flops(job.batch),
    }


def _dollars(text: str | float) -> float:
    if isinstance(text, float):  # jsonargparse reads what was read once more
        return text
    try:
        return parse_count(text.strip().removeprefix("$"), "budget")
    except PlannerError as error:
        raise ArgumentTypeError(str(error)) from None  # argparse names the flag, and ends with the one line


_TYPES = {"int": int, "number": real, "dollars": _dollars}
