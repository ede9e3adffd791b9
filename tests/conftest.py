"""What every test finds as the one before it did."""

from collections.abc import Iterator

import pytest
from lightning.pytorch import Trainer


@pytest.fixture(autouse=True)
def _trainer_is_lightnings() -> Iterator[None]:
    """A dry run in this process replaces `Trainer.__init__` until a Trainer is made; some tests make none."""
    before = Trainer.__init__
    yield
    Trainer.__init__ = before  # type: ignore[method-assign]
