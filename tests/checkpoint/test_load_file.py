"""Modules of any kind that `configure_model` loads by `safetensors.torch.load_file`: ranks read their own bytes."""

import json
import re

import pytest
import safetensors.torch
import torch
from lightning.pytorch import seed_everything
from torch import nn

from tests.checkpoint.test_pretrained import Pretrained, fit, saved  # noqa: F401
from tests.parity import long
from tests.workers import WorkerError, run
from tests.zoo.base import Base

WIDTH = 16


class Net(nn.Module):
    """Blocks between a lookup table and a head that share a weight."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        make = lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Loaded(Base):
    """Its weights are in several files, under names with a prefix, the shared one once."""

    def __init__(self, folder, assign=False):
        super().__init__()
        self.folder, self.assign, self.net = folder, assign, None

    def configure_model(self):
        if self.net is None:
            self.net, state = Net(), {}
            for file in sorted(self.folder.glob("*.safetensors")):
                state |= safetensors.torch.load_file(file)
            state = {name.removeprefix("net."): value for name, value in state.items()}
            self.net.load_state_dict({**state, "head.weight": state["words.weight"]}, assign=self.assign)
            self.net.head.weight = self.net.words.weight  # `assign` makes two parameters

    def tensors(self):
        return (torch.randint(0, 32, (self.samples, 8), generator=torch.Generator().manual_seed(3)),)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].roll(1, 1).flatten())


@pytest.fixture
def folder(tmp_path):
    seed_everything(2, verbose=False)
    parts = [("words", Net().words), *((f"blocks.{n}", block) for n, block in enumerate(Net().blocks))]
    for name, part in parts:
        state = {f"net.{name}.{key}": value for key, value in part.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("world", "strategy", "assign"),
    [
        (2, {"zero_stage": 3}, False),
        long(2, {"zero_stage": 3}, True),
        (2, {"tensor_parallel_size": 2}, False),
        long(4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, False),
    ],
)
def test_ranks_read_their_own_bytes_and_train_as_one_device(world, strategy, assign, folder):
    (wanted,) = run(fit, Loaded, folder, 1, None, world=1)
    everywhere = run(fit, Loaded, folder, world, strategy, assign, world=world)
    vectors = sum(each.nbytes for each in Net().parameters() if each.dim() == 1)
    for got in everywhere:  # plans and proofs run on other numbers, but read vectors: at most nine times
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-4, atol=1e-5)
        assert got["own"] < got["read"] <= got["own"] + 9 * vectors
    if strategy == {"zero_stage": 3}:
        twice = Net().words.weight.nbytes if assign else 0  # in full on both ranks: two parameters have had its memory
        assert sum(got["read"] for got in everywhere) == twice + sum(each.nbytes for each in Net().parameters())


def _change(folder, change):
    file = folder / "blocks.2.safetensors"
    state = safetensors.torch.load_file(file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "missing":
        safetensors.torch.save_file({key: state[key] for key in list(state)[1:]}, file)
    elif change == "shape":
        safetensors.torch.save_file({**state, "net.blocks.2.0.weight": torch.zeros(3, WIDTH)}, file)
    else:
        file.unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cut", r"CheckpointError: .*blocks\.2\.safetensors is damaged or was cut short"),
        ("missing", r'Missing key\(s\) in state_dict: "blocks\.2\.0\.bias"'),
        ("shape", r"size mismatch for blocks\.2\.0\.weight: copying a param with shape torch\.Size\(\[3, 16\]\)"),
    ],
)
@pytest.mark.parametrize("strategy", [{"zero_stage": 3}], ids=str)
def test_wrong_files_are_errors_of_every_rank_before_training(change, words, strategy, folder):
    _change(folder, change)
    before = sorted(folder.iterdir())
    with pytest.raises(WorkerError) as raised:
        run(fit, Never, folder, 2, strategy, world=2)
    for rank in range(2):
        assert re.search(rf"(?s)rank {rank}.*{words}", str(raised.value))
    assert "training has begun" not in str(raised.value)
    assert sorted(folder.iterdir()) == before


class Never(Loaded):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training has begun")


def test_a_name_of_the_index_that_its_file_lacks_is_an_error_of_every_rank(saved):  # noqa: F811
    """transformers would start with random numbers there, and say so in a table of its log."""
    _, folder = saved()
    (index,) = folder.glob("*.index.json")
    name, file = next(iter(json.loads(index.read_text())["weight_map"].items()))
    state = safetensors.torch.load_file(folder / file)
    del state[name]
    safetensors.torch.save_file(state, folder / file, {"format": "pt"})
    with pytest.raises(WorkerError) as raised:
        run(fit, Pretrained, str(folder), 2, {"zero_stage": 3}, world=2)
    found = re.findall(rf"CheckpointError: {re.escape(str(folder / file))} lacks {re.escape(name)}", str(raised.value))
    assert len(found) >= 2
