"""The house rules, held by a test each."""

import ast
from pathlib import Path

import lightning_3d

PACKAGE = Path(lightning_3d.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if "conf" not in file.relative_to(PACKAGE).parts)

ROOT = {"__init__", "__main__", "auto_layout", "cli", "errors", "layout", "parallelize", "precision"}
"""The files at the root. A new file goes into a folder."""

# A part may import those of the lines before it. Parts of one line do not import each other.
ORDER = [
    {"errors"},
    {"launch", "layout"},
    {"module", "ranks"},
    {"data", "faults", "optim", "precision"},
    {"comm", "sandbox"},
    {"activations"},
    {"pipeline", "planner", "tensor", "zero"},
    {"auto_layout", "parallelize"},
    {"checkpoint", "dryrun", "usercode", "verify"},
    {"strategy"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
PLACE = {part: index for index, parts in enumerate(ORDER) for part in parts}


def _part(file):
    relative = file.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def _imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_3d"):
            names = (node.module or "").split(".")
            yield from [names[1]] if len(names) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("lightning_3d."):
                    yield alias.name.split(".")[1]


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


def test_every_part_has_a_place():
    parts = {_part(file) for file in FILES} - {"__init__"}
    assert parts <= PLACE.keys(), f"say in ORDER what {parts - PLACE.keys()} may import"


def test_root_is_closed():
    assert {file.stem for file in PACKAGE.glob("*.py")} == ROOT


def test_no_two_files_share_a_name():
    names = [file.name for file in FILES if file.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_exported_names_exist_and_are_all():
    assert sorted(lightning_3d.__all__) == sorted(set(lightning_3d.__all__))
    for name in lightning_3d.__all__:
        assert hasattr(lightning_3d, name)
    public = {name for name in vars(lightning_3d) if name[0].isupper()}
    assert public == {name for name in lightning_3d.__all__ if name[0].isupper()}


def test_files_are_small():
    long = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in long.items() if lines > 420} == {}


def test_asserts_say_invariants_and_no_error_is_swallowed():
    wrong = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler) and [type(n) for n in node.body] == [ast.Pass]:
                wrong.append(f"{file.name}:{node.lineno}")
    assert wrong == []
