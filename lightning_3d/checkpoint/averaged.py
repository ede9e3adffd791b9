"""Copies of weights that callbacks keep, such as an average: in parts while training, whole in a checkpoint.

A copy that a hook makes of a parameter is laid out as the parameter is: sharded, or on meta where another stage of the
pipeline holds it. Kept under the name of its parameter it can be made whole, and cut again in any layout.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.collect import OPTIMIZERS, WEIGHTS
from lightning_3d.errors import CheckpointError
from lightning_3d.parallelize import ParallelModule
from lightning_3d.pipeline.exchange import Stages
from lightning_3d.tensor.apply import full_tensor
from lightning_3d.tensor.geometry import TensorSplit

PARTS = "lightning_3d_parts"
"""Under this key a checkpoint says which tensors in it were cut as which parameters."""
CALLBACKS = "callbacks"
Path = tuple[Any, ...]
"""Keys and indices that lead to a tensor in a checkpoint."""
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Held:
    """How this rank holds one parameter."""

    shape: torch.Size
    placements: Sequence[Any] | None
    """None where it is whole, or elsewhere."""
    split: TensorSplit | None

    def holds(self, tensor: DTensor) -> bool:
        """Whether `tensor` is cut in the same way."""
        return self.placements is not None and tuple(tensor.placements) == tuple(self.placements)


@dataclass(frozen=True)
class Copy:
    """A tensor that this rank brings to a checkpoint."""

    tensor: Tensor
    name: str | None
    """Of the parameter that it is a copy of."""
    kind: str
    """"part" of a tensor, a "number" computed from parts, "away" on another stage, or "here"."""


class AveragedWeights:
    """Finds copies of the parameters of `composed`, and knows how these are held after they are whole again too."""

    def __init__(self, composed: ParallelModule) -> None:
        self.held = {
            name: Held(p.shape, p.placements if isinstance(p, DTensor) else None, composed.splits.get(p))
            for name, p in composed.module.named_parameters(remove_duplicate=False)
        }
        once = list(composed.module.named_parameters())
        self.orders = [[name for name, _ in once], [name for name, p in once if p.requires_grad]]
        stages = composed.stages
        self.stages = Stages(stages.split, stages.group, stages.stage_rank) if stages is not None else None

    def whole(self, checkpoint: dict[str, Any], gather: Gather) -> dict[str, Any]:
        """`checkpoint` with copies in one piece. Collective; refuses on every rank what cannot be told apart."""
        mine, everyone = self._agree(checkpoint, gather)
        if not everyone:
            return checkpoint
        wholes = {path: self._in_one_piece(mine[path]) for path in everyone}
        if self.stages is not None:
            given = {path: {"value": wholes[path]} for path, row in everyone.items() if self._gives(row)}
            wholes |= {path: entry["value"] for path, entry in self.stages.exchange(given).items()}
        return _noted(_replaced(checkpoint, wholes), mine, everyone)

    def in_parts(
        self, checkpoint: dict[str, Any], gather: Gather
    ) -> tuple[dict[str, Any], dict[int, TensorSplit | None]]:
        """`checkpoint` with what a sharded one needs to know, and how parts in it are split, by id. Collective."""
        mine, everyone = self._agree(checkpoint, gather)
        splits = {
            id(item.tensor): self.held[item.name].split
            for item in (mine[path] for path in everyone)
            if item.kind == "part" and item.name is not None
        }
        numbers = {path: self._in_one_piece(mine[path]) for path in everyone if mine[path].kind == "number"}
        return (_noted(_replaced(checkpoint, numbers), mine, everyone) if everyone else checkpoint), splits

    def _gives(self, row: Sequence[Any]) -> bool:
        """Whether this rank is the first of its pipeline that has what others have not."""
        assert self.stages is not None
        ranks = dist.get_process_group_ranks(self.stages.group)
        here = [rank for rank in ranks if row[rank].kind != "away"]
        return len(here) < len(ranks) and here[:1] == [dist.get_rank()]

    def _in_one_piece(self, item: Copy) -> Tensor:
        if not isinstance(item.tensor, DTensor):
            return item.tensor
        return full_tensor(item.tensor, self.held[item.name].split if item.name is not None else None)

    def _agree(self, checkpoint: Mapping[str, Any], gather: Gather) -> tuple[dict[Path, Copy], dict[Path, list[Any]]]:
        """What this rank brings, and what each rank brings to paths that are not whole everywhere, or beside such."""
        mine = dict(self._copies(checkpoint))
        said = gather({path: _Said(item.kind, item.name, self._wrong(item)) for path, item in mine.items()})
        rows = {path: [each.get(path) for each in said] for each in said for path in each}
        cut = {path for path, row in rows.items() if any(one and one.kind != "here" for one in row)}
        beside = {path[:-1] for path in cut}
        rows = {path: row for path, row in rows.items() if path in cut or path[:-1] in beside}
        for path, row in rows.items():
            where = f"checkpoint{''.join(f'[{key!r}]' for key in path)}"
            lacking = [rank for rank, one in enumerate(row) if one is None]
            wrong = next((one.wrong for one in row if one is not None and one.wrong is not None), None)
            if lacking:
                wrong = (
                    f"which is missing on rank {', '.join(map(str, lacking))}: return it from state_dict on every rank"
                )
            if wrong is not None:
                owner = f"The callback {path[1]}" if path[0] == CALLBACKS else "A hook on_save_checkpoint"
                raise CheckpointError(f"{owner} saves {where}, {wrong}. Nothing was saved.")
        return mine, rows

    def _wrong(self, item: Copy) -> str | None:
        tensor = item.tensor
        if not isinstance(tensor, DTensor) or item.kind == "number":
            return None
        if item.name is not None and self.held[item.name].holds(tensor):
            return None
        return (
            f"a tensor {tuple(tensor.shape)} of which each rank has a part, and which is no copy of a parameter of"
            " which this rank has a part. Keep copies of parameters in a dict by the names of named_parameters(), and"
            " make what you compute from them whole with .full_tensor() in the hook that does"
        )

    def _copies(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[Path, Copy]]:
        rest = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZERS)}
        for path, tensor, beside in _tensors(rest, (), ()):
            if isinstance(tensor, DTensor):
                yield path, Copy(tensor, self._name(path[-1], tensor, beside), "part" if tensor.dim() else "number")
            else:
                kind = "away" if tensor.is_meta and self.stages is not None else "here"
                yield path, Copy(tensor, self._name(path[-1], tensor, beside), kind)

    def _name(self, key: Any, tensor: Tensor, beside: Sequence[Any]) -> str | None:
        """Which parameter a tensor is a copy of, by its key, or by its place in a list of copies of all."""
        alike = [name for name, held in self.held.items() if held.shape == tensor.shape]
        if not isinstance(key, str):
            shapes = [item.shape if isinstance(item, Tensor) else None for item in beside]
            order = next((o for o in self.orders if [self.held[name].shape for name in o] == shapes), None)
            return order[key] if order is not None else None
        if key in alike:
            return key
        longer = [name for name in alike if name.endswith(f".{key}")]  # a copy of a part of the module
        shorter = [name for name in alike if key.endswith(f".{name}")]  # of something that holds it
        return longer[0] if len(longer) == 1 else max(shorter, key=len, default=None)


@dataclass(frozen=True)
class _Said:
    kind: str
    name: str | None
    wrong: str | None


@dataclass(frozen=True)
class PendingCopies:
    """States of callbacks that have to be cut, which is only known how once the module is placed."""

    states: dict[Any, Any]
    cuts: list[tuple[Path, str]]

    @classmethod
    def take(cls, loaded: dict[str, Any]) -> "PendingCopies | None":
        """Take them out of a checkpoint that was loaded."""
        found = [(tuple(path), name) for path, name in loaded.pop(PARTS, ())]
        cuts = [(path, name) for path, name in found if path[0] == CALLBACKS and path[1] in loaded.get(CALLBACKS, {})]
        return cls({key: loaded[CALLBACKS].pop(key) for key in {path[1] for path, _ in cuts}}, cuts) if cuts else None

    def give(self, trainer: Trainer, composed: ParallelModule) -> None:
        """Cut them as the parameters are now, and give them to the callbacks."""
        named = dict(composed.module.named_parameters(remove_duplicate=False))
        state = {CALLBACKS: self.states}
        parts: dict[Path, Tensor] = {}
        for path, name in self.cuts:
            whole = _at(state, path)
            if name in named and named[name].shape == whole.shape:
                parts[path] = composed.take_shard(named[name], whole)
        states = _replaced(state, parts)[CALLBACKS]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])


def _tensors(value: Any, path: Path, beside: Sequence[Any]) -> Iterator[tuple[Path, Tensor, Sequence[Any]]]:
    """Every tensor in `value`, how to reach it, and the list that it is in."""
    if isinstance(value, Tensor):
        yield path, value, beside
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, key), ())
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, index), value)


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, tensors: Mapping[Path, Tensor]) -> Any:
    """`value` with other tensors in some places; what holds those is copied: a callback may go on with its own."""
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


def _noted(checkpoint: dict[str, Any], mine: Mapping[Path, Copy], everyone: Mapping[Path, list[Any]]) -> dict[str, Any]:
    cuts = [[list(path), mine[path].name] for path in everyone if mine[path].name is not None]
    return {**checkpoint, PARTS: cuts}
