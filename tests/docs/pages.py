"""The pages of the documentation and their code blocks."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "conf/README.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(language):
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)):
            found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def commands():
    """Every line of a console block, as words."""
    for block in blocks("console"):
        for line in block.values[0].splitlines():
            if line.strip():
                yield pytest.param(shlex.split(line, comments=True), id=line[:60])
