"""Simulate your script on a cluster: memory of each stage, messages, FLOPs, and errors of the real job."""

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from pathlib import Path

from lightning_3d.errors import ConfigurationError
from lightning_3d.tools.dryrun.cluster import parse_cluster
from lightning_3d.tools.dryrun.simulation import dry_run_script

EXAMPLE = """\
examples:
  lightning-3d dry-run train.py --cluster 128x8xh100
  lightning-3d dry-run train.py --cluster 8xcpu --ranks 0,5
  lightning-3d dry-run train.py --cluster 1024 --args "--layers 80 --batch 2" --json

train.py is any script that calls trainer.fit with strategy=Strategy3D(...). It runs unchanged: its Trainer gets the
simulated cluster, its module is built without memory, and nothing is logged or saved.
The exit code is 1 if the job would fail (the report says why) and 2 if the question cannot be answered.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NODESxDEVICESxNAME",
        help="128x8xh100, 8xcpu, or a number of ranks (of H100s); up to 4096 ranks",
    )
    parser.add_argument("--args", default="", metavar="TEXT", help='arguments for the script: "--lr 1e-3"')
    parser.add_argument("--ranks", metavar="N,N", help="ranks to simulate, or all (default: a few of each axis)")
    parser.add_argument("--json", action="store_true", help="print data for programs")


def run(args: Namespace) -> int:
    """Print the report; 1 if the job would fail."""
    cluster = parse_cluster(args.cluster)
    ranks = _ranks(args.ranks, cluster.devices)
    with redirect_stdout(sys.stderr if args.json else sys.stdout):
        report = dry_run_script(args.script, cluster, arguments=args.args, ranks=ranks)
    print(json.dumps(report.data(), indent=2) if args.json else report)
    for rank in (each for each in report.ranks if each.log.strip()):
        print(f"--- rank {rank.rank} printed\n{rank.log.rstrip()}", file=sys.stderr)
    return 1 if report.errors else 0


def _ranks(text: str | None, world_size: int) -> list[int] | None:
    if text is None:
        return None
    if text == "all":
        return list(range(world_size))
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) < world_size for part in parts):
        raise ConfigurationError(f"--ranks {text!r}: give numbers below {world_size}, as in 0,5, or all.")
    return [int(part) for part in parts]
