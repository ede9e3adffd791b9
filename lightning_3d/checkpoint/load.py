"""Put a stored state into live modules and optimizers: each rank reads its part."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.axes.state_dict import as_shards
from lightning_3d.checkpoint.collect import parameters_of, to_numbers
from lightning_3d.checkpoint.placement import Placement, Splits, box, describe
from lightning_3d.checkpoint.stored import NamedOptimizer, StoredDict, StoredTensor, groups, read_tensors
from lightning_3d.module.anatomy import parameter_names
from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.module.torch_private import copies_parameters, loads_by_name, own_parameters
from lightning_3d.ranks.shards import like
from lightning_3d.sandbox import deferred
from lightning_3d.sandbox.deferred import Deferred, alone_in_memory, read_later
from lightning_3d.sandbox.recorded_value import Reader

BATCH_BYTES = 2**27
"""Largest number of bytes of weights in memory at a time, in addition to the module."""


def load_weights(module: nn.Module, state: Mapping[str, Any], strict: bool, device: torch.device | None = None) -> None:
    """`module.load_state_dict`. Of a `state` on disk, some megabytes at a time are in memory.

    Code of the user that changes what is loaded gets all of it at once instead. With a `device`, large weights of a
    `state` on disk are read to it once they are used, and not here.
    """
    if not isinstance(state, StoredDict) or not loads_by_name(module):  # code of the user may look for other names
        module.load_state_dict(_read(state, state), strict=strict)
        return
    later = _read_later(module, state, device) if device is not None else set()
    read_now = {key: state.stored(key) for key in state if key not in later}
    sizes = {key: value.nbytes if isinstance(value, StoredTensor) else 0 for key, value in read_now.items()}
    missing: set[str] | None = None
    unexpected: set[str] = set()
    for keys in groups(sizes, BATCH_BYTES):
        result = module.load_state_dict(_read(state, keys), strict=False)
        missing = set(result.missing_keys) if missing is None else missing & set(result.missing_keys)
        unexpected |= set(result.unexpected_keys)
    missing = (missing or set()) - later
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {sorted(missing)}, unexpected"
            f" keys {sorted(unexpected)}."
        )


def _read_later(module: nn.Module, state: StoredDict, device: torch.device) -> set[str]:
    """Let parameters of `module` be read from `state` once they are used. Returns their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if copies_parameters(owner):
            for name, parameter in own_parameters(owner).items():
                if parameter is not None:
                    names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    found = set()
    for parameter, own in names.items():
        stored = state.stored(own[-1]) if own[-1] in state else None  # of a tie, the last name is loaded last
        if (
            isinstance(stored, StoredTensor)
            and type(parameter) in (nn.Parameter, Deferred)
            and not parameter.is_meta
            and stored.shape == parameter.shape
            and parameter.nbytes >= deferred.SMALL
            and (isinstance(parameter, Deferred) or alone_in_memory(parameter))
        ):
            read_later(parameter, _READ, stored, device)
            found |= {name for name in own if name in state}
    return_freed_memory()
    return found


_READ = Reader(lambda out, stored, part: stored.read_into(out, [first for first, _ in part]))


def _read(state: Mapping[str, Any], keys: Iterable[str]) -> Mapping[str, Any]:
    return {key: read_tensors(state.stored(key)) for key in keys} if isinstance(state, StoredDict) else state


def load_optimizer(
    optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module, splits: Splits, what: str
) -> None:
    """Give `optimizer` a state by name, of which this rank reads its own part only."""
    names, parameters = parameter_names(module), parameters_of(optimizer)
    aliases = [names.get(p, (f"(parameter {index})",)) for index, p in enumerate(parameters)]
    if not isinstance(state, NamedOptimizer):  # full, from a single file
        by_name = any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])  # FSDP's
        optimizer.load_state_dict(to_numbers(state, aliases, what) if by_name else dict(state))
        return
    numbered = to_numbers({key: state.stored(key) for key in state}, aliases, what)
    numbered["state"] = {
        key: _entry(value, parameters[key], splits(parameters[key])) if isinstance(key, int) else read_tensors(value)
        for key, value in numbered["state"].items()
        if not isinstance(key, int) or not parameters[key].is_meta  # of other pipeline stages
    }
    with as_shards():
        optimizer.load_state_dict(numbered)


def _entry(values: Mapping[str, Any], parameter: nn.Parameter, split: Any) -> dict[str, Any]:
    placement = describe(parameter, split)
    return {
        key: like(parameter, _part(value, placement))
        if isinstance(value, StoredTensor | Tensor) and value.shape == parameter.shape
        else read_tensors(value)
        for key, value in values.items()
    }


def _part(value: StoredTensor | Tensor, placement: Placement) -> Tensor:
    if isinstance(value, StoredTensor):
        return value.read_shard(placement)
    local = torch.empty(placement.local_shape, dtype=value.dtype)  # code of the user has read or changed it
    for piece in placement.pieces:
        local[box(piece.local, piece.size)] = value[box(piece.offset, piece.size)]
    return local
