"""The page of packages: a batch that a pipeline refuses, and the function that makes one which it cuts by samples."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.microbatch import Rows
from tests.docs.pages import blocks

COUNT = 8
LENGTHS = [3, 5, 4, 6, 3, 5, 4, 4]


def page():
    names = {"torch": torch, "pad_sequence": pad_sequence, "Dataset": Dataset}
    for (code,) in (block.values for block in blocks("py") if block.id.startswith("docs/packages.md")):
        if "lightning_3d" not in code:
            exec(compile(code, "packages.md", "exec"), names)
    return SimpleNamespace(**names)


def graphs():
    ring = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in LENGTHS]
    made = [
        SimpleNamespace(x=torch.randn(n, 4), edge_index=edges, y=torch.ones(()))
        for n, edges in zip(LENGTHS, ring, strict=True)
    ]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    edges = torch.cat([graph.edge_index + start for graph, start in zip(made, starts, strict=False)], 1)
    owner = torch.repeat_interleave(torch.arange(COUNT), torch.tensor(LENGTHS))
    return (torch.cat([graph.x for graph in made]), edges, owner), page().graphs_to_batch(made)


def forecasting():
    series = [torch.randn(n) for n in LENGTHS]
    windows = page().Windows(series, 3)
    joined = torch.cat([each.unfold(0, 3, 1) for each in series])
    assert torch.equal(torch.stack([windows[index] for index in range(len(windows))]), joined)
    return (joined, joined[:, 0]), torch.stack([windows[index] for index in range(COUNT)])


def speech():
    samples = [(torch.randn(50), torch.ones(n)) for n in LENGTHS]
    joined = torch.cat([text for _, text in samples])
    return (joined, joined, torch.tensor(LENGTHS)), page().utterances_to_batch(samples)


def segmentation():
    samples = [(torch.randn(n, 3, 4, 4), torch.zeros(n, 4, 4)) for n in LENGTHS]
    return tuple(map(torch.cat, zip(*samples, strict=True))), page().crops_to_batch(samples)


@pytest.mark.parametrize("kind", [graphs, forecasting, speech, segmentation])
def test_a_batch_that_is_refused_can_be_made_by_samples(kind):
    refused, taken = kind()
    with pytest.raises(UnsupportedError, match=f"promises {COUNT} samples in a batch"):
        Rows.of(refused, COUNT, nn.Linear(1, 1))
    rows = Rows.of(taken, COUNT, nn.Linear(1, 1))
    assert rows.count(taken) == COUNT
    parts = rows.take(taken, COUNT, 2, 4)
    for part, full in zip(fields(parts), fields(taken), strict=True):
        assert len(part) == 2 and all(map(torch.equal, part, full[2:4]))


def fields(batch):
    return (batch,) if isinstance(batch, torch.Tensor) else batch
