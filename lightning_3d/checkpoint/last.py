"""`ckpt_path="last"`: the newest complete checkpoint, not merely the newest."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint.manifest import NAME, is_sharded
from lightning_3d.checkpoint.remote_path import Place, RemotePath, located
from lightning_3d.module.undo import UndoStack


@contextmanager
def watching_last(note: Callable[[list[str]], None]) -> Iterator[None]:
    """Inside, call `note` when Lightning looks for the last checkpoint, with all candidates, the newest first."""
    original = ModelCheckpoint._find_last_checkpoints

    def find(self: ModelCheckpoint, trainer: Any) -> set[str]:
        found = original(self, trainer)
        if self.dirpath is not None:
            folder = located(self.dirpath)
            if isinstance(folder, RemotePath):  # Lightning leaves off the protocol, and asks a folder for its time
                found = {str(_last_written(folder / path.rpartition("/")[2])) for path in found}
            note(newest_first([*found, *checkpoints_in(folder)]))
        return found

    with UndoStack() as undo:
        undo.set(ModelCheckpoint, "_find_last_checkpoints", find)
        yield


def checkpoints_in(folder: Place) -> list[str]:
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
    file = _last_written(located(path))
    there = file.exists() if isinstance(file, Path) else file.is_file()  # a folder of a store has no time
    return file.stat().st_mtime if there else 0.0


def _last_written(checkpoint: Place) -> Place:
    """The manifest of a directory, or the file."""
    manifest = checkpoint / NAME
    return manifest if manifest.exists() else checkpoint
