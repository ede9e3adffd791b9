"""A run that is killed again and again, goes on each time, and must end as if nothing had happened."""

import os
import random
import signal
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Strategy3D
from tests.faults.squad import Squad
from tests.parity import QUIET

WORLD = 4
TIMEOUT = 12.0
LAYOUTS = {
    "zero": {"zero_stage": 1},
    "pipeline": {"pipeline_parallel_size": 2, "zero_stage": 1},
    "tensor": {"tensor_parallel_size": 2, "zero_stage": 2},
    "ring": {"zero_stage": 0},
}


class Net(LightningModule):
    """Draws in every step, shuffles, and has an optimizer with state."""

    def __init__(self, dropout=0.1):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)


class Log(Callback):
    """What this rank went through, a line at a time, so that nothing is lost with it."""

    def __init__(self, folder, rank):
        self.folder, self.rank = Path(folder), rank

    def _line(self, *words):
        with open(self.folder / f"log_{self.rank}", "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def setup(self, trainer, module, stage):
        (self.folder / f"setup_{self.rank}").touch()

    def on_train_start(self, trainer, module):
        self._line("resumed", trainer.global_step)
        (self.folder / f"train_{self.rank}").touch()

    def on_train_batch_start(self, trainer, *_):
        self._line("saved", trainer.global_step)  # the checkpoint of the step before is whole, or it would not be here

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self._line("loss", trainer.global_step, float(outputs["loss"]).hex())


class KilledInside(ModelCheckpoint):
    """Is killed a little after it began to save for the n-th time."""

    saves, at, delay, marker = 0, None, 0.0, Path()

    def _save_checkpoint(self, trainer, filepath):
        self.saves += 1
        if self.saves == self.at:
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self.marker.touch()
        super()._save_checkpoint(trainer, filepath)
        self.marker.unlink()


def train(rank, folder, layout, format, steps, inside):
    """One start of the run. `inside`: (rank, which save, seconds into it) of a kill, or None."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    keep = KilledInside(dirpath=f"{folder}/kept", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    keep.marker = Path(folder, f"saving_{rank}")
    if inside is not None and inside[0] == rank:
        keep.at, keep.delay = inside[1:]
    strategy = Strategy3D(**LAYOUTS[layout], timeout=TIMEOUT, resume="auto", checkpoint_format=format, quiet=True)
    flags = {**QUIET, "enable_checkpointing": True, "use_distributed_sampler": True, "limit_val_batches": 0}
    trainer = Trainer(
        **flags, devices=WORLD, strategy=strategy, max_steps=steps, max_epochs=-1, callbacks=[keep, Log(folder, rank)],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Net())


@dataclass
class Report:
    kills: int = 0
    inside: int = 0
    """Kills while the victim was saving."""
    starts: int = 0
    slowest: float = 0.0
    """Seconds from a kill to the end of the last survivor."""
    named: int = 0
    """Survivors whose error named the victim."""
    survivors: int = 0
    rounds: int = 0
    errors: list = field(default_factory=list)


def read(folder):
    """What the logs say: losses by (rank, step), steps resumed at, the last step known to be saved."""
    losses, resumed, saved = {}, [], 0
    for rank in range(WORLD):
        file = Path(folder, f"log_{rank}")
        for line in file.read_text().splitlines() if file.exists() else ():
            words = line.split()
            if words[0] == "loss" and len(words) == 3:
                losses.setdefault((rank, int(words[1])), set()).add(words[2])
            elif words[0] == "resumed" and rank == 0:
                resumed.append(int(words[1]))
            elif words[0] == "saved" and len(words) == 2:
                saved = max(saved, int(words[1]))
    return losses, resumed, saved


def undisturbed(folder, layout, format, steps):
    job = Squad(train, str(folder), layout, format, steps, None, world=WORLD, folder=folder)
    try:
        assert job.wait(120) == []
        assert all("returned" in end for end in job.ended.values()), job.ended
    finally:
        job.close()
    return read(folder)[0]


def drill(folder, layout, format, steps, kills, draw, report):
    """Kill and start again until the run has ended, at most `kills` times."""
    folder = Path(folder)
    reference = undisturbed(folder / "reference", layout, format, steps)
    run = folder / "run"
    run.mkdir(parents=True)
    report.rounds += 1
    while not (run / "done").exists():
        _, before, saved = read(run)
        _start(run, layout, format, steps, draw, report, may_kill=report.kills < kills)
        print(report, flush=True)
        _, resumed, _ = read(run)
        if len(resumed) > len(before):  # else it was killed before it could go on
            assert resumed[-1] >= saved, f"went on from step {resumed[-1]}, but step {saved} had been saved"
    losses = read(run)[0]
    assert losses.keys() == reference.keys()
    different = {key: values for key, values in losses.items() if values != reference[key]}
    assert different == {}, f"{len(different)} losses differ, the first: {sorted(different.items())[0]}"


def _start(run, layout, format, steps, draw, report, may_kill):
    report.starts += 1
    for file in (*run.glob("setup_*"), *run.glob("train_*"), *run.glob("saving_*")):
        file.unlink()
    victim, inside = draw.randrange(WORLD), None
    how = draw.choices(["training", "saving", "starting"], [5, 4, 1])[0] if may_kill else None
    if how == "saving":
        inside = (victim, draw.randint(1, 6), draw.uniform(0, 0.03))
    job = Squad(train, str(run), layout, format, steps, inside, world=WORLD, folder=run)
    try:
        _wait_for(run / f"{'setup' if how == 'starting' else 'train'}_{victim}", job)
        if how in ("training", "starting"):
            time.sleep(draw.uniform(0, 0.4))
            job.send(victim, signal.SIGKILL)
        assert job.wait(90, [victim]) == []
        moment, others = time.monotonic(), [rank for rank in range(WORLD) if rank != victim]
        assert job.wait(TIMEOUT + 30, others) == [], f"hung after a kill of rank {victim} while {how}"
        if job.processes[victim].exitcode == -signal.SIGKILL:
            _count(job, run, victim, others, time.monotonic() - moment, report)
        elif all("returned" in job.ended.get(rank, {}) for rank in range(WORLD)):
            (run / "done").touch()
        else:
            raise AssertionError(f"a run that was not killed failed: {job.ended}")
    finally:
        job.close()


def _count(job, run, victim, others, seconds, report):
    report.kills += 1
    report.inside += (run / f"saving_{victim}").exists()
    report.slowest = max(report.slowest, seconds)
    for rank in others:
        report.survivors += 1
        text = job.ended.get(rank, {}).get("text", "")
        report.named += f"ank {victim} (" in text
        if f"ank {victim} (" not in text:
            report.errors.append((victim, rank, text[:200], job.processes[rank].exitcode))


def _wait_for(file, job):
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline and all(p.is_alive() for p in job.processes):
        time.sleep(0.005)


def rounds(folder, kills, steps, seed):
    """Runs in one layout and format after the other until there were `kills`; what happened."""
    draw, report = random.Random(seed), Report()
    while report.kills < kills:
        layout = list(LAYOUTS)[report.rounds % len(LAYOUTS)]
        format = ("sharded", "full")[report.rounds // 2 % 2]
        drill(Path(folder, str(report.rounds)), layout, format, steps, kills, draw, report)
    return report
