"""An opened sharded checkpoint: plain values, and tensors that are read on demand, in full or in part."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_3d.checkpoint.collect import OPTIMIZERS, WEIGHTS
from lightning_3d.checkpoint.locks import Reading
from lightning_3d.checkpoint.manifest import MAX_BYTES, Manifest, read_manifest, reading, slots, verify
from lightning_3d.checkpoint.placement import Piece, Placement, box, overlaps
from lightning_3d.checkpoint.plain_json import loads
from lightning_3d.checkpoint.remote_path import Place, located
from lightning_3d.checkpoint.safetensors_files import DTYPES, Slot, read_box
from lightning_3d.errors import CheckpointError

HYPER = "hyper_parameters"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, still on disk."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    slots: tuple[tuple[Piece, Slot], ...]
    reading: Reading | None = field(default=None, compare=False, repr=False)
    """Keeps the files."""

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read_shard(self, placement: Placement) -> Tensor:
        if placement.shape != tuple(self.shape):
            raise CheckpointError(f"{self.name} has shape {tuple(self.shape)} here, {placement.shape} is wanted.")
        local = torch.empty(placement.local_shape, dtype=self.dtype)
        for piece, slot in self.slots:
            for there, here in overlaps([_in_file(piece)], placement.pieces):
                read_box(slot, there.local, there.size, local[box(here.local, here.size)])
        return local

    def read_full(self) -> Tensor:
        return self.read_shard(Placement.full(self.shape))

    def read_into(self, out: Tensor, corner: Sequence[int] | None = None) -> None:
        """Read the box of the size of `out` that begins at `corner`, or with 0, into `out`."""
        start = (0,) * out.dim()
        wanted = Piece(offset=start if corner is None else tuple(corner), size=tuple(out.shape), local=start)
        for piece, slot in self.slots:
            for there, here in overlaps([_in_file(piece)], [wanted]):
                read_box(slot, there.local, there.size, out[box(here.local, here.size)])


def groups(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The keys of `sizes` in groups of at most `most` bytes, or of one key."""
    found: list[list[str]] = [[]]
    total = 0
    for key, size in sizes.items():
        if found[-1] and total + size > most:
            found.append([])
            total = 0
        found[-1].append(key)
        total += size
    return found


def _in_file(piece: Piece) -> Piece:
    """A box, located in its own file."""
    return Piece(offset=piece.offset, size=piece.size, local=(0,) * len(piece.size))


class StoredDict(dict[str, Any]):
    """A dict whose tensors are read from disk on access. `stored` gives one without reading it.

    What was read stays in it: code of the user may change it in place.
    """

    def stored(self, key: str) -> Any:
        return super().__getitem__(key)

    def __getitem__(self, key: str) -> Any:
        value = read_tensors(super().__getitem__(key))
        super().__setitem__(key, value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        return read_tensors(super().pop(key, *default))

    def __iter__(self) -> Iterator[str]:  # with one of its own, dict(...) and ** read through __getitem__
        return super().__iter__()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def copy(self) -> "StoredDict":
        return StoredDict({key: self[key] for key in self})

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}


def read_tensors(value: Any, read: Callable[[StoredTensor], Tensor] = StoredTensor.read_full) -> Any:
    if isinstance(value, StoredTensor):
        return read(value)
    if isinstance(value, dict):
        items = ((key, value.stored(key) if isinstance(value, StoredDict) else value[key]) for key in value)
        return {key: read_tensors(item, read) for key, item in items}
    if type(value) in (list, tuple):
        return type(value)([read_tensors(item, read) for item in value])
    return value


@dataclass(frozen=True)
class Opened:
    """A sharded checkpoint with all files of its manifest."""

    directory: Place
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]
    open_files: Reading = field(compare=False, repr=False)
    """The lock on the manifest: meanwhile no other save removes its files."""

    @classmethod
    def open(cls, directory: Place) -> "Opened":
        """Check that everything is there; reads no tensor."""
        open_files = reading(directory)
        manifest = read_manifest(directory, open_files)
        where = slots(directory, manifest)
        tensors = {
            name: StoredTensor(name, DTYPES[stored.dtype], torch.Size(stored.shape), where[name], open_files)
            for name, stored in manifest.tensors.items()
        }
        return cls(directory, manifest, tensors, open_files)

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Read every `ranks`-th file and compare checksums."""
        verify(self.directory, self.manifest.files[rank::ranks])

    def state(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Everything, as Lightning's own checkpoint has it, tensors still on disk in `state_dict` and optimizers.

        With `weights_only=False` what the user saved that has no plain form is unpickled too, which may run any code.
        """
        size = next(file.size for file in self.manifest.files if file.name == self.manifest.state)
        if size > MAX_BYTES:
            raise CheckpointError(f"{self.manifest.state} has {size} bytes; at most {MAX_BYTES} can be.")
        text = (self.directory / self.manifest.state).read_bytes()
        content = loads(text, self._find(weights_only), f"{self.manifest.state} in {self.directory}")
        if not isinstance(content, dict) or not isinstance(content.get("rest"), dict):
            raise CheckpointError(f"{self.manifest.state} in {self.directory} contains no state: it is damaged.")
        checkpoint: dict[str, Any] = read_tensors({k: v for k, v in content["rest"].items() if k != WEIGHTS})
        if WEIGHTS in content["rest"]:
            checkpoint[WEIGHTS] = StoredDict(content["rest"][WEIGHTS])
        if content.get(OPTIMIZERS):
            checkpoint[OPTIMIZERS] = [NamedOptimizer(each) for each in content[OPTIMIZERS]]
        checkpoint[RANKS] = content.get("ranks", [])
        return checkpoint

    def _find(self, weights_only: bool | None) -> Callable[[str, str], Any]:
        objects: dict[str, Any] = {}

        def find(kind: str, name: str) -> Any:
            if kind == "tensor":
                return self.tensors[name]
            if weights_only is False and self.manifest.objects is not None:
                if not objects:
                    pickled = io.BytesIO((self.directory / self.manifest.objects).read_bytes())
                    objects.update(torch.load(pickled, weights_only=False))
                return objects[name]
            return self._left_out(name)

        return find

    def _left_out(self, name: str) -> None:
        remedy = "If you trust where it comes from, load it with weights_only=False, which may run any code in it."
        if HYPER not in name:
            raise CheckpointError(f"{self.directory} contains {name:.80}, which is not plain data. {remedy}")
        warnings.warn(f"Left {name:.80} out of {self.directory}: it is not plain data. {remedy}", stacklevel=2)


def existing(path: Any) -> Place:
    """Return where `path` is. Raise if there is no checkpoint."""
    found = located(path)
    if not found.exists():
        raise CheckpointError(f"There is no checkpoint {path}.")
    return found


RANKS = "lightning_3d_ranks"
"""Key of a loaded checkpoint for the states of each rank: random streams, compression, loss scale, callbacks."""


class NamedOptimizer(StoredDict):
    """The state of an optimizer, by parameter name."""
