"""Each layout trains, sends and tries out steps as it was recorded before the package was put in order."""

import json
from pathlib import Path

import pytest

from tests.parity import in_turn, long
from tests.yardsticks.measure import LAYOUTS, measure

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
BF16 = [name for name in RECORDED if name.endswith("-bf16")]
ENCODER = [long(name) for name in RECORDED if name.startswith("Encoder")]


def tensors(rows):
    """Rows of the ledger without the bytes of pickled objects, which hold the names of our own modules."""
    return [[*row[:3], None] if row[:2] == ["pipeline_parallel", "broadcast"] else row for row in rows]


@pytest.mark.parametrize("name", in_turn([*(f"GPT-{layout}" for layout in LAYOUTS), *BF16, *ENCODER], 3))
def test_layout_is_as_recorded(name):
    kind, layout, *precision = name.split("-")
    close = 5e-4 if precision else 1e-5  # products of bf16 are rounded otherwise by other models of CPU (6e-5)
    rows = measure(kind, layout, "bf16-mixed" if precision else "32-true")
    for rank, (got, wanted) in enumerate(zip(rows, RECORDED[name], strict=True)):
        assert tensors(got["sent"]) == tensors(wanted["sent"]), f"rank {rank} sends something else"
        assert got["losses"] == pytest.approx(wanted["losses"], rel=close)
        assert got["weights"] == pytest.approx(wanted["weights"], rel=close)
        assert all(runs <= before for runs, before in zip(got["runs"], wanted["runs"], strict=True)), (
            f"training_step runs more often (before, in the first, in the last batch): {got['runs']}"
        )


@pytest.mark.parametrize(("layout", "stages"), [("pipeline", 2), ("interleaved", 4), ("tensor_pipeline", 2)])
def test_few_runs_before_the_first_step(layout, stages):
    """At most 7 + stages: the uncut run, the test of the loss, a second step, the proof. One more for tensor ranks."""
    for row in RECORDED[f"GPT-{layout}"]:
        assert row["runs"][0] <= 7 + stages + ("tensor" in layout)
