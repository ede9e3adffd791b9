"""What the documentation says is so: its code runs, its links lead somewhere, its arguments are those of the code."""

import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_class
from lightning.pytorch import Trainer

from lightning_3d import Strategy3D
from lightning_3d.cli import COMMANDS, _parser_of
from lightning_3d.front.train import VERBS
from lightning_3d.resources import conf_folder
from tests.modules import MLP

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "conf/README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(language):
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)):
            found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, monkeypatch):
    fitted = []

    def fit(trainer, module, *_, **__):
        fitted.append((trainer.strategy.layout, module))  # the layout raises where the sizes do not fit the devices

    monkeypatch.setattr(Trainer, "fit", fit)
    names = {"model": MLP(), "data": None}
    exec(compile(code, "documentation", "exec"), names)
    assert any(isinstance(value, Strategy3D | Trainer) for value in names.values())
    assert bool(fitted) == (".fit(" in code)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_name_real_arguments(text):
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    assert isinstance(get_class(strategy["class_path"])(**strategy["init_args"]), Strategy3D)


def commands():
    for block in blocks("console"):
        for line in block.values[0].splitlines():
            if line.strip():
                yield pytest.param(shlex.split(line, comments=True), id=line[:60])


@pytest.mark.parametrize("words", list(commands()))
def test_commands_exist_and_take_their_flags(words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "lightning-3d" and words[1] in COMMANDS:
        _parser_of(words[1], import_module(COMMANDS[words[1]][0])).parse_args(words[2:])
    elif words[0] == "lightning-3d":
        assert words[1] in VERBS
    for group, names in re.findall(r"(layout|cluster)@[\w.]+=([\w,]+)", " ".join(words)):
        for name in names.split(","):
            assert (conf_folder() / group / f"{name}.yaml").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


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
    told = re.findall(r"^        (\w+): ", Strategy3D.__doc__ or "", re.MULTILINE)
    lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    assert told == [name for name in inspect.signature(Strategy3D).parameters if name not in lightning]


def test_a_table_of_the_docs_has_as_many_cells_in_every_row():
    for page in PAGES:
        tables = re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE)
        for table in tables:
            assert len({row.count("|") for row in table.replace("\\|", "").splitlines()}) == 1, (page.name, table)
