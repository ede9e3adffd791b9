"""`make demo`: train a small GPT in 3D on four CPU processes, then the same module on one device, and compare.

The only difference between the two runs is the Trainer's strategy.
"""

import logging
import os
import time
import warnings

import torch
from gpt_from_scratch import ByteGPT, StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_3d import Strategy3D

STEPS = 30
DEVICES = 4


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
        gradient_clip_val=1.0, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[curve, TQDMProgressBar(refresh_rate=2)],
    )  # fmt: skip
    trainer.fit(module, datamodule=StandardLibrary())
    return module, curve, time.perf_counter() - curve.began


def only_the_layout(record: logging.LogRecord) -> bool:
    """Of all that is said at start, let through which rank holds what."""
    return record.getMessage().startswith("Strategy3D")


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").handlers[0].addFilter(only_the_layout)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        print(f"Starting {DEVICES} processes; each imports torch first ...")
    many, curve, seconds = train(DEVICES, Strategy3D(tensor_parallel_size=2, pipeline_parallel_size=2))
    if not first:
        return
    torch.distributed.destroy_process_group()
    print("\nThe same module on one device ...")
    one, reference, alone = train(1, "auto")
    report(curve.losses, reference.losses)
    largest = max(float((a - b).abs().max()) for a, b in zip(many.parameters(), one.parameters(), strict=True))
    worst = max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))
    print(f"\nlargest difference of a loss over {STEPS} steps: {worst:.1e}, of a final weight: {largest:.1e}")
    print(f"{DEVICES} processes: {seconds:.1f} s; one device: {alone:.1f} s (processes share this machine's cores)")


def report(many: list[float], one: list[float]) -> None:
    top = max(one)
    print(f"\n\n{'step':>5}  {'tensor 2 x pipeline 2':<33}  one device")
    for step in range(0, STEPS, max(1, STEPS // 10)):
        cells = (f"{losses[step]:.5f} {'█' * round(24 * losses[step] / top):<25}" for losses in (many, one))
        print(f"{step:>5}  {'  '.join(cells)}".rstrip())


if __name__ == "__main__":
    main()
