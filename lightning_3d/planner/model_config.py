"""Reading a Hugging Face `config.json` into a `Transformer`, without transformers installed.

What a file leaves out is not guessed: the defaults of transformers are the sizes of one checkpoint of each family, and
change with its versions. Only what it derives from other fields is derived here too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.transformer import MOST_SIZE, Transformer

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
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
_FEEDFORWARD = {"gpt2": "n_inner", "opt": "ffn_dim"}
"""Where a family keeps the width inside its MLP; intermediate_size in the others."""
_DERIVED = {
    "feedforward": {"gpt2"},
    "num_key_value_heads": {"llama", "granite", "phi3"},
    "head_dim": {"llama", "mistral", "qwen2", "granite", "phi3"},
}
"""Families that derive a field where the file leaves it out: 4 x width, one per head, width / heads."""
_BIASES = {
    "attention_bias": ({"llama", "gemma", "qwen3", "granite", "gpt_neox"}, ("qkv_bias", "out_bias")),
    "mlp_bias": ({"llama", "granite"}, ("mlp_bias",)),
    "enable_bias": ({"opt"}, ("qkv_bias", "out_bias", "mlp_bias")),
}
"""Switches of biases: the families that know them, and what they switch. Other families ignore them."""
_PLAIN = {
    "opt": {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
    "gpt2": {"add_cross_attention": False},
}
"""Switches of which the planner counts one position only."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_config(path: Path) -> Transformer:
    """The model that the `config.json` at `path` describes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PlannerError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (ValueError, RecursionError) as error:
        # ValueError: also numbers of thousands of digits.
        raise PlannerError(f"{path} is not JSON that can be read: {error}.") from error
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(config, dict):
        raise PlannerError(f"{path} is not a Hugging Face config: it holds no object of settings.")
    return transformer_of(config, name=path.parent.name or path.stem, where=str(path))


def transformer_of(config: Mapping[str, Any], *, name: str = "model", where: str = "config") -> Transformer:
    """The model that the settings in `config` describe."""
    family = _family(config, where)
    sizes: dict[str, Any] = {field: _first(config, field, where) for field in _NAMES}
    positions = sizes.pop("positions")
    traits = {**FAMILIES[family], "tied": _switch(config, "tie_word_embeddings", FAMILIES[family]["tied"], where)}
    for key, (families, switched) in _BIASES.items():
        if family in families and config.get(key) is not None:
            traits |= dict.fromkeys(switched, _switch(config, key, False, where))
    if traits["gated"]:
        sizes["kv_heads"] = _derivable(config, "num_key_value_heads", family, where)
        sizes["head_size"] = _derivable(config, "head_dim", family, where)
    key = _FEEDFORWARD.get(family, "intermediate_size")
    extra = _LEARNED_POSITIONS.get(family)
    return Transformer(
        name=name,
        **sizes,
        sequence=positions,
        positions=0 if extra is None else positions + extra,
        feedforward=_size(config, key, where) if family in _DERIVED["feedforward"] else _needed(config, key, where),
        **traits,
    )


def _family(config: Mapping[str, Any], where: str) -> str:
    """The `model_type` of `config`, where the planner counts it as transformers builds it."""
    family = config.get("model_type")
    if family is None:
        raise PlannerError(f"{where} lacks model_type, which the planner needs ({', '.join(FAMILIES)}).")
    instead = "give your LightningModule as module.Class instead."
    if not isinstance(family, str) or family not in FAMILIES:
        raise PlannerError(
            f"{where}: model_type {str(family)[:60]!r} is not one that the planner counts ({', '.join(FAMILIES)}):"
            f" {instead}"
        )
    for key in _EXPERTS:
        if config.get(key) not in (None, 0, 1):
            raise PlannerError(f"{where}: {key}={config[key]!r} is a mixture of experts, not a {family}: {instead}")
    for key, counted in _PLAIN.get(family, {}).items():
        if _switch(config, key, counted, where) is not counted:
            raise PlannerError(f"{where}: {family} with {key}={config[key]} is not counted: {instead}")
    width = _size(config, "word_embed_proj_dim", where) if family == "opt" else None
    if width is not None and width != _first(config, "hidden", where):
        raise PlannerError(
            f"{where}: opt with word_embed_proj_dim={width}, other than its width, is not counted: {instead}"
        )
    return family


def _switch(config: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PlannerError(f"{where}: {key}={value!r} must be true or false.")
    return value


def _size(config: Mapping[str, Any], key: str, where: str) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or not 1 <= value <= MOST_SIZE):
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        raise PlannerError(f"{where}: {key}={shown} must be a whole number of at least 1 and at most {MOST_SIZE:,}.")
    return value


def _needed(config: Mapping[str, Any], key: str, where: str) -> int:
    value = _size(config, key, where)
    if value is None:
        raise PlannerError(f"{where} lacks {key}, which the planner needs.")
    return value


def _derivable(config: Mapping[str, Any], key: str, family: str, where: str) -> int | None:
    return _size(config, key, where) if family in _DERIVED[key] else _needed(config, key, where)


def _first(config: Mapping[str, Any], field: str, where: str) -> int:
    for key in _NAMES[field]:
        value = _size(config, key, where)
        if value is not None:
            return value
    raise PlannerError(f"{where} lacks {' or '.join(_NAMES[field])}, which the planner needs.")
