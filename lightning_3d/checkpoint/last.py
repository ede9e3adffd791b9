"""`ckpt_path="last"`: the newest checkpoint that is whole, not merely the newest.

Touches one private method of Lightning, `ModelCheckpoint._find_last_checkpoints` (read in 2.6), which says what "last"
may mean; `tests/checkpoint/test_last.py` fails when it changes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint.manifest import NAME, is_sharded
from lightning_3d.launch.lightning_private import is_local_file_protocol

Note = Callable[[Any, list[str]], None]
"""Told the trainer and what could take the place of the last checkpoint, the newest first."""


def announce_last(note: Note) -> None:
    """Call `note` whenever some Trainer looks for the last checkpoint. Takes effect once."""
    original = ModelCheckpoint._find_last_checkpoints
    if getattr(original, "tells", False):
        return

    def find(self: ModelCheckpoint, trainer: Any) -> set[str]:
        found = original(self, trainer)
        folder = self.dirpath
        if folder is not None and is_local_file_protocol(folder):
            note(trainer, newest_first([*found, *checkpoints_in(Path(folder))]))
        return found

    find.tells = True  # type: ignore[attr-defined]
    ModelCheckpoint._find_last_checkpoints = find  # type: ignore[method-assign]


def checkpoints_in(folder: Path) -> list[str]:
    """Everything directly in `folder` that looks like a checkpoint."""
    if not folder.is_dir():
        return []
    return [
        str(path)
        for path in folder.iterdir()
        if path.suffix == ".ckpt" or (path.suffix != ".part" and is_sharded(path))
    ]


def newest_first(paths: Iterable[str]) -> list[str]:
    """Without repetition, by the time at which each was finished."""
    return sorted(dict.fromkeys(paths), key=_finished, reverse=True)


def _finished(path: str) -> float:
    manifest = Path(path) / NAME
    file = manifest if manifest.exists() else Path(path)
    return file.stat().st_mtime if file.exists() else 0.0
