"""Safetensors files that the user's code opens while it builds a module: their tensors are read when they are used.

`from_pretrained` of transformers and `load_file` of safetensors open a file by `safe_open`. Inside of `read_on_use`
they get one whose tensors have no memory. A parameter that becomes such a tensor is read where its shard is computed.
Names were read in transformers 5.23.
"""

import importlib
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.checkpoint.plain_json import parse
from lightning_3d.checkpoint.safetensors_files import OpenFile, Slot, marked, read_box, read_header
from lightning_3d.errors import CheckpointError
from lightning_3d.module.undo import UndoStack, replaced_entries
from lightning_3d.sandbox import deferred
from lightning_3d.sandbox.build_recorder import Recorder
from lightning_3d.sandbox.recorded_value import Box, Reader

_OPENING = ("safetensors", "safetensors.torch", "transformers.modeling_utils", "transformers.modeling_layers")
"""Modules with a name `safe_open`."""
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
"""Else transformers loads in threads, where no operation is recorded."""


@contextmanager
def read_on_use(recorder: Recorder) -> Iterator[None]:
    """Let code inside open safetensors files whose tensors `recorder` fills when they are used."""
    with replaced_entries([(os.environ, _ASYNC, "1")]), UndoStack() as undo:
        importlib.import_module("safetensors")  # a module that is imported inside takes the name from there
        for name in _OPENING:
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "safe_open"):
                original = getattr(module.safe_open, "original", module.safe_open)
                opening = _Opening(original, recorder)
                undo.set(module, "safe_open", opening)
                undo.callback(opening.end)
        yield


class _Opening:
    """`safe_open`, whose files `recorder` reads until the end of the context."""

    def __init__(self, original: Any, recorder: Recorder) -> None:
        self.original = original
        self.recorder: Recorder | None = recorder

    def end(self) -> None:
        """Code that was imported inside of the context goes on with this object."""
        self.recorder = None

    def __call__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        other = framework not in ("pt", "torch", "pytorch") or torch.device(device).type != "cpu"
        if other or self.recorder is None:
            return self.original(filename, framework=framework, device=device, **options)
        path = Path(filename)
        try:
            opened = OpenFile(path)  # the user's code may remove it before the tensors are read
            slots = {name: replace(slot, opened=opened) for name, slot in read_header(path, skip_unknown=True).items()}
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged or was cut short. {error} Save or download it again.") from error
        found = self.original(filename, framework=framework, device=device, **options)
        _check_index(path, found.keys())
        return _File(found, slots, self.recorder)


def _check_index(path: Path, names: Collection[str]) -> None:
    """Raise for a tensor that an index next to the file places in it: transformers would draw random numbers."""
    for index in path.parent.glob("*.safetensors.index.json"):
        try:
            places = parse(index.read_bytes(), "index")["weight_map"]
            missing = [name for name, file in places.items() if file == path.name and name not in names]
        except (CheckpointError, LookupError, TypeError, AttributeError, OSError):
            continue  # no index of this kind: the user's code has its own reader
        if missing:
            raise CheckpointError(
                f"{path} lacks {missing[0]} ({len(missing)} in all), which {index.name} places in it. They would train"
                " from random numbers. Save or download both again."
            )


class _File:
    """An open file whose large tensors are read when they are used."""

    def __init__(self, opened: Any, slots: dict[str, Slot], recorder: Recorder) -> None:
        self.opened, self.slots, self.recorder = opened, slots, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def __enter__(self) -> "_File":
        self.opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.opened.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return _Slice(self.opened.get_slice(name), name, self)

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self.opened.offset_keys()}

    def get_tensor(self, name: str) -> Tensor:
        slot = self.slots.get(name)
        if slot is None:  # of a dtype that torch or this package does not know
            with torch._C.DisableTorchFunction():
                found: Tensor = self.opened.get_tensor(name)
            return found
        tensor = torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
        self.recorder.read_later(tensor, _READ, marked(slot))
        if tensor.nbytes < deferred.SMALL:
            self.recorder.use([tensor])
        return tensor


class _Slice:
    def __init__(self, opened: Any, name: str, file: _File) -> None:
        self.opened, self.name, self.file = opened, name, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def __getitem__(self, index: Any) -> Tensor:
        if index is Ellipsis:
            return self.file.get_tensor(self.name)
        with torch._C.DisableTorchFunction():  # the library makes tensors in ways that a mode does not expect
            part: Tensor = self.opened[index]
        return part


def _read(out: Tensor, slot: Slot, box: Box) -> None:
    read_box(slot, [first for first, _ in box], out.shape, out)


_READ = Reader(_read)
