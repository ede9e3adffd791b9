"""Measure this machine in about a minute, and write its catalogue entry for plans."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_3d.errors import PlannerError
from lightning_3d.tools.planner.catalogue import user_folder

EXAMPLE = """\
examples:
  lightning-3d calibrate
  lightning-3d plan gpt2 --tokens 10M --precision 32 --cluster 2xthis-machine
  lightning-3d calibrate --name lab-box --output conf/lab.yaml
  lightning-3d plan gpt2 --tokens 10M --hardware conf/lab.yaml --cluster 4x2xlab-box
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--name", default="this-machine", help="name of the entry (default this-machine)")
    parser.add_argument("--output", metavar="FILE", help="YAML file to write (default: in your catalogue folder)")


def run(args: Namespace) -> int:
    name = args.name.lower()
    if not name.replace("-", "").replace("_", "").isalnum() or name[0].isdigit():
        raise PlannerError(f"--name {args.name!r} must be letters, digits and dashes, and start with a letter.")
    path = Path(args.output) if args.output else user_folder() / f"{name}.yaml"
    if path.is_dir():
        raise PlannerError(f"--output {path} is a folder: name a YAML file in it.")
    from lightning_3d.tools.commands.calibration import calibrate, write_entry

    entry, doubt = calibrate(name)
    write_entry(entry, path)
    for field, value in entry[name].items():
        print(f"{field:<22} {value}")
    if doubt is not None:
        print(doubt, file=sys.stderr)
    print(f"wrote {path}: plan for this machine with --cluster {entry[name]['devices_per_node']}x{name}")
    return 0
