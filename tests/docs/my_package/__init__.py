"""What the commands of the documentation call a user's own package."""

from lightning.pytorch.demos.boring_classes import BoringDataModule as Text
from my_package.model import LitGPT

__all__ = ["LitGPT", "Text"]
