"""A step of an unchanged module over two stages against the same model cut by hand with torch's `PipelineStage`.

Run `python -m tests.bench.bench_pipeline`. Steps of both alternate in the same two processes, so other load on the
machine falls on both; the ratio of the medians is printed, for the GPT of some 20M parameters that the other benches
train and for a small one, where a microbatch's own cost in Python shows.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.split import apply_split, plan_split
from tests.pipeline.loop import opened
from tests.workers import run
from tests.zoo.batchless import GPT, gpt_batch

LAYERS, ROWS, LENGTH, MICROBATCHES = 6, 16, 32, 4
SIZES = {"20M parameters": (512, 12), "small": (192, 30)}
"""Width, and how many steps are timed."""


class Half(nn.Module):
    """What a user writes to cut the GPT by hand."""

    def __init__(self, gpt: GPT, first: bool, cut: int) -> None:
        super().__init__()
        parts = gpt.transformer
        self.first = first
        self.blocks = nn.ModuleList(parts["h"][:cut] if first else parts["h"][cut:])
        if first:
            self.wte, self.wpe = parts["wte"], parts["wpe"]
        else:
            self.ln_f, self.head = parts["ln_f"], gpt.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.ln_f(x))


def make(width: int) -> GPT:
    torch.manual_seed(1)
    module = GPT(layers=LAYERS, tied=False, width=width)
    module.log = lambda *args, **kwargs: None  # type: ignore[assignment,method-assign]
    return module


def ours(width):
    module = make(width)
    split = plan_split(module, None, 2)
    apply_split(module, split, [dist.get_rank()])
    pipeline = opened(module, split, dist.group.WORLD, UndoStack(), num_microbatches=MICROBATCHES)

    def step(tokens, targets):
        module.zero_grad()
        loss = pipeline.training_step((tokens, targets), 0)
        return loss.item()

    return step, sum(name.startswith("transformer.h.") for name in split.stages[0])


def by_hand(width, cut):
    rank = dist.get_rank()
    half = Half(make(width), rank == 0, cut)
    rows = ROWS // MICROBATCHES
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    hidden = torch.zeros(rows, LENGTH, width, requires_grad=True)
    logits = torch.zeros(rows, LENGTH, 31, requires_grad=True)
    example = (tokens, hidden) if rank == 0 else (hidden, logits)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), input_args=example[:1], output_args=example[1:])

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=True)

    def step(tokens, targets):
        half.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        return float(torch.stack(losses).mean()) if losses else None

    return step


def measure(width, rounds):
    batch = gpt_batch(rows=ROWS, length=LENGTH)
    mine, cut = ours(width)
    theirs = by_hand(width, cut)
    times: dict[str, list[float]] = {"ours": [], "by hand": []}
    losses = {}
    for index in range(rounds + 2):
        for name, step in (("ours", mine), ("by hand", theirs)):
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step(*batch)
            dist.barrier()
            if index >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}, losses


def main() -> None:
    for name, (width, rounds) in SIZES.items():
        (_, (medians, losses)) = run(measure, width, rounds, world=2, group=True, timeout=300)
        assert abs(losses["ours"] - losses["by hand"]) < 1e-5, losses
        print(name, {name: f"{1000 * value:.1f} ms" for name, value in medians.items()})
        print(f"ours / by hand: {medians['ours'] / medians['by hand']:.3f}")


if __name__ == "__main__":
    main()
