"""SIGTERM and a cluster's warning: saved once, before the same batch on all ranks, and gone on from."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_3d import Strategy3D
from lightning_3d.faults.preemption import Preemption
from tests.faults.drill import Net
from tests.faults.squad import squad
from tests.parity import QUIET, in_turn, make_trainer
from tests.workers import run
from tests.zoo.plain import MLP

STEPS, AT = 10, 4


class SignalAt(Callback):
    """One rank gets the signal in the middle of a step."""

    def __init__(self, rank, signum):
        self.rank, self.signum, self.began, self.losses = rank, signum, 0, []

    def on_train_start(self, trainer, module):
        self.began = trainer.global_step

    def on_before_backward(self, trainer, module, loss):
        self.losses.append((trainer.global_step, float(loss)))
        if self.rank == 1 and trainer.global_step == AT and self.signum is not None:
            os.kill(os.getpid(), self.signum)


def train(rank, folder, signum, slurm):
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    if slurm:
        os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    callback, saves = SignalAt(rank, signum), []
    trainer = Trainer(
        **{**QUIET, "use_distributed_sampler": True}, devices=2, max_steps=STEPS, max_epochs=-1, limit_val_batches=0,
        callbacks=[callback], default_root_dir=folder, plugins=[SLURMEnvironment(True, signal.SIGUSR1)] if slurm else [],
        strategy=Strategy3D(resume="auto", timeout=30.0, quiet=True),
    )  # fmt: skip
    save = trainer.save_checkpoint
    trainer.save_checkpoint = lambda path, *args: (saves.append(str(path)), save(path, *args))
    module, ended = Net(), None
    try:
        trainer.fit(module)
    except SystemExit as error:
        ended = type(error).__name__
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return {
        "began": callback.began, "step": trainer.global_step, "ended": ended, "saves": saves,
        "losses": callback.losses, "weights": weights,
    }  # fmt: skip


def start(folder, signum, slurm=False, environment=None):
    with squad(train, str(folder), signum, slurm, world=2, folder=folder / "ended", environment=environment) as job:
        assert job.wait(90) == []
        return [job.ended[rank]["returned"] for rank in range(2)]


def test_sigterm_saves_once_at_a_boundary_and_the_run_goes_on(tmp_path):
    whole = start(tmp_path / "whole", None)
    cut = start(tmp_path / "cut", signal.SIGTERM)
    for rank in cut:
        assert rank["ended"] == "SIGTERMException"
        assert rank["step"] == AT + 2  # decided one batch late
        assert rank["saves"] == [str(tmp_path / "cut" / "preempted.ckpt")]
    rest = start(tmp_path / "cut", None)
    for rank in range(2):
        assert rest[rank]["began"] == AT + 2
        assert cut[rank]["losses"] + rest[rank]["losses"] == whole[rank]["losses"]
        assert rest[rank]["weights"] == whole[rank]["weights"]


@pytest.mark.long
def test_slurm_is_asked_to_requeue_at_a_boundary(tmp_path):
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]))\n"
    )
    tool.chmod(0o755)
    there = {
        "PATH": f"{tool.parent}:{os.environ['PATH']}", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "drill", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_NTASKS_PER_NODE": "2",
    }  # fmt: skip
    cut = start(tmp_path / "cut", signal.SIGUSR1, True, there)
    assert [rank["ended"] for rank in cut] == ["SIGTERMException"] * 2
    assert Path(tmp_path / "asked").read_text() == "requeue 77"
    rest = start(tmp_path / "cut", None, True, {**there, "SLURM_RESTART_COUNT": "1"})
    assert [rank["began"] for rank in rest] == [AT + 2] * 2
    assert [rank["step"] for rank in rest] == [STEPS] * 2


def sleep(rank, folder):
    warnings.simplefilter("ignore")

    class Slow(Net):
        def test_dataloader(self):
            return self.train_dataloader()

        def test_step(self, batch, batch_idx):
            Path(folder, f"in_{rank}").touch()
            time.sleep(30)

    make_trainer(2, {}, quiet=True, default_root_dir=folder).test(Slow())


@pytest.mark.long
def test_outside_of_a_fit_sigterm_ends_at_once(tmp_path):
    with squad(sleep, str(tmp_path), world=2, folder=tmp_path / "ended") as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "in_1").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send(1, signal.SIGTERM)
        assert job.wait(5, [1]) == []
        assert job.processes[1].exitcode == -signal.SIGTERM


class StopsAt(Callback):
    """All ranks or the last one alone are to stop, at one of the Trainer's hooks."""

    def __init__(self, hook, step, alone):
        self.step, self.alone = step, alone
        setattr(self, hook, self._stop)

    def _stop(self, trainer, module, *_):
        if trainer.global_step >= self.step and (not self.alone or trainer.global_rank == trainer.world_size - 1):
            trainer.should_stop = True


def _stopped(hook, step, alone, world, strategy):
    seed_everything(7, verbose=False)
    module, callback = MLP(), StopsAt(hook, step, alone)
    flags = {"max_epochs": 3, "limit_val_batches": 1, "val_check_interval": 2, "callbacks": [callback]}
    chosen = "auto" if strategy is None else Strategy3D(**strategy, timeout=60.0, quiet=True)
    trainer = Trainer(**{**QUIET, **flags}, devices=world, strategy=chosen)
    trainer.fit(module)
    return trainer.global_step, float(module.scale)


HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", in_turn(HOOKS, 3))
@pytest.mark.parametrize("axis", ["data_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("alone", [False, True])
def test_all_ranks_stop_where_all_want_to_or_after_the_next_batch_where_one_does(hook, axis, alone):
    late = int(alone and hook == "on_train_batch_end")  # the other two are no steady steps: the ranks wait there
    (wanted,) = run(_stopped, hook, 3 + late, False, 1, None, world=1)
    assert wanted[0] == {"on_train_batch_end": 3 + late, "on_validation_end": 4, "on_train_epoch_end": 5}[hook]
    for got in run(_stopped, hook, 3, alone, 2, {axis: 2}, world=2):
        assert got == pytest.approx(wanted, rel=1e-5)


def test_what_the_user_had_put_there_comes_back():
    owner, preemption = SimpleNamespace(advance=len), object.__new__(Preemption)
    preemption.undo = []
    preemption._replace(owner, "advance", print)
    preemption.close()
    assert owner.advance is len


def test_lightning_still_has_what_is_replaced():
    assert callable(_SignalConnector._sigterm_notifier_fn)
    assert callable(_SignalConnector._slurm_sigusr_handler_fn)
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert callable(_TrainingEpochLoop.advance)
