"""A module of 70 billion parameters on 1024 ranks, on the machine that runs the tests."""

import resource

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.dryrun import in_world, parse_cluster
from tests.parity import QUIET


class Lit(LightningModule):
    def __init__(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
                use_cache=False,
            )
        )

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


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
    assert took < 110, "seconds of CPU for all eight stages: under a minute on two cores"
