"""Every example runs from its Hydra config and from its LightningCLI config, in a small form."""

import math
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from lightning.pytorch import LightningModule

from lightning_3d.cli import main
from lightning_3d.tools.planner.plain_yaml import conf_folder
from tests.parity import long
from tests.workers import run

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in (FOLDER / "conf" / "example").glob("*.yaml"))
LAYOUTS = {
    "hf_classifier": "zero3",
    "convnet": "zero2",
    "nanogpt": "pp2",
    "encoder_decoder": "pp2",
    "contrastive": "pp2",
}
"""Of those that do not take tp2."""
QUIET = {"max_steps": 2, "enable_progress_bar": "false", "enable_model_summary": "false"}


def small(name, width):
    """Overrides of the model: narrow, and two blocks where it has blocks."""
    model = yaml.safe_load((FOLDER / "conf" / "example" / f"{name}.yaml").read_text())["model"]
    return {"width": width} | ({"layers": 2} if "layers" in model else {}) | ({"heads": 2} if "heads" in model else {})


def from_hydra(name, folder):
    sys.path.insert(0, str(FOLDER))
    import train

    settings = {**QUIET, "devices": 2, "default_root_dir": folder}
    overrides = [
        f"trainer.{key}={value}"
        for key, value in settings.items()
        if key in ("max_steps", "devices", "default_root_dir")
    ]
    overrides += [f"+trainer.{key}={value}" for key, value in settings.items() if key.startswith("enable")]
    overrides += [f"model.{key}={value}" for key, value in small(name, 16).items()]
    overrides += [f"example={name}", f"+layout@trainer.strategy={LAYOUTS.get(name, 'tp2')}"]
    with initialize_config_dir(str(FOLDER / "conf"), version_base="1.3"):
        config = compose("config", overrides)
    trainer = train.train(config)
    return trainer.global_step, float(trainer.callback_metrics["loss"]), trainer.strategy.layout.world_size


def from_cli(name, folder):
    sys.path.insert(0, str(FOLDER))
    flags = [f"--trainer.{key}={value}" for key, value in {**QUIET, "default_root_dir": folder}.items()]
    flags += [f"--model.init_args.{key}={value}" for key, value in small(name, 16).items()]
    assert main(["fit", "--config", str(FOLDER / "cli" / f"{name}.yaml"), *flags]) == 0
    return yaml.safe_load((Path(folder) / "config.yaml").read_text())


@pytest.mark.parametrize("name", [name if name in ("hf_causal_lm", "vision") else long(name) for name in NAMES])
def test_an_example_runs_from_its_hydra_config(name, tmp_path):
    for steps, loss, world in run(from_hydra, name, str(tmp_path), world=2):
        assert (steps, world) == (2, 2)
        assert math.isfinite(loss)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_from_its_cli_config(name, tmp_path):
    saved = run(from_cli, name, str(tmp_path), world=2)[0]
    assert saved["model"]["init_args"]["width"] == 16
    assert saved["trainer"]["strategy"]["class_path"] == "lightning_3d.Strategy3D"


def test_every_module_of_the_examples_has_both_configs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    assert [file.stem for file in sorted((FOLDER / "cli").glob("*.yaml"))] == NAMES
    used = {
        yaml.safe_load((FOLDER / "conf" / "example" / f"{name}.yaml").read_text())["model"]["_target_"]
        for name in NAMES
    }
    modules = set()
    for file in FOLDER.glob("*.py"):
        if file.stem not in ("demo", "train", "common", "ray_train"):
            members = vars(__import__(file.stem)).values()
            modules |= {
                f"{file.stem}.{member.__name__}"
                for member in members
                if isinstance(member, type) and issubclass(member, LightningModule) and member.__module__ == file.stem
            }
    assert used == modules - {"vision.Classifier"}  # what the two networks for digits share


@pytest.mark.parametrize("name", NAMES)
def test_both_configs_of_an_example_say_the_same(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    hydra = yaml.safe_load((FOLDER / "conf" / "example" / f"{name}.yaml").read_text())
    cli = yaml.safe_load((FOLDER / "cli" / f"{name}.yaml").read_text())
    for part in ("model", "data"):
        target = hydra[part].pop("_target_")
        assert (target, hydra[part]) == (cli[part]["class_path"], cli[part]["init_args"])
        assert get_class(target)
    assert (conf_folder() / "layout" / f"{LAYOUTS.get(name, 'tp2')}.yaml").exists()
