"""Training with a part of the sequence on each rank is training on one device."""

import pytest

from tests.context import trained
from tests.context.trained import assert_same_as_one_device
from tests.parity import long

SHORT = ["nano", "padded", "few_heads", "alibi", "smooth", "retention", "slopes"]
BUILDS = [
    name.removeprefix("build_")
    for name in vars(trained)
    if name.startswith("build_") and "dropout" not in name and "checkpointed" not in name
]


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in BUILDS])
def test_two_ranks(name):
    assert_same_as_one_device(getattr(trained, f"build_{name}"), {"context_parallel_size": 2})
