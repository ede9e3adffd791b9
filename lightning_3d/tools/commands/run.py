"""Run a script where `pytorch_lightning` and `lightning_fabric` mean `lightning.pytorch` and `lightning.fabric`.

For packages that import the separate packages: their modules then train with this package's strategies.
"""

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path
from runpy import run_path

from lightning_3d import serve_pytorch_lightning
from lightning_3d.errors import ConfigurationError

EXAMPLE = """\
examples:
  lightning-3d run train.py --epochs 3
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("script", help="run as `python script arguments` would")
    parser.add_argument("arguments", nargs=REMAINDER, help="its command line")


def run(args: Namespace) -> int:
    if not Path(args.script).is_file():
        raise ConfigurationError(f"there is no script {args.script}.")
    serve_pytorch_lightning()
    sys.argv[:] = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    run_path(args.script, run_name="__main__")
    return 0
