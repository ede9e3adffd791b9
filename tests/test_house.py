"""The house rules, held by a test each."""

import ast
import importlib
import re
from pathlib import Path

from lightning.pytorch import LightningModule

import lightning_3d
from tests.zoo.registry import LAYOUTS, files, members

PACKAGE = Path(lightning_3d.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if "conf" not in file.relative_to(PACKAGE).parts)

ROOT = {"__init__", "__main__", "cli", "errors", "extensions", "layout", "parallelize", "precision"}
"""The files at the root. A new file goes into a folder."""

TESTS = Path(__file__).parent
TESTS_ROOT = {
    "conftest", "parity", "test_auto", "test_house", "test_layout", "test_limits", "test_mechanisms",
    "test_nothing_left", "test_private_names", "test_workers", "workers",
}  # fmt: skip
"""At the root of the tests: those of the files at the root of the package and of the house, and what all tests share."""

BESIDE_THE_PACKAGE = {
    "bench": "speed against peers",
    "device": "a device in host memory that refuses, waits and orders as CUDA and NCCL do",
    "docs": "pages of the documentation",
    "examples": "the examples of the repository",
    "fuzz": "drawn modules",
    "gpu": "what needs a device",
    "install": "the built package",
    "same": "training in a layout is training on one device",
    "yardsticks": "recorded calls, bytes and losses of each layout",
    "zoo": "the modules that several tests share",
}
"""Folders of tests that no folder of the package has the name of, and the reason."""

# A part may import those of the lines before it. Parts of one line do not import each other.
ORDER = [
    {"errors"},
    {"launch", "layout"},
    {"extensions", "module", "ranks"},
    {"axes"},
    {"offload", "sandbox"},
    {"activations", "data", "faults", "optim", "precision"},
    {"comm"},
    {"pipeline", "tensor", "zero"},
    {"context", "experts"},
    {"parallel"},
    {"parallelize"},
    {"checkpoint", "monitor", "usercode", "verify"},
    {"strategy"},
    {"planner"},  # from here on, the folders of tools/
    {"auto_layout", "pictures"},
    {"dryrun"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
PLACE = {part: index for index, parts in enumerate(ORDER) for part in parts}


def _part(file):
    return next(part for part in file.relative_to(PACKAGE).parts if part != "tools").removesuffix(".py")


def _imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{prefix}{alias.name}" for alias in node.names):
                if name.startswith("lightning_3d."):
                    yield name.removeprefix("lightning_3d.").removeprefix("tools.").split(".")[0]


def test_imports_point_one_way():
    wrong = []
    for file in FILES:
        part = _part(file)
        if part == "__init__":
            continue
        for imported in _imports(file):
            if imported != part and imported in PLACE and PLACE[imported] >= PLACE.get(part, -1):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {imported}")
    assert wrong == []


def test_the_chain_of_imports_is_short():
    imports = {}
    for file in FILES:
        imports.setdefault(_part(file), set()).update(set(_imports(file)) - {_part(file)})
    levels = {}
    for part in sorted(PLACE, key=PLACE.get):
        levels[part] = 1 + max((levels[each] for each in imports.get(part, ()) if each in levels), default=0)
    assert max(levels.values()) <= 12


def test_every_part_has_a_place():
    parts = {_part(file) for file in FILES} - {"__init__"}
    assert parts <= PLACE.keys(), f"say in ORDER what {parts - PLACE.keys()} may import"


def test_the_core_imports_no_tool():
    """It asks for one by name in `extensions`. The command line is an entry."""
    static = re.compile(r"^ *(?:from|import) lightning_3d(?:\.| import )tools", re.MULTILINE)
    importing = {str(file.relative_to(PACKAGE)) for file in FILES if static.search(file.read_text())}
    assert {name for name in importing if not name.startswith("tools/")} == {"cli.py"}


def test_roots_are_closed():
    assert {file.stem for file in PACKAGE.glob("*.py")} == ROOT
    assert {file.stem for file in TESTS.glob("*.py")} == TESTS_ROOT


def test_no_two_files_share_a_name():
    names = [file.name for file in FILES if file.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_exported_names_exist_and_are_all():
    assert sorted(lightning_3d.__all__) == sorted(set(lightning_3d.__all__))
    assert all(hasattr(lightning_3d, name) for name in lightning_3d.__all__)
    public = {name for name in vars(lightning_3d) if name[0].isupper()}
    assert public == {name for name in lightning_3d.__all__ if name[0].isupper()}


def test_files_are_small():
    assert [str(file.relative_to(PACKAGE)) for file in FILES if len(file.read_text().splitlines()) > 420] == []


def test_asserts_say_invariants_and_no_error_is_swallowed():
    wrong = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler) and [type(n) for n in node.body] == [ast.Pass]:
                wrong.append(f"{file.name}:{node.lineno}")
    assert wrong == []


INTERCEPTORS = {
    "FakeDevice": "a dry run's tensors without memory",
    "Interceptor": "the rules of a trial",
    "OperationCount": "operations of a step, for planner and monitor",
    "Recorder": "writes to parameters while a module is built",
    "LateTensor": "an output of tensor ranks that is gathered when it is read",
    "ShapesOnly": "tensors without memory of a module that is built, and of a dry run",
    "ShardDropout": "masks of shards from one seed",
    "ShardRules": "the user's hooks on shards",
    "TracedTensor": "values of other stages",
    "UnallocatedBuffer": "the ring's buffers without memory",
    "WithoutValues": "parameters without memory, and shards between two runs",
    "_Mode": "results that selective recompute keeps",
}
"""Classes that see the tensor operations of others, each with what it is for."""


def test_interceptors_are_listed():
    found = set()
    for node in (node for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ClassDef):
            own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            bases = " ".join(map(ast.unparse, node.bases))
            if own & {"__torch_function__", "__torch_dispatch__"} or re.search(
                "(Function|Dispatch|FakeTensor)Mode", bases
            ):
                found.add(node.name)
    assert found == INTERCEPTORS.keys()
    assert len(INTERCEPTORS) <= 12


SETS_FORWARD = r"\.forward = |\"forward\"\] = |(__setattr__|undo\.set|Change)\(\w+, \"forward\""
TENSORS = r"^class \w+\((?:[\w.]+, )*(?:nn\.|torch\.)*(?:Tensor|Parameter|DTensor)[,)]"


def test_one_file_sets_the_forward_of_a_module():
    assert {str(f.relative_to(PACKAGE)) for f in FILES if re.search(SETS_FORWARD, f.read_text())} == {
        "module/forward.py"
    }


def test_mechanisms_become_fewer():
    """Interceptors, tensor subclasses, swaps of a class, and places that set a forward."""
    text = "\n".join(file.read_text() for file in FILES)
    places = [len(re.findall(what, text, re.MULTILINE)) for what in (TENSORS, r"\.__class__ = ", SETS_FORWARD)]
    assert len(INTERCEPTORS) + sum(places) <= 25


def test_folders_of_tests_are_those_of_the_package():
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - {path.parent.name for path in PACKAGE.rglob("*/__init__.py")} == BESIDE_THE_PACKAGE.keys()


def test_each_module_of_the_zoo_says_why_it_is_there_and_is_used():
    outside = [file.read_text() for file in TESTS.rglob("*.py") if file.parent.name != "zoo"]
    words, text = {word for text in outside for word in re.findall(r"\w+", text)}, "\n".join(outside)
    wrong = []
    for file in files():
        for name, member in members(file).items():
            if not set(member.layouts) <= set(LAYOUTS) or not member.layouts:
                wrong.append(f"{file}.{name} is tried in {member.layouts}")
            if len(member.because.split()) < 3:
                wrong.append(f"{file}.{name} gives no reason")
            if name not in words and f'members("{file}")' not in text:
                wrong.append(f"{file}.{name} is not used by a test")
    assert wrong == []


def test_each_lightning_module_of_the_zoo_is_a_member():
    """Save those that others derive from."""
    kinds = [
        kind
        for file in files()
        for kind in vars(importlib.import_module(f"tests.zoo.{file}")).values()
        if isinstance(kind, type) and issubclass(kind, LightningModule) and kind.__module__ == f"tests.zoo.{file}"
    ]
    known = {member.build for file in files() for member in members(file).values()}
    bases = {base for kind in kinds for base in kind.__mro__[1:]}
    assert [kind.__name__ for kind in kinds if kind not in known | bases] == []


AVOIDED = re.compile(r"\b(told|lent|such a one|takes the way back|let go)\b")
"""Words of CONTRIBUTING.md that a reader has to translate. That page and its test name them."""


def test_prose_avoids_words_that_a_reader_has_to_translate():
    top = PACKAGE.parent
    pages = [*top.glob("*.md"), *top.glob("docs/**/*.md"), *top.glob("examples/*.py"), *FILES]
    found = {str(file): AVOIDED.findall(file.read_text()) for file in pages if file.name != "CONTRIBUTING.md"}
    assert {name: words for name, words in found.items() if words} == {}


def test_costly_cases_exist(gone):
    """Of the files that this run has collected; all of them in CI."""
    assert gone == []
