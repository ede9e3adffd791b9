"""YAML files that others may have written, read as plain values: nothing is resolved, and nothing can grow."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.errors import PlannerError

MOST_VALUES, MOST_BYTES = 20_000, 2_000_000
"""Values with every alias written out; a catalogue has some five hundred. A device like /dev/zero has no end."""


def conf_folder() -> Path:
    """The folder `conf/` of YAML files: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).parents[2]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def read_plain(path: Any, what: str) -> Any:
    """The content of `path`; interpolations stay text. `what` names the file in errors."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} characters")
        _refuse_growth(yaml.compose(text, Loader=yaml.SafeLoader))
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except FileNotFoundError:
        raise PlannerError(f"{what} {path} does not exist.") from None
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        # ValueError: bytes that are not UTF-8, numbers of thousands of digits.
        raise PlannerError(f"{what} {path} cannot be read: {error}") from error


def _refuse_growth(root: yaml.Node | None) -> None:
    """Raise where aliases stand for more than `MOST_VALUES` values, or for themselves."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MOST_VALUES  # what is inside itself has no end
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            nodes = [part if isinstance(part, tuple) else (part,) for part in parts]
            sizes[id(node)] = 1 + sum(size(each) for some in nodes for each in some)
        return sizes[id(node)]

    if root is not None and size(root) > MOST_VALUES:
        raise ValueError(f"it stands for more than {MOST_VALUES:,} values; write out what its aliases (*name) repeat")
