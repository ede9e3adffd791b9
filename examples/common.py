"""The command line that the examples share: one Trainer, of which only the strategy differs."""

import argparse
from collections.abc import Callable

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything


def run(module: Callable[[], LightningModule], data: Callable[[], LightningDataModule], about: str | None) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="auto, ddp, 3d, 3d_zero1 ...")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor_parallel_size, with --strategy 3d")
    parser.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline_parallel_size")
    parser.add_argument("--context", type=int, default=1, metavar="N", help="context_parallel_size")
    parser.add_argument("--experts", type=int, default=1, metavar="N", help="expert_parallel_size")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    strategy = given.strategy
    if strategy.startswith("3d"):
        from lightning_3d import Strategy3D

        strategy = Strategy3D(
            tensor_parallel_size=given.tensor,
            pipeline_parallel_size=given.pipeline,
            context_parallel_size=given.context,
            expert_parallel_size=given.experts,
            zero_stage=int(strategy[-1]) if strategy[-1].isdigit() else 1,
        )
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=strategy, devices=given.devices, accelerator="cpu", max_steps=given.steps, max_epochs=-1,
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module(), datamodule=data())


if __name__ == "__main__":
    raise SystemExit("This file is used by the other examples.")
