"""A GPT of 310M parameters on GPUs beside plain Lightning and DDP: `python -m tests.bench.bench_gpu`.

For each layout that fits the devices: tokens a second, MFU, peak of memory next to the plan, and the share of the time
of messages in which the device also computes. Without a GPU it prints so and measures nothing; `--small` runs the
same code on CPUs, whose numbers say nothing about GPUs.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.tools.planner.local_cluster import device_peak
from tests.bench.meter import wait
from tests.parity import QUIET
from tests.workers import run

WARM, STEPS, TRACED = 10, 30, 3
LAYOUTS = {
    1: {"plain Lightning": None, **{f"zero{stage}": {"zero_stage": stage} for stage in (0, 1, 3)}},
    2: {
        "ddp": "ddp",
        **{f"zero{stage}": {"zero_stage": stage} for stage in (0, 1, 2, 3)},
        "tensor": {"tensor_parallel_size": 2},
        "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 8},
    },
    4: {
        "ddp": "ddp",
        "hybrid": {"zero_stage": 3, "zero_shard_size": 2},
        "interleaved": {"pipeline_parallel_size": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "3d": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    },
}
"""Devices -> layouts. The first of each number is the base of the ratios."""


class Large(LightningModule):
    """310M parameters: 22 blocks of width 1024."""

    def __init__(self, width=1024, blocks=22, vocabulary=32000, length=1024, batch=8):
        super().__init__()
        self.sizes = vocabulary, length, batch
        self.embed = nn.Embedding(vocabulary, width)
        layer = {"d_model": width, "nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True, activation="gelu")
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch, batch_idx):
        x = self.embed(batch[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def train_dataloader(self):
        vocabulary, length, batch = self.sizes
        samples = torch.randint(0, vocabulary, (batch * 4 * (WARM + STEPS + TRACED), length + 1))
        return DataLoader(list(samples), batch_size=batch)

    def configure_optimizers(self):
        fused = next(self.parameters()).is_cuda
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=fused)


SMALL = {"width": 64, "blocks": 4, "vocabulary": 100, "length": 16, "batch": 8}


class Clock(Callback):
    """Seconds of a step, over steps between which the host waits for nothing, then a trace of the last ones."""

    def __init__(self, folder):
        self.seconds, self.path, self.profiler = 0.0, Path(folder) / "trace.json", None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            wait()
            self.began = perf_counter()
        if batch_idx == WARM + STEPS:
            wait()
            self.seconds = (perf_counter() - self.began) / STEPS
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
            self.profiler.__enter__()

    def on_train_end(self, trainer, module):
        wait()
        self.profiler.__exit__(None, None, None)
        self.profiler.export_chrome_trace(str(self.path))


def measure(strategy, devices: int, small: bool, **sizes) -> dict:
    """Seconds of a step, peak and planned bytes, and the hidden share of messages, of this rank."""
    module = Large(**SMALL) if small else Large(**sizes)
    chosen = {None: "auto", "ddp": "ddp"}.get(strategy if not isinstance(strategy, dict) else 0)
    chosen = chosen or Strategy3D(**strategy, quiet=True)
    planned = 0

    class Report(Callback):
        def on_train_epoch_end(self, trainer, module):
            nonlocal planned
            if isinstance(strategy, dict):
                rank = trainer.strategy.memory_report().ranks[trainer.global_rank]
                planned = rank.weights + rank.gradients + rank.states

    with tempfile.TemporaryDirectory() as folder:
        clock, flags = Clock(folder), {"max_steps": WARM + STEPS + TRACED, "precision": "bf16-mixed"}
        flags |= {"accelerator": "cpu" if small else "gpu", "devices": devices, "callbacks": [clock, Report()]}
        Trainer(**{**QUIET, **flags, "max_epochs": 1, "limit_val_batches": 0}, strategy=chosen).fit(module)
        hidden = hidden_share(json.loads(clock.path.read_text())["traceEvents"])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"seconds": clock.seconds, "peak": peak, "kept": planned, "hidden": hidden}


def hidden_share(events: Iterable[dict]) -> float | None:
    """The share of the time of messages in which another kernel runs too; None without any.

    NCCL's kernels are messages, and so are copies between host and card.
    """
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        sent = event["name"].startswith(("nccl", "Memcpy HtoD", "Memcpy DtoH"))
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            spans[sent].append((event["ts"], event["ts"] + event["dur"]))
    spans[False].sort()
    total = sum(end - begin for begin, end in spans[True])
    busy: list[tuple[float, float]] = []
    for begin, end in spans[False]:
        if busy and begin <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(end, busy[-1][1])
        else:
            busy.append((begin, end))
    both = sum(max(0.0, min(e, end) - max(b, begin)) for b, e in spans[True] for begin, end in busy)
    return both / total if total else None


def flops(module: Large) -> float:
    """Operations of one step on one sample's tokens: six for each parameter and token, and attention."""
    width, (_, length, batch) = module.embed.weight.shape[1], module.sizes
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return batch * length * (6 * parameters + 6 * len(module.blocks) * length * width)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a small module on CPUs, to try this file")
    parser.add_argument("--devices", type=int, nargs="*", default=sorted(LAYOUTS))
    asked = parser.parse_args()
    here = torch.cuda.device_count()
    if not here and not asked.small:
        print("No CUDA device is here: nothing was measured.")
        return
    module = Large(**SMALL) if asked.small else Large()
    peak = device_peak(torch.device("cpu" if asked.small else "cuda"), "bf16-mixed")
    print(f"{'':26}{'ms':>9}{'ratio':>8}{'tokens/s':>11}{'MFU':>8}{'peak GB':>9}{'kept GB':>9}{'hidden':>8}")
    for devices in asked.devices:
        if not asked.small and devices > here:
            print(f"{devices} devices: {here} are here")
            continue
        base = None
        for name, strategy in LAYOUTS[devices].items():
            ranks = run(measure, strategy, devices, asked.small, world=devices, timeout=900)
            seconds = max(rank["seconds"] for rank in ranks)
            base = base or seconds
            sizes = {} if not isinstance(strategy, dict) else strategy
            data = devices // sizes.get("tensor_parallel_size", 1) // sizes.get("pipeline_parallel_size", 1)
            rate = data * flops(module) / seconds / devices
            mfu = f"{rate / peak:8.1%}" if peak else f"{'':8}"
            shares = [rank["hidden"] for rank in ranks if rank["hidden"] is not None]
            hidden = f"{min(shares):8.0%}" if shares else ""
            tokens = data * module.sizes[1] * module.sizes[2] / seconds
            memory = f"{max(r['peak'] for r in ranks) / 1e9:9.2f}{max(r['kept'] for r in ranks) / 1e9:9.2f}"
            name = f"{devices} x {name}"
            print(f"{name:26}{1e3 * seconds:9.1f}{seconds / base:8.2f}{tokens:11,.0f}{mfu}{memory}{hidden}")


if __name__ == "__main__":
    main()
