"""Sharded checkpoints in a remote store: whole at every moment, resumed in any layout, read by the commands."""

import time
from multiprocessing import get_context
from random import Random

import fsspec
import pytest
import torch

from lightning_3d.checkpoint import keeper
from lightning_3d.checkpoint.full_files import consolidate, export
from lightning_3d.checkpoint.last import newest_first
from lightning_3d.checkpoint.manifest import NAME, is_sharded, remove_directory
from lightning_3d.checkpoint.remote_path import RemotePath, located
from lightning_3d.checkpoint.stored import Opened, read_tensors
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError
from lightning_3d.launch.hydra_job import FILE
from tests.checkpoint.bucket import Bucket, Killed, entries, fit, train
from tests.checkpoint.made import InLine, save
from tests.commands.test_compare import job
from tests.parity import raised
from tests.workers import run

SHARDED = {"checkpoint_format": "sharded"}


def tensors(number, size=8):
    return {f"state_dict.w{index}": torch.full((size, 16), float(number)) for index in range(4)}


def value(path):
    """The one number that all tensors of a whole checkpoint have."""
    opened = Opened.open(path)
    opened.verify()
    (found,) = {float(each) for tensor in opened.tensors.values() for each in tensor.read_full().unique()}
    return found


@pytest.mark.parametrize("moment", range(21))
def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path, monkeypatch, moment):
    """One rank's save, stopped before each call to the store in turn."""
    path = located(f"bucket://{tmp_path}/x.ckpt")
    save(path, tensors(0), ranks=1)
    monkeypatch.setattr("tests.checkpoint.made.Thread", InLine)
    monkeypatch.setattr(Bucket, "left", moment)
    try:
        save(path, tensors(1), ranks=1)
        killed = False
    except Killed:
        killed = True
    monkeypatch.undo()
    assert killed
    assert value(path) == (1 if moment > 16 else 0)
    assert save(path, tensors(2), ranks=1) == [None]
    assert value(path) == 2
    assert len(entries(tmp_path / "x.ckpt")) == 3  # and what was left half-written is gone


@pytest.mark.parametrize("lost", ["answer", "removal"])
def test_an_error_behind_the_manifest_loses_nothing(monkeypatch, lost):
    """The store has replaced the manifest, and then it fails."""
    path = located(f"memory://{lost}/x.ckpt")
    save(path, tensors(0))
    store = type(path.store)  # each thread has a store of its own
    pipe_file = store.pipe_file

    def fails(self, name, *args, **options):
        if lost == "answer":
            pipe_file(self, name, *args, **options)
        if lost == "removal" or str(name).endswith(f"/{NAME}"):
            raise OSError("503")

    monkeypatch.setattr(store, "pipe_file" if lost == "answer" else "rm_file", fails)
    if lost == "answer":
        assert all(save(path, tensors(1)))
    else:
        with pytest.warns(UserWarning, match="is saved. Files of the save before it stay"):
            save(path, tensors(1))
    monkeypatch.undo()
    assert value(path) == 1
    save(path, tensors(2))
    assert value(path) == 2
    assert len(path.sizes()) == 4


def test_a_folder_without_a_manifest_is_the_oldest():
    """A kill in the first save leaves it."""
    whole, cut = located("memory://times/whole.ckpt"), located("memory://times/cut.ckpt")
    save(whole, tensors(0))
    (cut / "manifest.json.0123").write_bytes(b"")
    assert newest_first([str(cut), str(whole)]) == [str(whole), str(cut)]


def _save_for_ever(path):
    torch.set_num_threads(1)
    number = 0
    while True:
        number += 1
        save(path, tensors(number, 2000))


def test_killed_for_real_while_it_saves(tmp_path):
    path, random, seen = located(f"bucket://{tmp_path}/x.ckpt"), Random(0), []
    save(path, tensors(0, 2000))
    while len(seen) < 8 or (not any(seen) and len(seen) < 80):
        process = get_context("fork").Process(target=_save_for_ever, args=(path,))
        process.start()
        time.sleep(random.uniform(0.02, 0.2))
        process.kill()
        process.join()
        seen.append(value(path))
    assert any(seen)


def test_a_folder_of_a_store_is_saved_read_and_removed():
    path = located("memory://here/x.ckpt")
    for number in (1, 2):
        assert save(path, tensors(number)) == [None, None]
        assert value(path) == number
    assert sorted(path.sizes()) == sorted(each.name for each in path.iterdir())
    assert len(path.sizes()) == 4
    part = next(path.glob("part-00001-*"))
    part.write_bytes(part.read_bytes()[:-4] + b"xxxx")
    with pytest.raises(CheckpointError, match="checksum"):
        Opened.open(path).verify()
    part.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="5 bytes"):
        Opened.open(path)
    part.unlink()
    with pytest.raises(CheckpointError, match="lacks part-00001"):
        Opened.open(path)
    assert remove_directory(path)
    assert not path.exists()
    assert not is_sharded(path)


def test_parts_of_rows_are_read_by_few_requests(monkeypatch):
    path, asked = located("memory://rows/x.ckpt"), []
    whole = torch.arange(4096 * 600.0).view(600, 4096)
    save(path, {"state_dict.w": whole})
    original = RemotePath.read_range
    monkeypatch.setattr(RemotePath, "read_range", lambda *args: asked.append(args) or original(*args))
    opened = Opened.open(path)
    asked.clear()
    out = torch.empty(600, 2048)
    opened.tensors["state_dict.w"].read_into(out, [0, 1024])
    assert torch.equal(out, whole[:, 1024:3072])
    assert len(asked) == 2  # one for each part


@pytest.mark.parametrize("text", ["s3://bucket/a/b.ckpt", "memory:///a/b.ckpt", "gs://bucket/a/b.ckpt"])
def test_a_remote_path_is_written_as_it_was_given(text):
    path = located(text)
    assert isinstance(path, RemotePath)
    assert str(path) == str(located(path)) == text
    assert (path.name, path.suffix, str(path.parent / "b.ckpt")) == ("b.ckpt", ".ckpt", text)


def test_a_local_url_is_a_local_path(tmp_path):
    assert located(f"file://{tmp_path}/a") == located(tmp_path / "a") == tmp_path / "a"


def test_two_formats_under_one_name_are_refused(monkeypatch):
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    fsspec.filesystem("memory").pipe_file("memory://one/x.ckpt", b"one file")
    (first, second) = save(located("memory://one/x.ckpt"), tensors(1))
    assert "is one file" in str(first)
    assert "is one file" in str(second)
    save(located("memory://one/y.ckpt"), tensors(1))
    with pytest.raises(CheckpointError, match="is a sharded checkpoint"):
        keeper.Keeper("full").save_file({"state_dict": {}}, "memory://one/y.ckpt", TorchCheckpointIO(), None)


def _too_large(root, strategy, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "SHARDED_FROM_BYTES", 1)
        return fit(root, strategy, 2, folder)


def test_ranks_that_do_not_see_one_store_are_refused(tmp_path):
    for text in run(raised, CheckpointError, _too_large, str(tmp_path), {}, "memory://x", world=2):
        assert "rank 1: CheckpointError: rank 0 has begun to write memory://x/step=1.ckpt" in text


def test_a_run_goes_on_in_another_layout_from_a_store(tmp_path):
    (wanted,) = run(train, "GPT", 1, None, 8, world=1)
    url = f"bucket://{tmp_path}/a.ckpt"
    run(train, "GPT", 2, {"zero_stage": 2, **SHARDED}, 4, None, url, world=2)
    (first, _) = run(train, "GPT", 2, {"tensor_parallel_size": 2}, 8, url, world=2)
    torch.testing.assert_close(first["losses"], wanted["losses"][4:], rtol=1e-5, atol=1e-5)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beside", [False, True])
def test_auto_resumes_from_a_store_and_so_does_last(tmp_path, beside):
    root, folder = str(tmp_path), f"bucket://{tmp_path}/run"
    strategy = {"resume": "auto", "async_checkpoint": beside}
    ((steps, texts), _) = run(_too_large, root, strategy, folder, world=2)
    assert steps == 2
    assert not [text for text in texts if "not saved" in text]
    assert sorted(entries(tmp_path / "run")) == ["last.ckpt", "lightning_3d-run.json", "step=1.ckpt", "step=2.ckpt"]
    (tmp_path / "run" / "last.ckpt" / "manifest.json").unlink()
    ((steps, texts), _) = run(fit, root, {**strategy, **SHARDED}, 5, folder, world=2)
    assert steps == 3
    assert any("Its save never ended" in text for text in texts)
    ((steps, _), _) = run(fit, root, SHARDED, 6, folder, "last", world=2)
    assert steps == 1


def test_commands_read_and_write_a_store(tmp_path, capsys):
    url = f"bucket://{tmp_path}/a.ckpt"
    ((result),) = run(train, "GPT", 1, SHARDED, 2, None, url, world=1)
    consolidate(url, tmp_path / "one.ckpt")
    consolidate(url, f"bucket://{tmp_path}/two.ckpt")
    export(url, f"bucket://{tmp_path}/weights")
    export(f"bucket://{tmp_path}/two.ckpt", tmp_path / "again")
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    for name, weight in result["weights"].items():
        assert torch.equal(one["state_dict"][name], weight)
        assert torch.equal(two["state_dict"][name], weight)
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    assert entries(tmp_path) == ["a.ckpt", "again", "one.ckpt", "two.ckpt", "weights"]
    with pytest.raises(CheckpointError, match="There is no checkpoint memory://nothing"):
        consolidate("memory://nothing", tmp_path / "x")


def test_a_comparison_reads_a_store(tmp_path, capsys):
    for name in ("0", "1"):
        job(tmp_path / "sweep", name, [f"lr={name}"], step_seconds=0.5, memory_bytes=2e9, metrics={"loss": 3.5})
    assert main(["compare", str(tmp_path / "sweep")]) == 0
    wanted = capsys.readouterr().out
    assert main(["compare", f"bucket://{tmp_path}/sweep"]) == 0
    assert capsys.readouterr().out == wanted
    assert main(["compare", f"bucket://{tmp_path}/sweep/0", f"bucket://{tmp_path}/sweep/1"]) == 0
    assert main(["compare", f"bucket://{tmp_path}/nowhere"]) == 2
    assert f"bucket://{tmp_path}/nowhere is no directory" in capsys.readouterr().err
    assert (tmp_path / "sweep" / "0" / FILE).exists()


def test_stored_tensors_can_be_sent_to_another_process():
    path = located("memory://sent/x.ckpt")
    save(path, tensors(3))
    import pickle

    state = pickle.loads(pickle.dumps(Opened.open(path).tensors))
    assert {float(each.max()) for each in map(read_tensors, state.values())} == {3.0}
