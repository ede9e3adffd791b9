"""The location of the package's `conf/` folder: next to the package in a checkout, inside it when installed."""

from pathlib import Path


def conf_folder() -> Path:
    """The folder of YAML files that ships with the package."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
