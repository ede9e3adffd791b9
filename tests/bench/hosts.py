"""Several hosts on one machine: `python -m tests.bench.hosts [--hosts 2] [--ranks 2] [--mbit 100]`, as root on Linux.

Each host is a network namespace with a link of limited bandwidth (a token bucket) to a bridge, and runs the real
`torchrun --nnodes`. One job trains the same small GPT under each way to send gradients, in turns, and with the tensor or
pipeline axis across the slow link. Next to a measured step is the planner's time to send its bytes.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

PORT = 29500
SKIP = 2
"""First steps of a fit that are not counted."""
DATA: dict[str, dict[str, Any]] = {
    "native": {"grad_sync": "native"},
    "flat ring": {"grad_sync": "ring"},
    "hierarchical": {"grad_sync": "hierarchical"},
    "native bf16": {"grad_sync": "native", "grad_compression": "bf16"},
    "flat ring int8": {"grad_sync": "ring", "grad_compression": "int8"},
    "flat ring PowerSGD": {"grad_sync": "ring", "grad_compression": "powersgd"},
    "hierarchical int8": {"grad_sync": "hierarchical", "grad_compression": "int8"},
}
AXES: dict[str, dict[str, int]] = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def cases(hosts: int, ranks: int) -> dict[str, dict[str, Any]]:
    """The layouts of a job. With one rank on a host there is nothing inside of it, and model axes cross the link."""
    if ranks > 1:
        return {name: {"zero_stage": 0, **sizes} for name, sizes in DATA.items()}
    flat = {name: {"zero_stage": 0, **sizes} for name, sizes in DATA.items() if "hierarchical" not in name}
    return flat | {f"{name} across": sizes for name, sizes in AXES.items()} if hosts == 2 else flat


def train(sizes: dict[str, Any], steps: int, hosts: int, ranks: int, width: int) -> dict[str, Any]:
    """One fit on this rank: seconds of its steps, bytes of one, and the last losses."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    from lightning_3d import Strategy3D

    words, length, rows = 64, 16, 2

    class Gpt(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            layer = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer, norm_first=True) for _ in range(4))
            self.head = nn.Linear(width, words)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            x = self.embed(batch[:, :-1])
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> DataLoader:
            generator = torch.Generator().manual_seed(1)
            text = [torch.randint(0, words, (rows * steps * hosts * ranks, 1), generator=generator)]
            for _ in range(length):  # the next word is a function of the last one, or any word
                any_word = torch.randint(0, words, text[0].shape, generator=generator)
                text.append(
                    torch.where(torch.rand(text[0].shape, generator=generator) < 0.2, any_word, text[-1] * 5 + 3)
                )
            return DataLoader(torch.cat(text, dim=1) % words, batch_size=rows)

    class Clock(Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.marks.append(time.perf_counter())

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            self.sent = sum(row.bytes for row in trainer.strategy.data_axis.ledger.rows() if "inside" not in row.axis)

    torch.manual_seed(0)
    clock, flags = Clock(), {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    strategy: Any = Strategy3D(**sizes, quiet=True)
    module = Gpt()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    Trainer(
        **flags, accelerator="cpu", devices=ranks, num_nodes=hosts, strategy=strategy, max_steps=steps, max_epochs=1,
        enable_progress_bar=False, callbacks=[clock],
    ).fit(module)  # fmt: skip
    seconds = [after - before for before, after in pairwise(clock.marks[SKIP:])]
    last = statistics.mean(clock.losses[-steps // 4 :])
    return {"seconds": seconds, "loss": last, "sent": clock.sent / steps, "parameters": parameters}


def worker(asked: argparse.Namespace) -> None:
    """What torchrun starts: all cases in turns; rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for number in range(asked.rounds):
        for name, sizes in cases(asked.hosts, asked.ranks).items():
            if asked.only and name not in asked.only:
                continue
            got = train(sizes, asked.steps, asked.hosts, asked.ranks, asked.width)
            row = found.setdefault(name, {**got, "rounds": []})
            row["rounds"].append(statistics.median(got["seconds"]))
            if os.environ["RANK"] == "0":
                print(
                    f"round {number + 1}, {name}: {1e3 * row['rounds'][-1]:.0f} ms, loss {got['loss']:.4f}", flush=True
                )
    if os.environ["RANK"] == "0":
        Path(asked.worker).write_text(json.dumps(found))
    dist.destroy_process_group()


def network(hosts: int, mbit: float) -> tuple[str, list[str]]:
    """Make a switch and the hosts: return their names and the commands that remove them."""
    mark = f"b{os.getpid()}"
    _run(f"ip netns add {mark}")
    _run(f"ip -n {mark} link add name switch type bridge")
    _run(f"ip -n {mark} link set switch up")
    for host in range(hosts):
        name = f"{mark}h{host}"
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link add name net0 type veth peer name port{host} netns {mark}")
        _run(f"ip -n {mark} link set port{host} master switch up")
        _run(f"ip -n {name} addr add 10.9.0.{host + 1}/24 dev net0")
        for device in ("lo", "net0"):
            _run(f"ip -n {name} link set {device} up")
        # both directions of the link are limited: what the host sends, and what the switch sends to it
        for space, device in ((name, "net0"), (mark, f"port{host}")):
            _run(f"tc -n {space} qdisc add dev {device} root tbf rate {mbit}mbit burst 128kb latency 100ms")
    return mark, [f"ip netns del {name}" for name in (*(f"{mark}h{host}" for host in range(hosts)), mark)]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"`{command}` was refused: {done.stderr.strip()}. Network namespaces need root and Debian's iproute2.")


def start(mark: str, host: int, folder: Path, asked: argparse.Namespace) -> subprocess.Popen:
    """Start torchrun on one host. A machine of its own has a boot id of its own: ranks look at it for shared memory."""
    boot = folder / f"boot{host}"
    boot.write_text(f"{uuid.uuid4()}\n")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", asked.hosts, "--nproc-per-node", asked.ranks,
        "--node-rank", host, "--master-addr", "10.9.0.1", "--master-port", PORT, "-m", "tests.bench.hosts",
        *(["--only", *asked.only] if asked.only else []), "--worker", folder / "found.json", *(f"--{key}={getattr(asked, key)}" for key in
                                              ("hosts", "ranks", "rounds", "steps", "width")),
    ]  # fmt: skip
    mounted = f"mount --bind {boot} /proc/sys/kernel/random/boot_id && hostname host{host} && exec " + '"$@"'
    enter = ["ip", "netns", "exec", f"{mark}h{host}", "unshare", "--uts", "sh", "-c", mounted, "sh"]
    settings = {"GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen([str(word) for word in (*enter, *command)], env=os.environ | settings)


def planned(sizes: dict[str, Any], parameters: int, hosts: int, ranks: int, mbit: float) -> float | None:
    """The planner's seconds to send the gradients of a data-parallel step over the link, with nothing hidden."""
    from lightning_3d.tools.planner.wire_bytes import ring_all_reduce

    if "grad_sync" not in sizes or sizes.get("grad_compression") == "powersgd":
        return None
    size = {"bf16": 2, "int8": 1}.get(sizes.get("grad_compression", ""), 4) * parameters
    sent = (
        ring_all_reduce(size, hosts) if sizes["grad_sync"] == "hierarchical" else ring_all_reduce(size, hosts * ranks)
    )
    return sent * 8 / (mbit * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a host")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of the JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the hosts are removed on the way out
    mark, remove = network(asked.hosts, asked.mbit)
    jobs: list[subprocess.Popen] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [start(mark, host, Path(folder), asked) for host in range(asked.hosts)]
            if sum(abs(job.wait()) for job in jobs):
                sys.exit("a host failed")
            found = json.loads((Path(folder) / "found.json").read_text())
    finally:
        for job in jobs:
            job.terminate()  # torchrun ends its workers
            job.wait()
        for command in remove:
            subprocess.run(command.split())
    asked.out.mkdir(parents=True, exist_ok=True)
    job = {key: getattr(asked, key) for key in ("hosts", "ranks", "mbit", "rounds", "steps", "width")}
    report = json.dumps({"job": job, "cases": found}, indent=1)
    (asked.out / f"hosts-{asked.hosts}x{asked.ranks}.json").write_text(report)
    base = found["flat ring"]
    print(
        f"{asked.hosts} hosts x {asked.ranks} ranks, {asked.mbit:.0f} Mbit/s, {base['parameters'] / 1e6:.1f}M parameters"
    )
    print("| | step ms | flat ring / this | sent MB | loss | of the flat ring's | link time, planned ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in found.items():
        middle = statistics.median(row["rounds"])
        ratio = statistics.median(a / b for a, b in zip(base["rounds"], row["rounds"], strict=True))
        sizes = cases(asked.hosts, asked.ranks)[name]
        plan = planned(sizes, row["parameters"], asked.hosts, asked.ranks, asked.mbit)
        shown = f"{1e3 * plan:.0f}" if plan else ""
        share = f"{row['loss'] / base['loss'] - 1:+.2%}"
        print(
            f"| {name} | {1e3 * middle:.0f} | {ratio:.2f} | {row['sent'] / 1e6:.2f} | {row['loss']:.4f} | {share} | {shown} |"
        )


if __name__ == "__main__":
    main()
