"""One training step of a GPT under each way to sync gradients: `python -m tests.bench.bench_step [--world 2]`.

All variants live in the same processes and take turns step by step, so that whatever else the machine does hits all
of them; the table shows medians and the ratio to DDP.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_3d.comm.background_queue import BackgroundQueue
from lightning_3d.comm.collectives import Ring
from lightning_3d.comm.ledger import Ledger
from lightning_3d.comm.replicate import ReplicatedGradients
from lightning_3d.zero.fsdp_seam import FullySharded
from tests.workers import run


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _variant(name: str, layers: int, width: int):
    """A function that takes one training step."""
    torch.manual_seed(0)
    model = Gpt(layers, width)
    engine, finish = None, lambda: None
    if name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=False)
    elif name == "ours stage 0":
        engine = BackgroundQueue()
        ring = Ring(dist.new_group(), Ledger(), "data")
        finish = ReplicatedGradients(list(model.parameters()), ring, engine, dist.group.WORLD).finish
    else:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward="reshard" in name)
        fully_shard(model, reshard_after_forward="reshard" in name)
        if "ours" in name:
            engine = BackgroundQueue()
            FullySharded(model, Ring(dist.new_group(), Ledger(), "data"), engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> float:
        loss = model(tokens)
        loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, engine


NAMES = [
    "ddp",
    "ours stage 0",
    "fsdp2 native",
    "fsdp2 ours",
    "fsdp2 native reshard",
    "fsdp2 ours reshard",
]


def _bench(
    names: list[str], layers: int, width: int, batch: int, length: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    variants = {name: _variant(name, layers, width) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(steps + 2):
        tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(index + dist.get_rank()))
        losses = {}
        for name, (step, _) in variants.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name] = step(tokens)
            if index > 1:
                times[name].append((time.perf_counter() - start, time.process_time() - used))
        assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    for _, engine in variants.values():
        if engine is not None:
            engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=NAMES)
    a = parser.parse_args()
    times = run(_bench, a.only, a.layers, a.width, a.batch, a.length, a.steps, world=a.world, group=True, timeout=280)[
        0
    ]
    base = statistics.median(wall for wall, _ in times[a.only[0]])
    print(f"{'':24}{'median ms':>10}{'min ms':>10}{'cpu ms':>10}{'ratio to ' + a.only[0]:>16}")
    for name, values in times.items():
        walls, cpus = zip(*values, strict=True)
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        print(f"{name:24}{1e3 * wall:10.1f}{1e3 * min(walls):10.1f}{1e3 * cpu:10.1f}{wall / base:16.3f}")


if __name__ == "__main__":
    main()
