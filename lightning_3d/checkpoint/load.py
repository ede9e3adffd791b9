"""Put a stored state into live modules and optimizers: each rank reads its part."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.collect import parameter_names, parameters_of, to_numbers
from lightning_3d.checkpoint.placement import Splits, describe
from lightning_3d.checkpoint.stored import NamedOptimizer, StoredDict, StoredTensor, materialize
from lightning_3d.module.state_dict import as_shards
from lightning_3d.ranks.shards import like

BATCH_BYTES = 2**30
"""Largest number of bytes of weights in memory at a time, in addition to the module."""


def load_weights(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """`module.load_state_dict`, a gigabyte at a time where `state` is still on disk."""
    batches = list_of_batches(state)
    if len(batches) == 1:
        module.load_state_dict(_read(state, batches[0]), strict=strict)
        return
    missing, unexpected = set(module.state_dict().keys()) if strict else set(), set()
    for keys in batches:
        result = module.load_state_dict(_read(state, keys), strict=False)
        missing &= set(result.missing_keys)
        unexpected |= set(result.unexpected_keys)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {sorted(missing)}, unexpected"
            f" keys {sorted(unexpected)}."
        )


def list_of_batches(state: Mapping[str, Any]) -> list[list[str]]:
    """Keys of `state` in groups of at most `BATCH_BYTES`, or one key."""
    batches: list[list[str]] = [[]]
    size = 0
    for key in state:
        value = state.stored(key) if isinstance(state, StoredDict) else None
        size += value.nbytes if isinstance(value, StoredTensor) else 0
        if size > BATCH_BYTES and batches[-1]:
            batches.append([])
            size = 0
        batches[-1].append(key)
    return batches


def _read(state: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    return {key: state[key] for key in keys} if isinstance(state, StoredDict) else state


def load_optimizer(
    optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module, splits: Splits, what: str
) -> None:
    """Give `optimizer` a state by name, of which this rank reads its own part only."""
    if not isinstance(state, NamedOptimizer):
        optimizer.load_state_dict(dict(state))  # full, from a single file
        return
    names, parameters = parameter_names(module), parameters_of(optimizer)
    aliases = [names.get(p, (f"(parameter {index})",)) for index, p in enumerate(parameters)]
    numbered = to_numbers({key: state.stored(key) for key in state}, aliases, what)
    numbered["state"] = {
        key: _entry(value, parameters[key], splits.get(parameters[key])) if isinstance(key, int) else value
        for key, value in numbered["state"].items()
        if not isinstance(key, int) or not parameters[key].is_meta  # of other pipeline stages
    }
    with as_shards():
        optimizer.load_state_dict(numbered)


def _entry(values: Mapping[str, Any], parameter: nn.Parameter, split: Any) -> dict[str, Any]:
    placement = describe(parameter, split)
    return {
        key: like(parameter, value.part(placement))
        if isinstance(value, StoredTensor) and value.shape == parameter.shape
        else materialize(value)
        for key, value in values.items()
    }
