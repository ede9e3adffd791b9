"""A sharded save on several ranks against `torch.save` of the whole state by one process, on the same disk.

`python -m tests.bench.bench_checkpoint [--world 4] [--mb 1024] [--folder DIR]`. They take turns; medians are printed:
seconds of either, how long an asynchronous save stalls training, and memory on top of the state.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_3d.checkpoint import Keeper
from tests.workers import run

ROWS, COLUMNS = 1024, 4096


def _state(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and two optimizer states of that size in all, in equal rows on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
    module = nn.Module()
    for index in range(megabytes * 2**20 // (3 * 4 * ROWS * COLUMNS)):
        rows = torch.randn(ROWS // mesh.size(), COLUMNS)
        module.register_parameter(f"w{index}", nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)])))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for parameter in module.parameters():
        state = {key: torch.ones_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    return module, optimizer


def _anonymous() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _peak(work: Callable[[], None]) -> int:
    """How much memory `work` needed on top."""
    before, done = _anonymous(), threading.Event()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(peak, _anonymous()) - before


def _seconds(work: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def _bench(megabytes: int, folder: str, turns: int) -> dict[str, list[float]]:
    module, optimizer = _state(megabytes)
    path, single = Path(folder) / "sharded", Path(folder) / "single"
    now, later = Keeper("sharded"), Keeper("sharded", asynchronous=True)

    def save(keeper: Keeper) -> None:
        state = {"state_dict": dict(module.state_dict()), "optimizer_states": [optimizer.state_dict()]}
        keeper.save(state, path, module=module, optimizers=[optimizer], splits={}, own={}, copies={})

    def plain() -> None:
        if dist.get_rank() == 0:
            torch.save(whole, single)

    def save_later() -> None:
        save(later)
        later.wait()

    found: dict[str, list[float]] = {key: [] for key in ("torch.save", "sharded", "stall", "memory", "async memory")}
    found["memory"].append(_peak(lambda: save(now)) / 2**20)
    found["async memory"].append(_peak(save_later) / 2**20)
    whole = [torch.randn(ROWS, COLUMNS) for _ in range(megabytes * 2**20 // (4 * ROWS * COLUMNS))]
    whole = whole if dist.get_rank() == 0 else []
    for _ in range(turns):
        for key, work in (("torch.save", plain), ("sharded", lambda: save(now)), ("stall", lambda: save(later))):
            if dist.get_rank() == 0:
                single.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            found[key].append(_seconds(work))
            later.wait()
    now.close()
    later.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure (default: the temporary one)")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        ranks = run(_bench, a.mb, folder, a.turns, world=a.world, group=True, timeout=600)
    plain, ours, stall = (statistics.median(ranks[0][key]) for key in ("torch.save", "sharded", "stall"))
    state = a.mb / a.world
    print(f"{a.mb} MB on {a.world} ranks")
    print(f"  torch.save by one process  {plain:6.2f} s")
    print(f"  sharded                    {ours:6.2f} s   ratio {plain / ours:.2f}")
    print(f"  asynchronous: stall        {stall:6.2f} s   {100 * stall / plain:.0f} % of torch.save")
    for key in ("memory", "async memory"):
        most = max(rank[key][0] for rank in ranks)
        print(f"  {key + ' on top':<26} {most:6.0f} MB  {100 * most / state:.0f} % of a rank's state")


if __name__ == "__main__":
    main()
