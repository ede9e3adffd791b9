"""A small Hydra script, as a user has it. Each rank appends what it saw to the job's directory."""

import json
import os
import warnings

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
BATCH = 24
"""Samples of a step over all data ranks."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Small(LightningModule):
    def __init__(self, lr, fails):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 1)
        self.lr, self.fails = lr, fails
        self.losses, self.samples = [], []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.fails:
            raise RuntimeError("this job was made to fail")
        x, y, _ = batch
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.head(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, _, batch, batch_idx):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        self.samples.append(batch[2].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(config):
    seed_everything(config.seed, verbose=False)
    hydra_config = HydraConfig.get()
    trainer = hydra.utils.instantiate(config.trainer)
    fails = hydra_config.job.num == config.fail_job and trainer.global_rank == 1
    module = Small(config.lr, fails)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * BATCH, 8, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(len(x)))
    loader = DataLoader(data, batch_size=BATCH // trainer.strategy.layout.data_parallel_size)
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    seen = {
        "rank": trainer.global_rank, "world": torch.distributed.get_world_size(), "lr": config.lr,
        "data": trainer.strategy.coordinate.data, "samples": module.samples, "job": hydra_config.job.num,
        "overrides": list(hydra_config.overrides.task), "losses": module.losses, "pid": os.getpid(),
        "layout": str(trainer.strategy.layout),
    }  # fmt: skip
    with open(f"{hydra_config.runtime.output_dir}/seen.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
