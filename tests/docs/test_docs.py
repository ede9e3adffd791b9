"""What the documentation says is so: its code runs, its links lead somewhere, its arguments are those of the code."""

import inspect
import os
import re
import subprocess
import sys

import pytest
import yaml
from hydra.utils import get_class
from lightning.pytorch import Trainer

import lightning_3d.errors
from lightning_3d import Strategy3D
from lightning_3d.tools.planner.plain_yaml import conf_folder
from tests.docs.pages import NAMES, PAGES, ROOT, blocks
from tests.zoo.plain import MLP


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, monkeypatch):
    for package in {*re.findall(r"^from (peft)", code, re.MULTILINE)}:
        pytest.importorskip(package, reason=f"needs {package}")
    fitted = []

    def fit(trainer, module, *_, **__):
        fitted.append((trainer.strategy.layout, module))  # the layout raises where the sizes do not fit the devices

    monkeypatch.setattr(Trainer, "fit", fit)
    names = {"model": MLP(), "data": None}
    exec(compile(code, "documentation", "exec"), names)
    assert any(isinstance(value, Strategy3D | Trainer) for value in names.values())
    assert bool(fitted) == (".fit(" in code)


@pytest.mark.long
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_block_of_a_page_is_a_script_that_trains(page, tmp_path):
    codes = [text for block in blocks("python") if block.id == f"{page}-0" for text in block.values]
    (tmp_path / "train.py").write_text(codes[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for line in "".join(shown).splitlines() or ["Strategy3D on 4 ranks: data 1 x tensor 2 x pipeline 2"]:
        assert line in done.stderr
    assert "12 parameters split" in done.stderr


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_name_real_arguments(text):
    block = yaml.safe_load(text)
    if "defaults" in block:
        return  # test_commands.py composes it
    if block.get("kind") in ("PyTorchJob", "TrainJob"):
        spec = block["spec"]
        pods = spec.get("pytorchReplicaSpecs", {}).get("Worker", {}).get("template", {}).get("spec", {})
        command = (spec["trainer"] if "trainer" in spec else pods["containers"][0])["command"]
        assert (conf_folder() / "cluster" / f"{command[-1].partition('=')[2]}.yaml").exists()
        return
    strategy = block["trainer"]["strategy"]
    assert isinstance(get_class(strategy["class_path"])(**strategy["init_args"]), Strategy3D)


@pytest.mark.parametrize("text", blocks("bash"))
def test_shell_scripts_are_read_by_the_shell(text):
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_to_a_section_lead_to_its_heading(page):
    for target, section in re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", page.read_text()):
        text = (page.parent / target).read_text() if target else page.read_text()
        headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
        assert section in [re.sub(r"[^\w\s-]", "", heading).lower().replace(" ", "-") for heading in headings], target


def test_every_page_is_in_the_list_of_pages():
    listed = (ROOT / "docs/README.md").read_text()
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and page.name not in listed
    ] == []


def test_the_page_of_arguments_is_complete_and_has_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs/arguments.md").read_text(), re.MULTILINE)
    parameters = list(inspect.signature(Strategy3D.__init__).parameters.values())[1:]
    assert rows == [(parameter.name, repr(parameter.default)) for parameter in parameters]


def test_the_docstring_explains_the_arguments_of_its_own():
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(Strategy3D) or "", re.MULTILINE)
    lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    assert documented == [name for name in inspect.signature(Strategy3D).parameters if name not in lightning]


def test_the_page_of_the_api_has_every_public_name_and_error():
    page = (ROOT / "docs/api.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (.*)", page, re.MULTILINE)} - {"errors"}
    assert shown == {*lightning_3d.__all__}
    errors = {name for name, kind in vars(lightning_3d.errors).items() if inspect.isclass(kind) and "Error" in name}
    assert {*re.findall(r"^ +- (\w+)", page, re.MULTILINE)} == errors


def test_a_table_of_the_docs_has_as_many_cells_in_every_row():
    for page in PAGES:
        tables = re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE)
        for table in tables:
            assert len({row.count("|") for row in table.replace("\\|", "").splitlines()}) == 1, (page.name, table)


def test_messages_that_the_page_of_troubles_explains_are_in_the_code():
    code = "".join(file.read_text() for file in (ROOT / "lightning_3d").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)  # a message that is several literals
    messages = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs/trouble.md").read_text(), re.MULTILINE)
    parts = [
        part.strip() for message in messages if "invalid strategy name" not in message for part in message.split("...")
    ]
    assert len(parts) > 4
    assert [part for part in parts if part not in code] == []


def test_the_site_builds_without_warnings(tmp_path):
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason=f"needs {package} (the dev extra)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "README"]
    assert all((tmp_path / page / "index.html").exists() for page in pages)
    assert "mkdocs build\n" in (ROOT / "Makefile").read_text()  # -q would hide dead links from `strict`
    assert "white-space: normal" in (tmp_path / "site.css").read_text()  # cells of tables wrap
