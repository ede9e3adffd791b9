"""A job under Ray Train: `python -m tests.launch.ray_job FOLDER '{"workers": 8, ...}'`.

Each worker writes what it trained to FOLDER/rank-N.pt. On its first start the job loses one worker.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.parity import QUIET
from tests.zoo.language import GPT

EPOCHS, VICTIM = 3, 1


class Losses(Callback):
    """The losses of this start, and the end of one worker in the last epoch of the first start."""

    def __init__(self, folder, kill):
        self.folder, self.kill, self.losses = Path(folder), kill, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses[trainer.global_step] = float(trainer.callback_metrics["loss"])
        if self.kill and trainer.global_rank == VICTIM and trainer.current_epoch == EPOCHS - 1:
            mark = self.folder / "killed"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def train(folder, strategy, callbacks=(), path=None, **flags):
    """Fit on this worker, or on one device where `strategy` is None. The losses by step, and the weights."""
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    losses = Losses(folder, kill=strategy is not None)
    chosen = "auto" if strategy is None else Strategy3D(**strategy, quiet=True, timeout=120)
    trainer = Trainer(**{**QUIET, **flags}, max_epochs=EPOCHS, strategy=chosen, callbacks=[losses, *callbacks])
    module = GPT()
    trainer.fit(module, ckpt_path=path)
    return {"losses": losses.losses, "weights": dict(module.state_dict()), "world": trainer.world_size}


def work(config):
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    folder, strategy = config["folder"], config["strategy"]
    flags = {"devices": "auto", "plugins": [RayLightningEnvironment()]}
    if "resume" in strategy:  # Lightning's callback saves, and the strategy finds what it has saved
        keep = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=2)
        found = train(folder, strategy, [keep], enable_checkpointing=True, **flags)
    else:
        checkpoint = ray.train.get_checkpoint()
        with checkpoint.as_directory() if checkpoint is not None else nullcontext() as saved:
            path = None if saved is None else f"{saved}/{RayTrainReportCallback.CHECKPOINT_NAME}"
            found = train(folder, strategy, [RayTrainReportCallback()], path, **flags)
    torch.save(found, f"{config['folder']}/rank-{ray.train.get_context().get_world_rank()}.pt")


def main(folder, config):
    import ray
    from ray import train as ray_train
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=config["workers"], include_dashboard=False)
    trainer = TorchTrainer(
        work,
        train_loop_config={**config, "folder": folder},
        scaling_config=ray_train.ScalingConfig(num_workers=config["workers"]),
        run_config=ray_train.RunConfig(
            name="job", storage_path=f"{folder}/storage", failure_config=ray_train.FailureConfig(max_failures=1)
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
