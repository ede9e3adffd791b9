"""Set-up of one rank takes no more time and memory on 4096 ranks than on 8, nor for many blocks than for few."""

import json
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.module.host_memory import peak_bytes
from lightning_3d.ranks import talk
from lightning_3d.sandbox import build_recorder
from lightning_3d.tools.dryrun import in_world, parse_cluster
from tests.bench.modules import Task, Training
from tests.dryrun.compare import dry
from tests.parity import QUIET, long, make_trainer
from tests.workers import run
from tests.zoo import MODULES

LAYOUTS = {
    "zero1": {"zero_stage": 1},
    "zero3": {"zero_stage": 3},
    "tensor2 x pipeline2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4},
}
WIDTH, ROWS = 256, 1024
BLOCK = 8 * WIDTH * WIDTH
"""Parameters."""


class Clock(Callback):
    """Writes CPU seconds and memory of the simulated rank when its set-up has ended."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, *_):
        cpu = time.process_time()
        self.path.write_text(json.dumps({"cpu": cpu, "memory": peak_bytes(torch.device("cpu"))}))


def spent(layout, ranks, path):
    data = ranks // layout.get("tensor_parallel_size", 1) // layout.get("pipeline_parallel_size", 1)
    task = Task(width=WIDTH, blocks=4, rows=4 * data, length=16)
    task.load()
    flags = {name: value for name, value in QUIET.items() if name != "use_distributed_sampler"}
    with in_world(parse_cluster(str(ranks))) as world:
        world.ranks = [0]
        Trainer(**flags, strategy=Strategy3D(**layout), callbacks=[Clock(path)]).fit(Training(task, 3))
        (report,) = world.reports
    (rank,) = report.ranks
    assert rank.error is None, rank.error
    return {**json.loads(path.read_text()), "states": rank.parameters + rank.optimizer, "setup_peak": rank.setup_peak}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_set_up_is_flat_from_8_to_4096_ranks(name, tmp_path):
    found = {ranks: spent(LAYOUTS[name], ranks, tmp_path / "spent.json") for ranks in (8, 64, 512, 4096)}
    print(name, json.dumps(found))
    few, many = found[8], found[4096]
    assert many["states"] <= few["states"]
    assert many["setup_peak"] <= 1.02 * few["setup_peak"]
    assert many["memory"] <= few["memory"] + 20e6, "bytes of the process"
    assert many["cpu"] <= 1.3 * few["cpu"] + 0.5, "seconds"


def gathers():
    """Sizes of the groups in which objects of all ranks were sent to all ranks, until the first batch."""
    sizes, original = [], talk.gather

    def counted(value, group=None):
        sizes.append(torch.distributed.get_world_size(group))
        return original(value, group)

    talk.gather = counted
    try:
        make_trainer(4, {"zero_stage": 1}, quiet=True, max_steps=1, limit_val_batches=0).fit(MODULES["GPT"]())
    finally:
        talk.gather = original
    return sizes


def test_ranks_that_agree_send_no_message_to_each():
    assert [sizes for sizes in run(gathers, world=4) if 4 in sizes] == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Few(LightningModule):
    count = 4

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block() for _ in range(self.count))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4 * ROWS, WIDTH)), batch_size=ROWS)


class Many(Few):
    count = 24


@pytest.mark.parametrize("precision", [long("32-true"), "bf16-mixed"])
def test_memory_before_training_does_not_grow_with_the_blocks(precision, monkeypatch):
    monkeypatch.setattr(build_recorder, "ROOM", 4 * BLOCK)
    above = []
    for name in ("Few", "Many"):
        strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
        report = dry(f"tests.dryrun.test_growth:{name}", "1x4xcpu", strategy, {"precision": precision}, [0])
        (rank,) = report.ranks
        assert rank.error is None
        above.append(rank.setup_peak - rank.parameters)
    assert above[1] <= above[0], "besides its shards"
