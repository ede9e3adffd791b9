"""Settings of NCCL's watchdog, which aborts a process whose collective does not end. No Python code runs after that."""

import os
from pathlib import Path

EVENTS = 2000
"""Collectives of each rank that torch's own flight recorder remembers."""


def set_nccl_watchdog(backend: str, folder: Path) -> None:
    """Let torch write the last collectives of a rank to `folder` before NCCL aborts it. What the user set stays.

    The watchdog of this package writes to `folder` earlier than that, so the folder exists by then.
    """
    if "nccl" not in backend:
        return
    ours = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": str(EVENTS),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.absolute() / "nccl-rank-"),
    }
    for name, value in ours.items():
        os.environ.setdefault(name, value)
