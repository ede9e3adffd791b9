"""A sharded checkpoint as one file that a stock Trainer resumes from. Offline, a tensor at a time."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.checkpoint.collect import OPTIMIZERS, WEIGHTS
from lightning_3d.checkpoint.names import to_numbers
from lightning_3d.checkpoint.seal import save_sealed
from lightning_3d.checkpoint.stored import RANKS, NamedOptimizer, Opened, StoredDict, StoredTensor, existing
from lightning_3d.errors import CheckpointError

IN_MEMORY_BYTES = 2**20
"""Tensors up to this size are not worth a file of their own."""


def consolidate(directory: str | Path, out: str | Path, *, weights_only: bool | None = None) -> None:
    """Write the checkpoint in `directory` to the file `out`, exactly as Lightning itself would have saved it.

    Memory holds one tensor at a time; the directory of `out` needs room for the state twice.

    Args:
        weights_only: False also unpickles what has no plain form (some hyperparameters), which may run any code in it.
    """
    out = Path(out)
    if out.is_dir():
        raise CheckpointError(f"{out} is a directory; name the file to write.")
    if existing(directory).is_file():
        raise CheckpointError(f"{directory} is one file already, from which a stock Trainer resumes. Copy it.")
    opened = Opened.open(Path(directory))
    opened.verify()
    state = opened.state(weights_only)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        on_disk = _Scratch(Path(scratch))
        with open(Path(scratch) / "whole", "xb") as file:
            save_sealed(_stock(state, on_disk), file)
        os.replace(Path(scratch) / "whole", out)


class _Scratch:
    """Whole tensors in files, so that the system and not this process keeps them in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def tensors_of(self, value: Any) -> Any:
        """`value` with every stored tensor in it whole."""
        if isinstance(value, StoredTensor):
            return self._whole(value)
        if isinstance(value, StoredDict):
            return {key: self.tensors_of(value.stored(key)) for key in value}
        if isinstance(value, dict):
            return {key: self.tensors_of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self.tensors_of(item) for item in value])
        return value

    def _whole(self, stored: StoredTensor) -> Tensor:
        if stored.nbytes <= IN_MEMORY_BYTES:
            return stored.whole()
        self.count += 1
        file = str(self.folder / str(self.count))
        mapped = torch.from_file(file, shared=True, size=stored.shape.numel(), dtype=stored.dtype).view(stored.shape)
        stored.read_into(mapped)
        return mapped


def _stock(state: dict[str, Any], on_disk: _Scratch) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if key != OPTIMIZERS}
    plain[RANKS] = on_disk.tensors_of(state[RANKS])
    plain[WEIGHTS] = on_disk.tensors_of(state.get(WEIGHTS, {}))
    if OPTIMIZERS in state:
        plain[OPTIMIZERS] = [on_disk.tensors_of(numbered(each)) for each in state[OPTIMIZERS]]
    return plain


def numbered(optimizer: NamedOptimizer) -> dict[str, Any]:
    """The state of an optimizer as torch numbers it on one device, tensors still on disk."""
    state = {key: optimizer.stored(key) for key in optimizer}
    names = [[name] for group in state["param_groups"] for name in group["params"]]
    return to_numbers(state, names, "an optimizer")
