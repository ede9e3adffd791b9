"""Wheel and sdist install into an empty environment and work there, far from the checkout.

The environment is empty but for what a file of paths gives it: the dependencies, which would take minutes to install.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs hatchling (the dev extra) to build without a network")
pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
SCRIPT = """
import hydra

@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(config):
    print(config.trainer, repr(hydra.utils.instantiate(config.trainer.strategy)))

main()
"""


def call(*command, cwd):
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment_and_finds_its_configs(built, kind, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would bring a checkout
    home, project = tmp_path / "venv", tmp_path / "project"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    call(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", cwd=tmp_path)  # Python's own, too old for torch
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    (Path(site) / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib"))
    call(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", built[kind], cwd=tmp_path)
    assert "No broken requirements" in call(python, "-m", "pip", "check", cwd=tmp_path)
    project.mkdir()
    (project / "config.yaml").write_text("trainer: {}\n")
    (project / "train.py").write_text(SCRIPT)
    out = call(python, "train.py", "+layout@trainer.strategy=8gpu_tp2_pp2", "+cluster@trainer=local", cwd=project)
    assert "<lightning_3d.Strategy3D" in out
    found = "import hydra_plugins.lightning_3d_conf, lightning_3d; print(lightning_3d.__file__)"
    where = call(python, "-c", found, cwd=project)
    assert where.startswith(str(home))
    assert (Path(site) / "lightning_3d" / "py.typed").exists()
    assert "parameters" in call(
        home / "bin" / "lightning-3d", "plan", "llama-7b", "--tokens", "1B", "--cluster", "8xh100", cwd=project
    )


def test_the_metadata_names_the_pythons_and_the_licence(built, tmp_path):
    names = call(sys.executable, "-m", "zipfile", "-l", built["wheel"], cwd=tmp_path)
    assert "tests/" not in names
    wanted = "conf/layout/8gpu_tp2_pp2.yaml conf/launcher/slurm.yaml conf/hydra/launcher/slurm_3d.yaml LICENSE"
    assert [file for file in wanted.split() if file not in names] == []
    code = "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); print(z.read(next(n for n in z.namelist() if n.endswith('METADATA'))).decode())"
    metadata = call(sys.executable, "-c", code, built["wheel"], cwd=tmp_path)
    assert "Requires-Python: >=3.10" in metadata
    assert all(f"Python :: 3.{minor}" in metadata for minor in (10, 11, 12, 13))
