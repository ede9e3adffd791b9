"""Our ring against the library's collectives on gloo: `python -m tests.bench.bench_ring [--world 2 4] [--mb 16 64]`.

The two take turns call by call; the ratio is the median over turns of native time / ring time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_3d.axes.group import Group
from tests.axes.rings import ring
from tests.workers import run


def _bench(megabytes: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    size = dist.get_world_size()
    length = megabytes * 2**18 // size * size
    whole, part, other = torch.randn(length), torch.empty(length // size), torch.empty(length)
    pair = [Group(dist.new_group()), ring(dist.new_group())]
    calls: dict[str, Callable[[Group], None]] = {
        "all_reduce": lambda kind: kind.all_reduce(whole, average=True),
        "reduce_scatter": lambda kind: kind.reduce_scatter(part, whole, average=True),
        "all_gather": lambda kind: kind.all_gather(other, part),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(turns + 2):
        for name, call in calls.items():
            both = []
            for kind in pair:
                dist.barrier()
                start = time.perf_counter()
                call(kind)
                both.append(time.perf_counter() - start)
            if turn > 1:
                times[name].append((both[0], both[1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=15)
    a = parser.parse_args()
    print(f"{'ranks':>5}{'MB':>5}  {'collective':<16}{'native ms':>10}{'ring ms':>10}{'ratio':>8}")
    for world in a.world:
        for megabytes in a.mb:
            times = run(_bench, megabytes, a.turns, world=world, group=True, timeout=200)[0]
            for name, pairs in times.items():
                native, ring = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
                ratio = statistics.median(theirs / ours for theirs, ours in pairs)
                print(f"{world:>5}{megabytes:>5}  {name:<16}{native:10.2f}{ring:10.2f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
