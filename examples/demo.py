"""`make demo`: train a small GPT in 3D on several CPU processes, then on one, and compare.

The only difference between the two runs is the Trainer's strategy. Before the first the planner says what a step will
take and a rank hold; afterwards stands beside it what was measured.
"""

import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from forecast import beside_the_plan, forecast
from gpt_from_scratch import ByteGPT, StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_3d import Layout, Strategy3D

STEPS, BATCH, MICROBATCHES = 30, 16, 4
SIZES = {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}


class Notes(Callback):
    """Writes down the loss of every step, and what each rank holds and takes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.losses: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        # a file of each rank: `all_gather` is over the data ranks, which have the same stage
        held = sum(map(local_bytes, states_of(trainer, module)))
        self.file.with_suffix(f".held{trainer.global_rank}").write_text(str(held))
        step = median(after - before for before, after in pairwise(self.ends))
        if trainer.is_global_zero:
            self.file.write_text(json.dumps({"losses": self.losses, "step": step}))


def states_of(trainer: Trainer, module: LightningModule) -> Iterator[Tensor]:
    """Weights, gradients and optimizer states that are on this rank."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)


def local_bytes(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return 0 if local.is_meta else local.numel() * local.element_size()


def train(devices: int, strategy: Strategy3D | str, file: Path) -> tuple[ByteGPT, dict[str, Any]]:
    seed_everything(1, verbose=False)
    module = ByteGPT()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, limit_train_batches=STEPS, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_model_summary=False, callbacks=[Notes(file)],
    )  # fmt: skip
    trainer.fit(module, datamodule=StandardLibrary(batch_size=BATCH))
    held = [int(each.read_text()) for each in file.parent.glob(f"{file.stem}.held*")]
    return module, {**json.loads(file.read_text()), "held": held}


def only_ours(record: logging.LogRecord) -> bool:
    """Of all that is said at start, let through what the strategy says."""
    return record.getMessage().startswith(("Strategy3D", "one optimizer step"))


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module="lightning_3d")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").handlers[0].addFilter(only_ours)
    layout = Layout(**SIZES, num_microbatches=MICROBATCHES)
    planned = forecast(layout, batch=BATCH)
    print(f"The planner expects {planned.time.total * 1e3:.0f} ms for a step of {layout.world_size} processes here.\n")
    # forked, so that torch is imported once for all of them
    strategy = Strategy3D(**SIZES, num_microbatches=MICROBATCHES, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        many, in_3d = train(layout.world_size, strategy, Path(folder) / "3d.json")
        print("\nThe same module on one device ...")
        one, alone = train(1, "auto", Path(folder) / "one.json")
    report(in_3d["losses"], alone["losses"])
    picture = draw(in_3d["losses"], alone["losses"], Path("build/demo/losses.svg"))
    largest = max(float((a - b).abs().max()) for a, b in zip(many.parameters(), one.parameters(), strict=True))
    worst = max(abs(a - b) for a, b in zip(in_3d["losses"], alone["losses"], strict=True))
    print(f"\nlargest difference of a loss over {STEPS} steps: {worst:.1e}, of a final weight: {largest:.1e}")
    print(f"\n{beside_the_plan(planned, in_3d['held'], in_3d['step'])}")
    print(f"One device takes {alone['step'] * 1e3:.0f} ms and holds {alone['held'][0] / 1e6:.2f} MB. ", end="")
    print(f"{layout.world_size} processes share this machine's {os.cpu_count()} cores: this is not about speed.")
    print(f"\nBoth curves: {picture}")
    print("Next: the same with your own module (README.md), or docs/choose.md for the layout that it needs.")


def draw(many: list[float], one: list[float], file: Path) -> Path:
    """Draw both curves on top of each other, as SVG."""
    high, low = max(one + many), min(one + many)

    def line(losses: list[float], style: str) -> str:
        places = (
            f"{50 + 540 * at / (len(losses) - 1):.1f},{230 - 200 * (loss - low) / (high - low):.1f}"
            for at, loss in enumerate(losses)
        )
        return f'<polyline points="{" ".join(places)}" fill="none" {style}/>'

    wide, thin = 'stroke="#f5b57a" stroke-width="7"', 'stroke="#1f4e79" stroke-width="2"'
    names = [(wide, "one device"), (thin, "data 2 x tensor 2 x pipeline 2, eight processes")]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 610 270" font-family="sans-serif" font-size="13">',
        '<rect width="610" height="270" fill="white"/>',
        '<path d="M50 20V240H600" fill="none" stroke="#999"/>',
        f'<text x="8" y="36">{high:.2f}</text><text x="8" y="234">{low:.2f}</text>',
        f'<text x="50" y="258">step 0</text><text x="548" y="258">step {len(one) - 1}</text>',
        *(line(losses, style) for losses, (style, _) in zip((one, many), names, strict=True)),
        *(f'<path d="M250 {y}h30" {style}/><text x="290" y="{y + 4}">{name}</text>'
          for y, (style, name) in zip((40, 64), names, strict=True)),
        "</svg>",
    ]  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts) + "\n")
    return file


def report(many: list[float], one: list[float]) -> None:
    """Print some losses of both, one beside the other."""
    top = max(one)
    print(f"\n{'step':>5}  {'in 3D':<33}  one device")
    for step in range(0, STEPS, STEPS // 5):
        cells = (f"{losses[step]:.5f} {'█' * round(24 * losses[step] / top):<25}" for losses in (many, one))
        print(f"{step:>5}  {'  '.join(cells)}".rstrip())


if __name__ == "__main__":
    main()
