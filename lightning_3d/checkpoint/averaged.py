"""Copies of weights in the states of callbacks, such as an average: sharded in training, full in a checkpoint.

A hook that copies a parameter gets a shard of it, or a meta tensor where another pipeline stage owns the parameter. A
copy is known by its key, the name of its parameter: it is gathered when it is saved, and sharded when it is loaded.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.collect import OPTIMIZERS, WEIGHTS
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.sandbox.trees import tensors_at
from lightning_3d.tensor.apply import full_tensor
from lightning_3d.tensor.geometry import TensorSplit

PARTS = "lightning_3d_parts"
"""Key of a checkpoint under which it lists the copies of parameters: path of each, and name of the parameter."""
CALLBACKS = "callbacks"
Path = tuple[Any, ...]
"""Keys and indices that lead to a tensor in a checkpoint."""
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class CopyLayout:
    """The layout that a copy of one parameter must have on this rank."""

    shape: torch.Size
    placements: tuple[Any, ...] | None
    """None where the parameter is full, or owned by another stage."""
    split: TensorSplit | None


@dataclass(frozen=True)
class Copy:
    tensor: Tensor
    name: str | None
    """Of the parameter that it is a copy of."""
    kind: str
    """"shard" of a tensor, "number" computed from shards, "away" on another stage, or "full"."""


@dataclass(frozen=True)
class _Description:
    """A `Copy`, as other ranks get to know it."""

    kind: str
    problem: str | None


class AveragedWeights:
    """The copies of the parameters of `parallel`. Works after the run too, when these are unsplit again."""

    def __init__(self, parallel: ParallelModule) -> None:
        self.layouts = {
            name: CopyLayout(p.shape, _placements(p), parallel.parameters.split(p))
            for name, p in parallel.module.named_parameters(remove_duplicate=False)
        }
        self.stages = parallel.stages

    def gather_full(self, checkpoint: dict[str, Any], gather: Gather) -> dict[str, Any]:
        """Return `checkpoint` with full copies. Collective; raises on every rank for tensors that are no copies."""
        mine, everyone = self._agree(checkpoint, gather)
        if not everyone:
            return checkpoint
        full = {path: self._full(mine[path]) for path in everyone}
        if self.stages is not None:
            provided = {path: {"value": full[path]} for path, kinds in everyone.items() if self._provides(kinds)}
            full |= {path: entry["value"] for path, entry in self.stages.exchange(provided).items()}
        return _listed(_replaced(checkpoint, full), mine, everyone)

    def in_shards(
        self, checkpoint: dict[str, Any], gather: Gather
    ) -> tuple[dict[str, Any], dict[int, TensorSplit | None]]:
        """Return `checkpoint` for a sharded save, and the split of each shard in it by id. Collective."""
        mine, everyone = self._agree(checkpoint, gather)
        copies = {path: mine[path] for path in everyone}
        splits = {
            id(each.tensor): self.layouts[each.name].split
            for each in copies.values()
            if each.kind == "shard" and each.name is not None
        }
        numbers = {path: self._full(each) for path, each in copies.items() if each.kind == "number"}
        return (_listed(_replaced(checkpoint, numbers), mine, everyone) if everyone else checkpoint), splits

    def _provides(self, kinds: Sequence[str]) -> bool:
        """Return True if this rank is the first of its pipeline that has a tensor which others lack."""
        assert self.stages is not None
        ranks = dist.get_process_group_ranks(self.stages.group)
        here = [rank for rank in ranks if kinds[rank] != "away"]
        return len(here) < len(ranks) and here[:1] == [dist.get_rank()]

    def _full(self, item: Copy) -> Tensor:
        if not isinstance(item.tensor, DTensor):
            return item.tensor
        return full_tensor(item.tensor, self.layouts[item.name].split if item.name is not None else None)

    def _agree(self, checkpoint: Mapping[str, Any], gather: Gather) -> tuple[dict[Path, Copy], dict[Path, list[str]]]:
        """Return this rank's tensors, and the kinds on all ranks of each that is sharded, or in a dict with such."""
        mine = dict(self._copies(checkpoint))
        table = gather({path: _Description(each.kind, self._problem(each)) for path, each in mine.items()})
        rows = {path: [described.get(path) for described in table] for described in table for path in described}
        sharded = {path for path, row in rows.items() if any(each and each.kind != "full" for each in row)}
        dicts = {path[:-1] for path in sharded}
        kinds: dict[Path, list[str]] = {}
        for path, row in rows.items():
            if path not in sharded and path[:-1] not in dicts:
                continue
            lacking = ", ".join(str(rank) for rank, each in enumerate(row) if each is None)
            problem = next((each.problem for each in row if each is not None and each.problem is not None), None)
            if lacking:
                problem = f"which is missing on rank {lacking}: return it from state_dict on every rank"
            if problem is not None:
                owner = f"The callback {path[1]}" if path[0] == CALLBACKS else "A hook on_save_checkpoint"
                where = f"checkpoint{''.join(f'[{key!r}]' for key in path)}"
                raise CheckpointError(f"{owner} saves {where}, {problem}. Nothing was saved.")
            kinds[path] = [each.kind for each in row if each is not None]
        return mine, kinds

    def _problem(self, item: Copy) -> str | None:
        if item.kind in ("full", "number"):
            return None
        if item.name is not None and (
            item.kind == "away" or self.layouts[item.name].placements == _placements(item.tensor)
        ):
            return None
        return (
            f"a tensor {tuple(item.tensor.shape)} of which each rank has a shard. Its key is no name of a parameter"
            " with the same shards, so it could not be gathered. Keep copies of parameters in a dict with the keys of"
            " named_parameters(), and gather results computed from them with .full_tensor() in the hook"
        )

    def _copies(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[Path, Copy]]:
        others = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZERS)}
        for path, tensor in tensors_at(others):
            kind = "away" if tensor.is_meta and self.stages is not None else "full"
            if isinstance(tensor, DTensor):
                kind = "shard" if tensor.dim() else "number"
            yield path, Copy(tensor, self._name(path[-1], tensor), kind)

    def _name(self, key: Any, tensor: Tensor) -> str | None:
        """Return the parameter of this key, which may have a prefix: of a module that contains the module."""
        names = [
            name
            for name, layout in self.layouts.items()
            if isinstance(key, str) and f".{key}".endswith(f".{name}") and layout.shape == tensor.shape
        ]
        return max(names, key=len, default=None)


@dataclass(frozen=True)
class PendingCopies:
    """States of callbacks with copies of parameters, which can be sharded once the module is placed."""

    states: dict[Any, Any]
    copies: list[tuple[Path, str]]

    @classmethod
    def take(cls, loaded: dict[str, Any], unsplit: Container[str]) -> "PendingCopies | None":
        """Take them out of a loaded checkpoint. Callbacks in `unsplit` load theirs before the module is placed."""
        listed = [(tuple(path), name) for path, name in loaded.pop(PARTS, ())]
        states = {key: state for key, state in loaded.get(CALLBACKS, {}).items() if key not in unsplit}
        copies = [(path, name) for path, name in listed if path[0] == CALLBACKS and path[1] in states]
        pending = {key: loaded[CALLBACKS].pop(key) for key in {path[1] for path, _ in copies}}
        return cls(pending, copies) if copies else None

    def give(self, trainer: Trainer, parallel: ParallelModule) -> None:
        """Shard the copies as the parameters are sharded now, and give them to the callbacks."""
        named = dict(parallel.module.named_parameters(remove_duplicate=False))
        checkpoint: Any = {CALLBACKS: self.states}
        shards: dict[Path, Tensor] = {}
        for path, name in self.copies:
            full = reduce(getitem, path, checkpoint)
            if name in named and named[name].shape == full.shape:
                shards[path] = parallel.parameters.shard(named[name], full)
        states = _replaced(checkpoint, shards)[CALLBACKS]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])


def _placements(tensor: Tensor) -> tuple[Any, ...] | None:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else None


def _replaced(value: Any, tensors: Mapping[Path, Tensor]) -> Any:
    """Return `value` with other tensors in some places. Copies the containers, since callbacks may still use them."""
    if () in tensors:
        return tensors[()]
    inside: dict[Any, dict[Path, Tensor]] = {}
    for path, tensor in tensors.items():
        inside.setdefault(path[0], {})[path[1:]] = tensor
    if not inside:
        return value
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update({key: _replaced(value[key], below) for key, below in inside.items()})
        return changed
    items = [_replaced(item, inside.get(index, {})) for index, item in enumerate(value)]
    return tuple(items) if type(value) is tuple else items


def _listed(checkpoint: dict[str, Any], mine: Mapping[Path, Copy], everyone: Mapping[Path, Any]) -> dict[str, Any]:
    copies = [[list(path), mine[path].name] for path in everyone if mine[path].name is not None]
    return {**checkpoint, PARTS: copies}
