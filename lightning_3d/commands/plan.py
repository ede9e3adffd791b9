"""Devices, layout, time and cost of a training, before anything runs."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import redirect_stdout
from typing import get_args

from lightning_3d.commands.printable import printable
from lightning_3d.errors import PlannerError
from lightning_3d.layout import Offload, Recompute, Schedule
from lightning_3d.planner.answers import Answer, answer
from lightning_3d.planner.plan_report import job_data, plan_data
from lightning_3d.planner.question import catalogue_of, refuse_ignored, serving_of
from lightning_3d.planner.show import parse_dollars, real
from lightning_3d.planner.states import Optimizer, Precision
from lightning_3d.planner.transformer import Attention

EXAMPLE = """\
examples:
  lightning-3d plan llama-7b --tokens 300B --cluster 16x8xh100
  lightning-3d plan llama-70b --tokens 1T --accelerator h100 --gpus-for "30 days"
  lightning-3d plan 13b --tokens 260B --accelerator a100-80g --max-cost 500000
  lightning-3d plan 7b --tokens 140B --cluster 8x8xa100-80g --compare a100-80g,h100,tpu-v4
  lightning-3d plan path/to/config.json --tokens 50B --cluster 8xa100-80g --sequence 4096 --batch 256
  lightning-3d plan my_package.model.LitGPT --arg n_layer=24 --inputs 8x1024:int64 --tokens 10B --cluster 8xh100
  lightning-3d plan gpt3-175b --tokens 300B --cluster 1024xa100-80g --sustained 140 --recompute full
  lightning-3d plan llama3-70b --serve --accelerator h100 --users 1000 --context 4096 --rate 20
"""


def configure(parser: ArgumentParser) -> None:
    """Add the flags of `lightning-3d plan`."""
    _model_flags(parser)
    _data_flags(parser)
    _hardware_flags(parser)
    _layout_flags(parser)
    _serving_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=int, default=5, metavar="N", help="layouts to show (default 5)")
    group.add_argument("--json", action="store_true", help="print data for programs")
    group.add_argument("--plot", metavar="FOLDER", help="draw memory, pipeline timetable and cost as PNG into FOLDER")


def run(args: Namespace) -> int:
    """Answer the question and print the answer."""
    if args.top < 1:
        raise PlannerError(f"--top {args.top} shows nothing: give at least 1.")
    refuse_ignored(args)
    if args.serve:
        found = serving_of(args, catalogue_of(args))
        print(printable("\n".join(found.lines())))
        return 0
    with redirect_stdout(sys.stderr if args.json else sys.stdout):  # a module of the user's may print
        result = answer(args)
    print(json.dumps(_data(result), indent=2, allow_nan=False) if args.json else printable(result.text))
    if args.plot is not None:
        from lightning_3d.planner.plots import draw

        for path in draw(result.plans, args.plot):
            if not args.json:
                print(f"wrote {path}")
    return 0


def _data(result: Answer) -> dict[str, object]:
    return {
        "job": job_data(result.plans[0].job),
        "plans": [plan_data(plan) for plan in result.plans],
        "notes": list(result.notes),
    }


def _dollars(text: str | float) -> float:
    if isinstance(text, float):  # jsonargparse reads what was read once more
        return text
    try:
        return parse_dollars(text, "budget")
    except PlannerError as error:
        raise ArgumentTypeError(str(error)) from None  # argparse names the flag, and ends with the one line


def _model_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument("model", nargs="?", help="a name, a size (7b), a Hugging Face config.json, or module.Class")
    group.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="argument of module.Class")
    group.add_argument("--inputs", metavar="SHAPE:DTYPE", help="one batch of module.Class, as in 8x128:int64")
    for flags, what in _SIZES.items():
        group.add_argument(*flags.split(), type=int, metavar="N", help=what)
    group.add_argument(
        "--attention",
        choices=get_args(Attention),
        help="eager saves the scores for backward (default: flash, which does not)",
    )


def _serving_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--serve", action="store_true", help="devices that answer users, in place of a training")
    group.add_argument("--users", type=int, default=1, metavar="N", help="users at one time (default 1)")
    group.add_argument("--context", type=int, metavar="N", help="tokens of each user (default: those of a sample)")
    group.add_argument("--rate", type=real, default=10.0, metavar="N", help="tokens per second of a user (default 10)")


_SIZES = {
    "--layers": "blocks of a GPT of your own",
    "--hidden": "its width",
    "--heads": "its attention heads",
    "--vocabulary --vocab": "size of its vocabulary",
    "--sequence --seq": "tokens in a sample",
}


def _data_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the training")
    group.add_argument("--tokens", help="tokens of the training, as in 300B (default: 20 for each parameter)")
    group.add_argument("--samples", help="samples of the training, in place of --tokens")
    group.add_argument("--epochs", type=real, help="passes over --tokens or --samples (default 1)")
    group.add_argument("--batch", type=int, metavar="N", help="samples per optimizer step, all devices together")
    group.add_argument("--precision", choices=get_args(Precision), default="bf16-mixed")
    group.add_argument("--optimizer", choices=get_args(Optimizer), default="adam")


def _hardware_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the hardware: a cluster, or an accelerator with a deadline or a budget")
    group.add_argument("--cluster", metavar="NODESxDEVICESxNAME", help="128x8xh100, 8xa100-80g, h100")
    group.add_argument("--accelerator", metavar="NAME", help="device to count for --gpus-for and --max-cost")
    group.add_argument(
        "--gpus-for", metavar="TIME", help='fewest devices (above one node: complete nodes) for "30 days"'
    )
    group.add_argument("--max-cost", type=_dollars, metavar="DOLLARS", help="fastest plan within a budget: 50000, 50k")
    group.add_argument("--compare", metavar="NAME,NAME", help="several accelerators, the cheapest first")
    group.add_argument("--price", type=real, metavar="DOLLARS", help="per device and hour, in place of the list price")
    group.add_argument(
        "--sustained", type=real, metavar="TFLOPS", help="known rate per device, in place of the estimate"
    )
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any catalogue number"
    )
    group.add_argument("--hardware", action="append", default=[], metavar="FILE", help="catalogue YAML of your own")


def _layout_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("fix a part of the layout (the rest is searched)")
    group.add_argument("--tensor", type=int, metavar="N", help="tensor ranks")
    group.add_argument("--pipeline", type=int, metavar="N", help="pipeline ranks")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    group.add_argument("--schedule", choices=get_args(Schedule), help="order of passes in the pipeline")
    group.add_argument("--stages-per-rank", type=int, metavar="N", help="virtual stages of a rank")
    group.add_argument("--micro", type=int, metavar="N", help="samples in a microbatch")
    group.add_argument("--recompute", choices=get_args(Recompute), help="activations that backward computes again")
    group.add_argument("--offload", choices=get_args(Offload), help="states in host memory")
    group.add_argument("--sequence-parallel", action="store_true", default=None, help="also along the sequence")
    group.add_argument("--no-sequence-parallel", action="store_false", dest="sequence_parallel", default=None)
