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


class Small(LightningModule):
    def __init__(self, lr, fail_on):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.lr, self.fail_on, self.losses = lr, fail_on, []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == self.fail_on:
            raise RuntimeError("this job was made to fail")
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, *_):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(config):
    seed_everything(config.seed, verbose=False)
    module = Small(config.lr, config.fail_on)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=generator)
    trainer = hydra.utils.instantiate(config.trainer)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // trainer.strategy.layout.data_parallel_size
    )
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    hydra_config = HydraConfig.get()
    seen = {
        "rank": trainer.global_rank, "world": torch.distributed.get_world_size(), "lr": config.lr,
        "samples": trainer.strategy.distributed_sampler_kwargs["num_replicas"], "job": hydra_config.job.num,
        "overrides": list(hydra_config.overrides.task), "losses": module.losses, "pid": os.getpid(),
        "layout": str(trainer.strategy.layout),
    }  # fmt: skip
    with open(f"{hydra_config.runtime.output_dir}/seen.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
