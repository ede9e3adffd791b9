"""`make demo`: train a small GPT on several CPU processes, then the same module on one device, and compare.

The only difference between the two runs is the Trainer's strategy.
"""

import logging
import os
import time
import warnings

import torch
from gpt_from_scratch import ByteGPT, StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_3d import Strategy3D

STEPS = 40
DEVICES = 2


class Curve(Callback):
    """Remembers the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.began = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def train(devices: int, strategy: Strategy3D | str) -> tuple[ByteGPT, Curve, float]:
    seed_everything(1, verbose=False)
    curve, module = Curve(), ByteGPT()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, limit_train_batches=STEPS, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_model_summary=False, callbacks=[curve],
    )  # fmt: skip
    trainer.fit(module, datamodule=StandardLibrary())
    return module, curve, time.perf_counter() - curve.began


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        print(f"Training on {DEVICES} processes with Strategy3D(zero_stage=1) ...")
    many, curve, seconds = train(DEVICES, Strategy3D(zero_stage=1))
    if not first:
        return
    torch.distributed.destroy_process_group()
    print("The same module on one device ...")
    one, reference, alone = train(1, "auto")
    report(curve.losses, reference.losses)
    largest = max(float((a - b).abs().max()) for a, b in zip(many.parameters(), one.parameters(), strict=True))
    worst = max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))
    print(f"\nlargest difference of a loss over {STEPS} steps: {worst:.1e}, of a final weight: {largest:.1e}")
    print(f"{DEVICES} processes: {seconds:.1f} s; one device: {alone:.1f} s (processes share this machine's cores)")


def report(many: list[float], one: list[float]) -> None:
    top = max(one)
    print(f"\n{'step':>5} {'Strategy3D':>11} {'one device':>11}")
    for step in range(0, STEPS, max(1, STEPS // 12)):
        bar = "█" * round(36 * one[step] / top)
        print(f"{step:>5} {many[step]:>11.5f} {one[step]:>11.5f}  {bar}")


if __name__ == "__main__":
    main()
