"""Jobs that save under one name, and readers that look meanwhile: what is there is always whole."""

import os
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import lightning_3d.checkpoint.save as place_of_write
from lightning_3d.checkpoint.keeper import Keeper
from lightning_3d.checkpoint.manifest import remove_directory
from lightning_3d.checkpoint.single_file import save_file
from lightning_3d.checkpoint.stored import Opened, read_tensors
from lightning_3d.errors import CheckpointError
from tests.checkpoint.made import save
from tests.checkpoint.savers import At, fit
from tests.workers import run


def tensors(value):
    return {f"state_dict.w{index}": torch.full((50, 40), float(value)) for index in range(4)}


def values(state):
    return {float(each) for tensor in state["state_dict"].values() for each in tensor.unique()}


def load(path):
    return read_tensors(Keeper()._load(path, None, TorchCheckpointIO()))


def _save_for_ever(path, value, sharded):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        if sharded:
            save(path, tensors(value))
        else:
            save_file({"state_dict": tensors(value)}, path)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_reader_finds_it_whole_at_every_look(tmp_path, sharded):
    path, seen = tmp_path / "x.ckpt", set()
    jobs = [
        get_context("fork").Process(target=_save_for_ever, args=(path, value, sharded), daemon=True) for value in (1, 2)
    ]
    for job in jobs:
        job.start()
    try:
        end = time.monotonic() + 60
        while not path.exists() or (sharded and not (path / "manifest.json").exists()):
            assert time.monotonic() < end
            time.sleep(0.01)
        looks = 0
        while looks < 150 or (len(seen) < 2 and time.monotonic() < end):  # the second job may start late
            looks += 1
            found = values(load(path))
            assert len(found) == 1
            seen |= found
    finally:
        for job in jobs:
            job.kill()
            job.join()
    assert seen == {1.0, 2.0}
    save(path, tensors(3)) if sharded else save_file({"state_dict": tensors(3)}, path)
    assert len(list((path if sharded else tmp_path).iterdir())) == (4 if sharded else 1)


def test_what_is_read_stays_until_it_is_read(tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, tensors(0))
    state = Opened.open(path).state()
    for value in (1, 2, 3):
        save(path, tensors(value))
    assert values(load(path)) == {3.0}
    assert values(read_tensors(state)) == {0.0}
    del state
    save(path, tensors(4))
    assert len(list(path.iterdir())) == 4


def test_a_checkpoint_goes_in_one_step_and_not_while_it_is_read(tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, tensors(0))
    opened = Opened.open(path)
    assert not remove_directory(path)
    assert values(opened.state()) == {0.0}
    del opened
    assert remove_directory(path)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_under_way_is_not_swept_by_another(tmp_path, monkeypatch, recwarn):
    path, written, go, problems = tmp_path / "x.ckpt", Event(), Event(), []
    write = place_of_write.write

    def slow(job):
        files = write(job)
        if not written.is_set():
            written.set()
            assert go.wait(20)
        return files

    monkeypatch.setattr(place_of_write, "write", slow)
    first = Thread(target=lambda: problems.extend(save(path, tensors(1), ranks=1)))
    first.start()
    assert written.wait(20)
    assert save(path, tensors(2), ranks=1) == [None]
    assert any("Another job saves to" in str(warning.message) for warning in recwarn)
    assert values(load(path)) == {2.0}
    go.set()
    first.join(20)
    assert problems == [None]
    assert values(load(path)) == {1.0}
    assert len(list(path.iterdir())) == 3


def test_a_save_whose_file_another_host_has_swept_does_not_count(tmp_path, monkeypatch):
    """It sees no locks there."""
    path, write = tmp_path / "x.ckpt", place_of_write.write
    save(path, tensors(1))
    monkeypatch.setattr(
        place_of_write, "write", lambda job: [(path / file.name).unlink() or file for file in write(job)]
    )
    assert all("which its manifest names" in str(error) for error in save(path, tensors(2)))
    assert values(load(path)) == {1.0}


@pytest.mark.parametrize("sharded", [True, False])
def test_a_job_that_is_not_alone_hears_of_it_and_removes_nothing_of_the_other(tmp_path, sharded):
    messages = run(_beside_another, str(tmp_path), sharded, world=1)[0]
    assert sum("Another job saves to" in text for text in messages) == 2
    assert sum("is not removed" in text for text in messages) == 1
    assert (tmp_path / "a.ckpt").exists()


def _beside_another(folder, sharded):
    path = Path(folder) / "a.ckpt"

    def another(_):
        save(path, tensors(9)) if sharded else save_file({"state_dict": tensors(9)}, path)

    def again(trainer):
        another(trainer)
        trainer.save_checkpoint(path)
        another(trainer)
        trainer.strategy.remove_checkpoint(path)

    strategy = {"checkpoint_format": "sharded" if sharded else "full"}
    return fit(1, strategy, 2, At(s1=lambda trainer: trainer.save_checkpoint(path), s2=again))[1]


@pytest.mark.parametrize("beside", [True, False])
def test_a_directory_that_cannot_be_made_does_not_end_training(tmp_path, beside):
    (tmp_path / "file").write_text("")
    strategy = {"checkpoint_format": "sharded", "async_checkpoint": beside}
    for rank, (steps, texts) in enumerate(run(_save_under, 2, strategy, str(tmp_path / "file" / "a.ckpt"), world=2)):
        assert steps == 3
        assert [text for text in texts if "was not saved" in text and "Training continues" in text] or rank


def _save_under(world, strategy, path):
    module, texts = fit(world, strategy, 3, At(s1=lambda trainer: trainer.save_checkpoint(path)))
    return len(module.seen), texts


@pytest.mark.parametrize(
    ("place", "format", "beside", "rank"),
    [
        ("keeper.Collector.collect", "sharded", False, 1),
        ("save._pickled", "sharded", False, 0),
        ("keeper.snapshot", "sharded", True, 1),
        ("keeper.copied", "full", True, 0),
        ("keeper.save_file", "full", False, 0),
    ],
)
def test_what_one_rank_alone_cannot_do_all_ranks_hear_of(tmp_path, place, format, beside, rank):
    strategy = {"checkpoint_format": format, "async_checkpoint": beside}
    for text in run(_fail_on, rank, place, strategy, str(tmp_path / "a.ckpt"), world=2):
        assert f"rank {rank}: MemoryError: too little" in text


def _fail_on(bad, place, strategy, path):
    def fail(*_, **__):
        raise MemoryError("too little")

    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == bad:
            patch.setattr(f"lightning_3d.checkpoint.{place}", fail)
        with pytest.raises(CheckpointError) as caught:
            fit(2, strategy, 2, At(s1=lambda trainer: trainer.save_checkpoint(path)))
    return str(caught.value)
