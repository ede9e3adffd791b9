"""The Hydra job of this process, and the command by which another process joins it."""

import os
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_3d.errors import ConfigurationError

NOT_FOR_CHILDREN = ("mode", "sweep", "run", "sweeper", "launcher", "output_subdir", "runtime")
"""Parts of `hydra` that say how a sweep is divided into jobs and where they write; a child gets its own."""


def running_job() -> object | None:
    """Hydra's configuration of the job that runs here: one object from the job's start to its end, None without one."""
    return HydraConfig.instance().cfg if HydraConfig.initialized() else None


FILE = "lightning_3d.json"
FAILED = "lightning_3d_failed.json"
"""Name of the file with the reason, if `fit` failed; there is no report then."""


def job_folder() -> Path | None:
    """The output folder of the running job, None outside of Hydra."""
    return Path(HydraConfig.get().runtime.output_dir) if running_job() is not None else None


def is_sweep() -> bool:
    """Return True if the command line asked for several jobs."""
    return running_job() is not None and HydraConfig.get().mode == RunMode.MULTIRUN


def check_launcher(processes: int) -> None:
    """Raise where Hydra's launcher runs the job in a process that is not the user's script."""
    name = HydraConfig.get().runtime.choices.get("hydra/launcher", "basic")
    if name == "basic":
        return
    raise ConfigurationError(
        f"This job wants {processes} processes, and hydra/launcher={name} runs it inside a worker of its own. The other"
        f" {processes - 1} cannot be started there: the command line of a worker is not that of your script. Jobs that"
        " run at the same time would share devices. Use hydra/launcher=basic (jobs one after the other), keep"
        f" trainer.devices=1 with {name}, or let a cluster start the processes (hydra/launcher=slurm_3d)."
    )


def child_command(program: Sequence[str], local_rank: int) -> tuple[list[str], str]:
    """The command and working directory of one more process of the running job.

    It is a single run with the job's own overrides, in the job's own directory, whatever sweep the job belongs to.
    """
    hydra: DictConfig = HydraConfig.get()  # type: ignore[assignment]
    directory = hydra.runtime.output_dir
    overrides = [*hydra.overrides.task, *filter(_is_kept, hydra.overrides.hydra)]
    own = {"hydra.mode": "RUN", "hydra.run.dir": directory, "hydra.output_subdir": "null"}
    own |= {
        f"hydra.job.{name}": str(hydra.job[name]) for name in ("id", "num") if not OmegaConf.is_missing(hydra.job, name)
    }
    if OmegaConf.select(hydra, "job_logging.handlers.file.filename") is not None:
        own["hydra.job_logging.handlers.file.filename"] = f"{directory}/{hydra.job.name}_rank{local_rank}.log"
    settings = [
        f"{name}={value if name in _PLAIN else QuotedString(value, Quote.single).with_quotes()}"
        for name, value in own.items()
    ]
    return [*program, *_config_flags(sys.argv[1:]), *overrides, *settings], hydra.runtime.cwd


_PLAIN = ("hydra.mode", "hydra.output_subdir", "hydra.job.num")


def _is_kept(override: str) -> bool:
    """Return True if a child gets an override of Hydra's own settings, as in `hydra.x=1` or `+hydra/launcher=y`."""
    name = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return name.replace("/", ".").removeprefix("hydra.").partition(".")[0] not in NOT_FOR_CHILDREN


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """The location of the configuration, as given on the command line."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for short, name in (
        ("-cp", "--config-path"),
        ("-cn", "--config-name"),
        ("-cd", "--config-dir"),
        ("-p", "--package"),
    ):
        parser.add_argument(name, short)
    known, _ = parser.parse_known_args(list(arguments))
    return [f"--{name.replace('_', '-')}={value}" for name, value in vars(known).items() if value is not None]


def write_side_file(file: Path, text: str, replaces: Path | None = None) -> None:
    """Write `text` to `file` and remove the file that it `replaces`. Warn where the disk does not take it.

    The text goes to another name first, so that a full disk leaves no half of it.
    """
    part = file.with_name(f"{file.name}.{os.urandom(4).hex()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(file)
        if replaces is not None:
            replaces.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{file} cannot be written ({error}). The run goes on without it. Free space on the disk, or make the"
            " folder writable, before the next run.",
            stacklevel=2,
        )
