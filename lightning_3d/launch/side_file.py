"""Files that a training writes for people to read. A disk that does not take one ends no training."""

import os
import warnings
from pathlib import Path


def write_side_file(file: Path, text: str, replaces: Path | None = None) -> None:
    """Write `text` to `file` and remove the file that it `replaces`. Warn where the disk does not take it.

    The text goes to another name first, so that a full disk leaves no half of it.
    """
    part = file.with_name(f"{file.name}.{os.urandom(4).hex()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(file)
        if replaces is not None:
            replaces.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{file} cannot be written ({error}). The run goes on without it. Free space on the disk, or make the"
            " folder writable, before the next run.",
            stacklevel=2,
        )
