"""Notes and checkpoints that a restart finds: damaged ones are refused or passed over with a warning, never trusted."""

import json
import os
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d import Strategy3D
from lightning_3d.checkpoint import watching_last
from lightning_3d.errors import CheckpointError
from lightning_3d.strategy.run_note import NOTE, RunNote, leave_note
from tests.checkpoint.savers import At, fit
from tests.checkpoint.trainings import build
from tests.parity import QUIET, caught_warnings, long, raised
from tests.workers import run

GOOD = RunNote(("/a/b",), 4, 2)
NO_COUNTS = (0, -3, 10**18, True, 2.0, "3", None)


def signed(**changes):
    """A note with a checksum that is right, as an attacker or another version could write."""
    note = RunNote(**{"folders": ("/a",), "data_parallel_size": 4, "accumulate_grad_batches": 2, **changes})
    return note.dumps()


def unsigned(**changes):
    return json.dumps({**json.loads(GOOD.dumps()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        "[" * 10**5,
        unsigned(data_parallel_size=5),
        unsigned(folders="/a/b"),
        unsigned(crc=1),
        *(signed(data_parallel_size=number) for number in NO_COUNTS),
        *(signed(accumulate_grad_batches=number) for number in NO_COUNTS),
    ],
    ids=range(23),
)
def test_a_damaged_note(tmp_path, text):
    (tmp_path / NOTE).write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        RunNote.read(tmp_path / NOTE)


def test_each_flipped_bit_of_a_note_is_found_or_changes_nothing(tmp_path):
    raw = GOOD.dumps().encode()
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / NOTE).write_bytes(damaged)
        try:
            assert RunNote.read(tmp_path / NOTE) == GOOD
        except CheckpointError:
            continue


def test_a_note_follows_no_link_and_leaves_nothing_else(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / f"{NOTE}.new").symlink_to(tmp_path / "other")
    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    note = RunNote((str(tmp_path),), 4, 2)
    leave_note(trainer, note)
    assert RunNote.read(tmp_path / NOTE) == note
    assert (tmp_path / "other").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([NOTE, f"{NOTE}.new", "other"])


def start(folder, steps, format):
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    flags = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 0, "max_steps": steps, "max_epochs": -1}
    strategy = Strategy3D(checkpoint_format=format, resume="auto", quiet=True)
    trainer = Trainer(**flags, devices=2, strategy=strategy, callbacks=[keep], default_root_dir=folder)
    module = build("MLP")
    with caught_warnings() as seen:
        trainer.fit(module)
    return len(module.seen), [text for text in seen if "Skipping the checkpoint" in text]


def no_manifest(path):
    (path / "manifest.json").unlink()


def nothing_left(path):
    for file in path.iterdir():
        file.unlink()


def many_disks(path):
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"PK\x06\x07") + 4] ^= 1  # BadZipFile
    path.write_bytes(raw)


def dangling(path):
    path.unlink()
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("format", "damage"),
    [("sharded", no_manifest), ("sharded", nothing_left), ("full", many_disks), ("full", dangling)],
)
def test_what_is_passed_over_is_named(tmp_path, format, damage):
    run(start, str(tmp_path), 3, format, world=2)
    newest = tmp_path / "step=3.ckpt"
    damage(newest)
    os.utime(newest, follow_symlinks=False)
    steps, messages = run(start, str(tmp_path), 4, format, world=2)[0]
    assert steps == 2
    assert len(messages) == 1
    assert "step=3.ckpt" in messages[0]


def test_a_damaged_note_is_our_error_on_every_rank(tmp_path):
    run(start, str(tmp_path), 1, "full", world=2)
    (tmp_path / NOTE).write_text(unsigned(data_parallel_size=3))
    for text in run(raised, CheckpointError, start, str(tmp_path), 2, "full", world=2):
        assert NOTE in text
        assert "damaged" in text


class Odd:
    """Only pickle can store it."""


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_what_a_restart_refuses_is_said_when_it_is_saved(tmp_path, format):
    (messages,) = run(_save_odd, format, str(tmp_path), world=1)
    assert len([text for text in messages if "only pickle can store" in text]) == 1


def _save_odd(format, folder):
    class Holder(At):
        def state_dict(self):
            return {"odd": Odd()}

    def save(trainer):
        trainer.save_checkpoint(Path(folder) / "a.ckpt")

    return fit(1, {"checkpoint_format": format}, 2, Holder(s1=save, s2=save))[1]


def go_on(folder, world, format, epochs, path):
    module = build("GPT")
    keep = ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=-1, filename="{epoch}")
    flags = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 0, "max_epochs": epochs}
    trainer = Trainer(**flags, devices=world, strategy=Strategy3D(checkpoint_format=format), callbacks=[keep])
    with caught_warnings() as seen:
        trainer.fit(module, ckpt_path=path)
    return len(module.seen), [text for text in seen if "Skipping the checkpoint" in text]


def damage_sharded(path):
    part = next(path.glob("part-*"))
    raw = bytearray(part.read_bytes())
    raw[len(raw) // 2] ^= 4
    part.write_bytes(raw)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("format", "damage", "says"),
    [
        ("sharded", lambda path: (path / "manifest.json").unlink(), "interrupted"),
        ("sharded", damage_sharded, "checksum"),
        long("full", cut_short, "cut short"),
    ],
)
def test_damaged_ones_are_passed_over(tmp_path, format, damage, says):
    folder = str(tmp_path)
    assert run(go_on, folder, 2, format, 2, None, world=2)[0][0] == 10
    last, newest = tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt"
    assert last.exists()
    assert newest.exists()
    damage(last)
    steps, seen = run(go_on, folder, 2, format, 3, "last", world=2)[0]
    assert steps == 5  # goes on from the end of the second epoch
    assert len(seen) == 1
    assert "last.ckpt" in seen[0]
    assert says in seen[0]


def test_one_that_was_named_is_not_replaced_by_another(tmp_path):
    run(go_on, str(tmp_path), 1, "sharded", 2, None, world=1)
    damage_sharded(tmp_path / "last.ckpt")
    again = (str(tmp_path), 1, "sharded", 3, str(tmp_path / "last.ckpt"))
    (text,) = run(raised, CheckpointError, go_on, *again, world=1)
    assert "last.ckpt" in text
    assert "checksum" in text


def test_lightning_still_looks_for_the_last_one_where_we_watch(tmp_path):
    original, found = ModelCheckpoint._find_last_checkpoints, []
    trainer = Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[ModelCheckpoint(dirpath=tmp_path)])
    with watching_last(found.append), pytest.warns(UserWarning, match="no last checkpoint"):
        trainer._checkpoint_connector._select_ckpt_path(TrainerFn.FITTING, "last", False, True)
    assert found == [[]]
    assert ModelCheckpoint._find_last_checkpoints is original
