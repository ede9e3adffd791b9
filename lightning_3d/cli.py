"""`lightning-3d`: the command line. Each subcommand's module is imported when it is used, so that `--help` is quick."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from lightning_3d import register
from lightning_3d.errors import ConfigurationError, Lightning3DError, printable
from lightning_3d.tools.commands.fit import VERBS, train

COMMANDS = {
    "plan": ("plan", "how many devices, which layout, how long, how much money"),
    "dry-run": ("dry_run", "simulate your script on a cluster: memory, messages, errors"),
    "layout": ("show_layout", "which rank has which blocks, shards and bytes"),
    "inspect": ("inspect", "how a module would be sharded: tensor plan, stages, parameters"),
    "compare": ("compare", "the jobs of a Hydra sweep: layout, loss, step time, memory, cost"),
    "timeline": ("timeline", "the recorded timetable of a pipeline beside the ideal one"),
    "run": ("run", "run a script whose packages import `pytorch_lightning`"),
    "calibrate": ("calibrate", "measure this machine, for plans that use it"),
    "consolidate": ("consolidate", "one file from a sharded checkpoint"),
    "export": ("export", "safetensors from a sharded checkpoint, for from_pretrained"),
}
"""Name -> (module of `tools.commands`, one line). It has `configure(parser)` and `run(args) -> exit code`."""
LIGHT = ("plan",)
"""Commands that import torch and Lightning only when they need them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return 0, or 2 with one line on stderr if the input cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    prog = f"lightning-3d {name}" if name in {**COMMANDS, **VERBS} else "lightning-3d"
    try:
        if name is None or name not in {**COMMANDS, **VERBS}:
            return _top_level(arguments)
        if name not in LIGHT and "--help" not in arguments:
            register()
        if name in VERBS:
            return train(arguments)
        command = import_module(f"lightning_3d.tools.commands.{COMMANDS[name][0]}")
        return int(command.run(_parser_of(name, command).parse_args(arguments[1:])))
    except Lightning3DError as error:
        if name == "run":
            raise  # the script's own: its traceback is worth reading
        print(printable(f"{prog}: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Close stderr too, or the interpreter reports its failed flush.
        sys.stderr.close()
        return 0


def _top_level(arguments: list[str]) -> int:
    commands = {name: line for name, (_, line) in COMMANDS.items()} | VERBS
    lines = "\n".join(f"  {name:<12} {line}" for name, line in commands.items())
    parser = _parser_class()(
        prog="lightning-3d",
        description="Plan and run 3D-parallel training of an unchanged LightningModule.",
        epilog=f"commands:\n{lines}\n\n`lightning-3d COMMAND --help` shows a worked example of each.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(commands), metavar="COMMAND", help="one of the commands below")
    if not arguments:
        parser.print_help()
        return 2
    parser.parse_args(arguments)
    return 0


def _parser_class() -> type[ArgumentParser]:
    try:
        from lightning_3d.tools.commands.parsing import OneLine
    except ImportError as error:
        raise ConfigurationError(
            f"the command line reads its options with jsonargparse, which cannot be imported ({error}):"
            " pip install 'jsonargparse[signatures]'."
        ) from error
    return OneLine


def _parser_of(name: str, command: ModuleType) -> ArgumentParser:
    parser = _parser_class()(
        prog=f"lightning-3d {name}",
        description=(command.__doc__ or "").partition("\n\n")[0],
        epilog=command.EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    command.configure(parser)
    return parser
