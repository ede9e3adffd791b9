"""Cutting batches of any nesting and joining what steps return."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from lightning_3d.data.same_samples import checksum
from lightning_3d.pipeline.microbatch import (
    TENSORS,
    Rows,
    auto_microbatches,
    microbatch_sizes,
    signature,
    split_batch,
    split_sizes,
)
from lightning_3d.sandbox.trees import join_outputs, rebuild
from tests.parity import assert_parity
from tests.zoo.plain import MLP

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


def test_every_nesting_is_cut_along_the_batch_only():
    batch = {
        "x": torch.arange(6).view(6, 1),
        "pair": Pair(torch.arange(6), None),
        "sample": Sample(torch.arange(12).view(6, 2), "one"),
        "captions": [str(index) for index in range(6)],
        "boxes": [{"box": torch.zeros(index + 10, 4)} for index in range(6)],
        "weights": torch.ones(3),
        "fields": [torch.arange(6), torch.arange(6)],
        "scalar": torch.tensor(2.0),
        "nothing": None,
    }
    assert TENSORS.count(batch) == 6
    first, second = split_batch(batch, [4, 2])
    assert second["x"].flatten().tolist() == [4, 5]
    assert second["pair"].left.tolist() == [4, 5]
    assert isinstance(second["sample"], Sample)
    assert second["sample"].image.shape == (2, 2)
    assert first["captions"] == ["0", "1", "2", "3"]
    assert [len(box["box"]) for box in second["boxes"]] == [14, 15]
    assert second["weights"].shape == (3,)
    assert [field.tolist() for field in second["fields"]] == [[4, 5], [4, 5]]
    assert second["scalar"] == 2
    assert second["nothing"] is None


def test_what_cannot_be_cut_stays_whole():
    assert TENSORS.count({"x": torch.zeros(4, 1), "graph": object()}) is None
    assert TENSORS.count([1, "a", None]) is None
    assert split_batch("anything", [1]) == ["anything"]


def test_a_mapping_keeps_its_type():
    from transformers import BatchEncoding

    cut = split_batch(BatchEncoding({"input_ids": torch.arange(4)}), [3, 1])
    assert isinstance(cut[1], BatchEncoding)
    assert cut[1]["input_ids"].tolist() == [3]
    assert rebuild(Pair(1, 2), [3, 4]) == Pair(3, 4)


@given(rows=st.integers(1, 60), pieces=st.integers(1, 20))
def test_sizes(rows, pieces):
    sizes = split_sizes(rows, pieces)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, pieces)
    assert max(sizes) - min(sizes) <= 1


@given(rows=st.integers(1, 100), stages=st.integers(2, 8))
def test_auto(rows, stages):
    count = auto_microbatches(rows, stages)
    assert min(rows, stages) <= count <= min(rows, 4 * stages)


def test_outputs_are_joined():
    outputs = [
        {"loss": torch.tensor(1.0), "logits": torch.ones(3, 2), "names": ["a", "b", "c"], "n": 7, "rate": 1.0},
        {"loss": torch.tensor(5.0), "logits": torch.zeros(1, 2), "names": ["d"], "n": 7, "rate": 5.0},
    ]
    assert join_outputs([3, 3], [3, 2]) == 3
    assert join_outputs([3, 2], [3, 2]) == join_outputs([4, 1], [3, 2]) == 5, "rows, and a count of some of them"
    assert join_outputs([torch.tensor(2)] * 2, [3, 2]) == 4, "a count that happens to be the same"
    assert join_outputs([["a"], []], [1, 1]) == ["a"], "what a mask leaves over"
    assert join_outputs([{"a": 1.0}, {"a": 3.0, "b": 2.0}], [3, 1]) == {"a": 1.5, "b": 2.0}, "a key for each class"
    joined = join_outputs(outputs, [3, 1])
    assert joined["loss"] == 2.0
    assert joined["logits"].shape == (4, 2)
    assert joined["names"] == ["a", "b", "c", "d"]
    assert (joined["n"], joined["rate"]) == (7, 2.0)


def test_no_row_of_an_output_is_lost():
    def joined(*outputs):
        return join_outputs(list(outputs), [2, 1]).tolist()

    assert joined(torch.arange(6), torch.arange(3)) == [0, 1, 2, 3, 4, 5, 0, 1, 2], "tokens, three for each sample"
    assert joined(torch.arange(5.0), torch.arange(1.0)) == [0, 1, 2, 3, 4, 0], "those that a mask leaves over"
    assert joined(torch.zeros(4), torch.full((4,), 3.0)) == [1, 1, 1, 1], "a mean for each class"
    assert joined(torch.arange(4), torch.arange(4)) == [0, 1, 2, 3], "the same for every microbatch"
    assert joined(torch.zeros(1).long(), torch.ones(1).long()) == [0, 1]
    assert joined(np.array([0, 1]), np.array([2])) == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [{"x": torch.zeros(2, 4)}, {"x": torch.zeros(2, 3).double()}, {"y": torch.zeros(2, 3)}, [torch.zeros(2, 3)]],
)
def test_signatures_distinguish_shapes_and_types(other):
    one = {"x": torch.zeros(2, 3)}
    assert signature(one) == signature({"x": torch.ones(2, 3)})
    assert signature(one) != signature(other)


@pytest.mark.parametrize("sort", [True, False])
def test_a_batch_with_packed_sequences_stays_whole(sort):
    sequences = [torch.ones(length, 2) for length in (4, 3, 1)]
    batch = {"x": [pack_sequence(sequences, enforce_sorted=sort)], "y": torch.arange(3)}
    assert TENSORS.count(batch) is None
    assert checksum(batch) != checksum({**batch, "x": [pack_sequence(sequences[:2])]})


class Popping(MLP):
    """Takes its batch apart, as steps around Hugging Face models do."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def loss(self, batch):
        y = batch.pop("y")
        return F.mse_loss(self.net(batch.pop("x")) * self.scale, y)


def test_a_step_may_take_its_batch_apart():
    assert_parity("tests.pipeline.test_microbatch:Popping", 2, {"pipeline_parallel_size": 2})


@pytest.mark.parametrize(("kind", "smallest"), [(torch.nn.LazyLinear, 1), (torch.nn.BatchNorm1d, 2)])
def test_what_normalizes_over_rows_gets_no_microbatch_of_one(kind, smallest):
    batch, module = torch.zeros(8, 3), kind(3)
    assert min(microbatch_sizes(batch, "auto", 4, Rows.of(batch, None, module))) == smallest
