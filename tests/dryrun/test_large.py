"""Modules of 70 billion parameters on the machine that runs the tests."""

import resource
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.axes import ring
from lightning_3d.sandbox import build_recorder, deferred
from lightning_3d.tools.dryrun import in_world, parse_cluster
from lightning_3d.zero import shard_units
from tests.dryrun.compare import FLAGS, real_rank
from tests.parity import QUIET
from tests.workers import run

SIZES = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
"""Of a Llama with 80 layers: a block has 855,654,400 parameters."""


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = _llama(1)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Late(Lit):
    """Built for the ranks that get their parts. Each width, and the tokens, are `scale` times smaller."""

    scale = 1

    def __init__(self):
        LightningModule.__init__(self)
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = _llama(self.scale)

    def train_dataloader(self):
        return DataLoader(torch.zeros(256, 4096 // self.scale, dtype=torch.int64), batch_size=1)


class Small(Late):
    """Weights, activations and messages are 1024 times smaller: each grows with the product of two widths."""

    scale = 32


def _llama(scale):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: size // scale for name, size in SIZES.items()}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=80, use_cache=False))


@pytest.mark.long
def test_seventy_billion_parameters_take_little_memory_and_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with in_world(parse_cluster("128x8xh100")) as world:
        world.ranks = [128 * stage for stage in range(8)]
        module = Lit()
        strategy = Strategy3D(tensor_parallel_size=8, pipeline_parallel_size=8)
        batches = DataLoader(torch.zeros(2048, 4096, dtype=torch.int64), batch_size=8)
        Trainer(**QUIET, precision="bf16-mixed", strategy=strategy).fit(module, batches)
        (report,) = world.reports
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [rank.rank for rank in report.ranks] == [128 * stage for stage in range(8)]
    assert all(rank.error is None for rank in report.ranks)
    # a block has 855,654,400 parameters, of which two norms of 8192 are not divided over the tensor ranks
    middle = report.ranks[3]
    block = 4 * ((855_654_400 - 2 * 8192) // 8 + 2 * 8192)
    assert middle.parameters == 10 * block // 16
    assert middle.peak < report.ranks[0].peak  # the first stage keeps most microbatches in flight
    assert spent.ru_maxrss < 4e6, "kilobytes of the largest child"
    took = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
    assert took < 165, "seconds of CPU for all eight stages: a minute and a half on two cores"


FOUR = {"tensor_parallel_size": 2, "zero_stage": 3}
LIMITS = ((build_recorder, "ROOM"), (deferred, "SMALL"), (shard_units, "APART_BYTES"), (ring, "SMALL_BYTES"))
"""Bytes by which code decides, as much smaller in the small run as everything else."""


STAGED = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def _small_rank(strategy):
    with ExitStack() as changes:
        for module, name in LIMITS:
            changes.enter_context(patch.object(module, name, getattr(module, name) // Small.scale**2))
        return real_rank("tests.dryrun.test_large:Small", strategy, {})


def _dry_rank(cluster, strategy, rank=0):
    """The report of a rank, and the memory of the process and of the simulated rank."""
    with in_world(parse_cluster(cluster)) as world:
        world.ranks = [rank]
        Trainer(**FLAGS, strategy=Strategy3D(**strategy)).fit(Late())
        (report,) = world.reports
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return report.ranks[0], sum(1024 * resource.getrusage(kind).ru_maxrss for kind in kinds)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [FOUR, STAGED], ids=["zero3", "pipeline"])
def test_seventy_billion_parameters_peak_as_real_ranks_do_in_the_small(strategy):
    """On the same four ranks: states, and the peaks of set-up and of a step."""
    ((said, _),) = run(_dry_rank, "1x4xcpu", strategy, 3, world=1, timeout=900, fresh=True)
    assert said.error is None
    found = run(_small_rank, strategy, world=4, timeout=900, fresh=True)[-1]  # rank 0 proves the plan too
    for what in ("parameters", "gradients", "optimizer", "setup_peak", "peak"):
        assert getattr(said, what) == pytest.approx(found[what] * Small.scale**2, rel=0.02), what


@pytest.mark.long
def test_seventy_billion_parameters_are_built_in_parts_in_little_memory():
    """Tensor 8 and ZeRO 3 on 64 ranks. Before training a rank has at most its shards and one matrix."""
    ((said, own),) = run(_dry_rank, "8x8xh100", {**FOUR, "tensor_parallel_size": 8}, world=1, timeout=900, fresh=True)
    assert said.error is None
    matrix = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    ends, blocks = 2 * matrix, 4 * 70_553_706_496 - 2 * matrix  # the embedding and the head: not over tensor ranks
    assert said.parameters == pytest.approx(ends / 8 + blocks / 64, rel=0.01)
    assert said.setup_peak < 1.02 * (said.parameters + matrix)
    assert own < 4e9
