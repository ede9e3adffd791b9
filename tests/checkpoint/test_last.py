"""`ckpt_path="last"` takes the newest checkpoint that is whole."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d import Strategy3D
from lightning_3d.checkpoint import watching_last
from lightning_3d.errors import CheckpointError
from tests.checkpoint.trainings import build
from tests.parity import QUIET, caught_warnings, long
from tests.workers import run


def fit(folder, world, format, epochs, path):
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
    assert run(fit, folder, 2, format, 2, None, world=2)[0][0] == 10
    last, newest = tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt"
    assert last.exists()
    assert newest.exists()
    damage(last)
    steps, seen = run(fit, folder, 2, format, 3, "last", world=2)[0]
    assert steps == 5  # goes on from the end of the second epoch
    assert len(seen) == 1
    assert "last.ckpt" in seen[0]
    assert says in seen[0]


def test_one_that_was_named_is_not_replaced_by_another(tmp_path):
    run(fit, str(tmp_path), 1, "sharded", 2, None, world=1)
    damage_sharded(tmp_path / "last.ckpt")
    (text,) = run(_error, str(tmp_path), str(tmp_path / "last.ckpt"), world=1)
    assert "last.ckpt" in text
    assert "checksum" in text


def _error(folder, path):
    with pytest.raises(CheckpointError) as caught:
        fit(folder, 1, "sharded", 3, path)
    return str(caught.value)


def test_lightning_still_looks_for_the_last_one_where_we_watch(tmp_path):
    original, found = ModelCheckpoint._find_last_checkpoints, []
    trainer = Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[ModelCheckpoint(dirpath=tmp_path)])
    with watching_last(found.append), pytest.warns(UserWarning, match="no last checkpoint"):
        trainer._checkpoint_connector._select_ckpt_path(TrainerFn.FITTING, "last", False, True)
    assert found == [[]]
    assert ModelCheckpoint._find_last_checkpoints is original
