"""The GPT of gpt_from_scratch.py under Ray Train. Ray starts the workers, and starts them again after a failure.

pip install "lightning-3d[ray]"

Eight workers, 3D:   python examples/ray_train.py --workers 8 --tensor 2 --pipeline 2
On GPUs:             python examples/ray_train.py --workers 8 --tensor 2 --pipeline 2 --gpu

The checkpoint of the last complete epoch goes to --storage. A worker that is killed costs the epoch since then.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
from gpt_from_scratch import ByteGPT, StandardLibrary
from lightning.pytorch import Trainer, seed_everything
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer


def run(config: dict[str, Any]) -> None:
    """Train on this worker. Ray calls it on all workers, and again on new ones after a failure."""
    from lightning_3d import Strategy3D

    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="auto",
        devices="auto",
        max_epochs=config["epochs"],
        strategy=Strategy3D(tensor_parallel_size=config["tensor"], pipeline_parallel_size=config["pipeline"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint is not None else nullcontext() as folder:
        path = None if folder is None else f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}"
        trainer.fit(ByteGPT(width=64), datamodule=StandardLibrary(limit=config["bytes"]), ckpt_path=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2, metavar="N", help="tensor_parallel_size")
    parser.add_argument("--pipeline", type=int, default=2, metavar="N", help="pipeline_parallel_size")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=100_000, help="of the text")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", default="ray_results", help="a folder that all nodes see, or s3://...")
    given = parser.parse_args()
    if not given.gpu and not ray.is_initialized():
        ray.init(num_cpus=given.workers)  # workers may be more than cores
    trainer = TorchTrainer(
        run,
        train_loop_config=vars(given),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=ray.train.RunConfig(
            name="gpt",
            storage_path=given.storage if "://" in given.storage else str(Path(given.storage).resolve()),
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} steps, saved in {result.checkpoint}")


if __name__ == "__main__":
    main()
