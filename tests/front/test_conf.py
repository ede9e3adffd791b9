"""Every config that ships: found by Hydra, composed, instantiated."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from omegaconf import OmegaConf

from lightning_3d import Strategy3D
from lightning_3d.resources import conf_folder

CONF = conf_folder()
LAYOUTS = sorted(file.stem for file in (CONF / "layout").glob("*.yaml"))
SIZES = re.compile(r"(?:(\d+)x)?(\d+)(?:gpu|cpu)?_|1gpu")


@pytest.fixture
def project(tmp_path):
    """A user's own project: one config that knows nothing of ours."""
    (tmp_path / "config.yaml").write_text("trainer:\n  _target_: lightning.pytorch.Trainer\n  logger: false\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield lambda *overrides: compose("config", list(overrides))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_a_strategy_for_the_devices_in_its_name(project, name):
    config = project(f"+layout@trainer.strategy={name}")
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, Strategy3D)
    sizes = SIZES.match(name)
    if sizes is None:
        assert config.trainer.strategy.data_parallel_size == "auto"
        assert not name[0].isdigit()
    else:
        assert strategy._wanted.world_size == int(sizes[1] or 1) * int(sizes[2] or 1)


def test_a_layout_trains_under_a_trainer_made_from_config(project):
    config = project("+layout@trainer.strategy=1gpu", "+trainer.accelerator=cpu", "+trainer.devices=1")
    trainer = instantiate(config.trainer)
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer.strategy, Strategy3D)
    assert trainer.strategy.layout.world_size == 1


def test_a_project_s_own_config_of_the_same_name_wins(project, tmp_path):
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "zero1.yaml").write_text("mine: true\n")
    assert project("+layout@trainer.strategy=zero1").trainer.strategy == {"mine": True}


@pytest.mark.parametrize(
    ("name", "variables", "devices", "nodes"),
    [
        ("local", {}, "auto", 1),
        ("torchrun", {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 4, 2),
        ("slurm", {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "3"}, 8, 3),
        ("kubernetes", {"WORLD_SIZE": "5"}, 1, 5),
    ],
)
def test_every_cluster_reads_its_sizes(project, monkeypatch, name, variables, devices, nodes):
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    trainer = project(f"+cluster@trainer={name}").trainer
    assert (trainer.devices, trainer.num_nodes) == (devices, nodes)
    if name == "kubernetes":
        assert isinstance(instantiate(trainer.plugins)[0], KubeflowEnvironment)


def test_every_cluster_has_a_test():
    assert {file.stem for file in (CONF / "cluster").glob("*.yaml")} == {"local", "torchrun", "slurm", "kubernetes"}


def test_the_slurm_launcher_asks_for_the_processes_of_the_trainer():
    config = OmegaConf.create({"trainer": {"devices": 4, "num_nodes": 2}})
    config["launcher"] = OmegaConf.load(CONF / "hydra/launcher/slurm_3d.yaml")
    assert (config.launcher.nodes, config.launcher.tasks_per_node) == (2, 4)


@pytest.mark.parametrize("file", sorted(CONF.glob("[!h]*/*.yaml")) + sorted(CONF.glob("hydra/*/*.yaml")), ids=str)
def test_every_line_of_a_config_says_what_it_is_for(file):
    lines = Path(file).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if "#" not in line and line != "defaults:"] == []
