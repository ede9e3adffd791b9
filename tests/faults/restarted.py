"""The script of a job that torchrun restarts: one rank is killed in the first attempt. Nothing in it says so but resume."""

import os
import signal
import sys
import warnings

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.faults.drill import Net


class KillOnce(Callback):
    def on_train_start(self, trainer, module):
        print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} begins at {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.global_rank == 1 and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=Strategy3D(resume="auto", timeout=30, quiet=True), max_steps=8,
        max_epochs=-1, default_root_dir=folder, callbacks=[KillOnce(), ModelCheckpoint(every_n_train_steps=2)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net())
    print(f"ended at {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
