"""Every config that ships: found by Hydra, composed, instantiated."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_3d import Strategy3D
from lightning_3d.tools.planner.plain_yaml import conf_folder

CONF = conf_folder()
LAYOUTS = sorted(file.stem for file in (CONF / "layout").glob("*.yaml"))
SIZES = re.compile(r"(?:(\d+)x)?(\d+)(?:gpu|cpu)?_|1gpu")


@pytest.fixture
def project(tmp_path):
    """A user's own project: one config that knows nothing of ours."""
    (tmp_path / "config.yaml").write_text("trainer:\n  _target_: lightning.pytorch.Trainer\n  logger: false\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield lambda *overrides, full=False: compose("config", list(overrides), return_hydra_config=full)


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
        assert strategy.settings.base.world_size == int(sizes[1] or 1) * int(sizes[2] or 1)


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


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "launcher").glob("*.yaml")))
def test_every_launcher_is_chosen_and_is_one(project, name):
    if name != "basic":
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    config = project(f"+launcher={name}", "+trainer.devices=4", "+trainer.num_nodes=2", full=True)
    launcher = Plugins.instance()._instantiate(config.hydra.launcher)
    assert isinstance(launcher, Launcher)
    if name != "basic":
        assert launcher.params["tasks_per_node"] == 4
        assert launcher.params["nodes"] == (2 if name == "slurm" else 1)


def test_a_layout_replaces_the_strategy_that_a_project_names(project, tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "ddp.yaml").write_text("strategy: ddp\ndevices: 4\n")
    config = project("+trainer=ddp", "+layout@trainer.strategy=tp2", "trainer.strategy.zero_stage=2")
    strategy = instantiate(config.trainer.strategy)
    assert isinstance(strategy, Strategy3D)
    assert (strategy.settings.base.tensor_parallel_size, strategy.settings.base.zero_stage) == (2, 2)


@pytest.mark.parametrize("file", sorted(CONF.glob("[!hm]*/*.yaml")) + sorted(CONF.glob("hydra/*/*.yaml")), ids=str)
def test_every_line_of_a_config_says_what_it_is_for(file):
    lines = Path(file).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if "#" not in line and line != "defaults:"] == []
