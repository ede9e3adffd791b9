"""Every command of the documentation is run as far as it can be without a cluster, or at least read by its program."""

import re
import shutil
import subprocess
import warnings
from importlib import import_module
from itertools import product

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from torch.distributed.run import get_args_parser

from lightning_3d import Strategy3D
from lightning_3d.cli import COMMANDS, _parser_of, main
from lightning_3d.tools.commands.fit import VERBS
from tests.commands.test_compare import job
from tests.docs.pages import ROOT, blocks, commands
from tests.monitor.test_timetable import recorded

HYDRA = """\
trainer:
  _target_: lightning.pytorch.Trainer
  accelerator: cpu
  devices: 4
  num_nodes: 1
"""
TEMPLATE = {
    "config.yaml": "defaults: [_self_, {trainer: default}, {experiment: null}]\nseed: null\n",
    "trainer/default.yaml": HYDRA.partition("\n")[2].replace("  ", "") + "max_epochs: 10\n",
}
"""The configs of ashleve/lightning-hydra-template, as far as the pages change them."""
RUN = ("plan", "layout", "inspect", "compare", "timeline")
"""Commands that need no cluster, no time and no files but those made here."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the commands speak of."""
    for folder in ("examples", "tests/docs"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    sweep = tmp_path / "multirun/2026-01-31/12-00-00"
    job(sweep, "0", ["a=1"], step_seconds=0.25, memory_bytes=2e9, metrics={"loss": 3.5})
    recorded(tmp_path / "lightning_logs/version_0")
    (tmp_path / "cli").symlink_to(ROOT / "examples" / "cli")
    (tmp_path / "config.yaml").write_text(HYDRA)
    (experiment,) = [text for (text,) in (block.values for block in blocks("yaml")) if text.startswith("# @package")]
    for file, text in {**TEMPLATE, "experiment/large.yaml": experiment}.items():
        (tmp_path / "src" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize("words", list(commands()))
def test_commands_run(words, here, capsys):
    program, rest = words[0], words[1:]
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in project for extra in re.findall(r"\[(\w+)\]", " ".join(rest)))
    elif program == "torchrun":
        get_args_parser().parse_args([word.replace("$HEAD", "head") for word in rest])
    elif program == "lightning-3d":
        run_ours(rest)
    elif program == "python" and rest[1:2] == ["fit"]:
        run_ours([*rest[1:], "--model=tests.zoo.plain.MLP"])
    elif program == "python" and any("@" in word or "=" in word for word in rest):
        compose_all([word for word in rest[1:] if word != "-m"], here, rest[0])
    else:
        assert program in ("srun", "sbatch", "python"), f"say in this test what to do with `{' '.join(words)}`"


def run_ours(words):
    assert words[0] in {**COMMANDS, **VERBS}, words
    if words[0] in VERBS:
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stopped:
            warnings.simplefilter("ignore")
            main([*words, "--print_config"])  # all is read and checked; nothing is trained
        assert stopped.value.code == 0
    elif words[0] in RUN:
        assert main(words) == 0
    else:
        command = import_module(f"lightning_3d.tools.commands.{COMMANDS[words[0]][0]}")
        _parser_of(words[0], command).parse_args(words[1:])


def compose_all(overrides, folder, script):
    """Every job of a Hydra command line composes, and its strategy is one."""
    GlobalHydra.instance().clear()
    folder = {"examples": ROOT / "examples" / "conf", "src": folder / "src"}.get(script.partition("/")[0], folder)
    values = [
        [f"{name}={value}" for value in values.split(",")] for name, _, values in (o.partition("=") for o in overrides)
    ]
    with initialize_config_dir(str(folder), version_base="1.3"):
        for chosen in product(*values):
            config = compose("config", [*chosen], return_hydra_config=True)
            if any("layout@" in override or "experiment=" in override for override in chosen):
                assert isinstance(instantiate(config.trainer.strategy), Strategy3D)


@pytest.mark.parametrize(("target", "folder"), [("test-oldest", "build/test-oldest"), ("install", ".venv")])
def test_an_environment_that_was_interrupted_is_made_again(target, folder, tmp_path):
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / folder / "bin").mkdir(parents=True)
    command = ["make", "--no-print-directory", target, "PYTHON=echo", "VENV=.venv"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.stdout.startswith(f"-m venv {folder}\n")
