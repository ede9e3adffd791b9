"""Reading a Hugging Face `config.json` into a `Transformer`, without transformers installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.transformer import Transformer

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
_FEEDFORWARD = ("intermediate_size", "ffn_dim", "n_inner")
_GPT = {"gated": False, "tied": True}
_LLAMA = {
    "gated": True,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "tied": False,
    "dropout": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "opt": _GPT,
    "gpt_neox": {"gated": False, "tied": False},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma": {**_LLAMA, "tied": True},
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_norm": True},
    "granite": _LLAMA,
    "phi3": _LLAMA,
}
_LEARNED_POSITIONS = {"gpt2": 0, "opt": 2}
"""Families with a position table, and the rows it has beyond the longest sequence."""


def read_config(path: Path) -> Transformer:
    """The model that the `config.json` at `path` describes."""
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PlannerError(f"{path} is not JSON: {error}.") from error
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(config, dict):
        raise PlannerError(f"{path} is not a Hugging Face config: it holds no object of settings.")
    return transformer_of(config, name=path.parent.name or path.stem, where=str(path))


def transformer_of(config: Mapping[str, Any], *, name: str = "model", where: str = "config") -> Transformer:
    """The model that the settings in `config` describe."""
    family = config.get("model_type")
    if family is None:
        raise PlannerError(f"{where} lacks model_type, which the planner needs ({', '.join(FAMILIES)}).")
    if family not in FAMILIES:
        raise PlannerError(
            f"{where}: model_type {family!r} is not one that the planner counts ({', '.join(FAMILIES)}):"
            " give your LightningModule as module.Class instead."
        )
    sizes: dict[str, Any] = {field: _first(config, field, where) for field in _NAMES}
    traits = {**FAMILIES[family], "tied": config.get("tie_word_embeddings", FAMILIES[family]["tied"])}
    if family in ("llama", "qwen3") and config.get("attention_bias"):
        traits |= {"qkv_bias": True, "out_bias": True}
    if family == "gpt_neox" and config.get("attention_bias") is False:
        traits |= {"qkv_bias": False, "out_bias": False}
    if config.get("mlp_bias"):
        traits["mlp_bias"] = True
    positions = sizes.pop("positions")
    extra = _LEARNED_POSITIONS.get(family)
    return Transformer(
        name=name,
        **sizes,
        sequence=positions,
        positions=0 if extra is None else positions + extra,
        kv_heads=_size(config, "num_key_value_heads", where) if traits["gated"] else None,
        head_size=_size(config, "head_dim", where),
        feedforward=next(filter(None, (_size(config, key, where) for key in _FEEDFORWARD)), None),
        **traits,
    )


def _size(config: Mapping[str, Any], key: str, where: str) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise PlannerError(f"{where}: {key}={value!r} must be a whole number of at least 1.")
    return value


def _first(config: Mapping[str, Any], field: str, where: str) -> int:
    for key in _NAMES[field]:
        value = _size(config, key, where)
        if value is not None:
            return value
    raise PlannerError(f"{where} lacks {' or '.join(_NAMES[field])}, which the planner needs.")
