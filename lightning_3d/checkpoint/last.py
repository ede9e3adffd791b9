"""`ckpt_path="last"`: the newest complete checkpoint, not merely the newest.

Touches one private method of Lightning, `ModelCheckpoint._find_last_checkpoints` (read in 2.6), which says what "last"
may mean; `tests/checkpoint/test_last.py` fails when it changes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint.manifest import NAME, is_sharded
from lightning_3d.launch.lightning_private import is_local_file_protocol


@contextmanager
def watching_last(note: Callable[[list[str]], None]) -> Iterator[None]:
    """Inside, call `note` when Lightning looks for the last checkpoint, with all candidates, the newest first."""
    original = ModelCheckpoint._find_last_checkpoints

    def find(self: ModelCheckpoint, trainer: Any) -> set[str]:
        found = original(self, trainer)
        folder = self.dirpath
        if folder is not None and is_local_file_protocol(folder):
            note(newest_first([*found, *checkpoints_in(Path(folder))]))
        return found

    ModelCheckpoint._find_last_checkpoints = find  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelCheckpoint._find_last_checkpoints = original  # type: ignore[method-assign]


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
