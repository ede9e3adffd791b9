"""A `Transformer` from a Hugging Face `config.json`, without transformers installed, or by name.

Names are those of the published shapes of `conf/models/`, and plain sizes such as `7b`.

A missing size is an error: the defaults of transformers are those of one checkpoint of each family, and change with its
versions. Fields that transformers derives from others are derived here too.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_3d.errors import PlannerError, did_you_mean
from lightning_3d.module.amounts import parse_count, show_count
from lightning_3d.tools.planner.plain_yaml import conf_folder, read_plain
from lightning_3d.tools.planner.transformer import MOST_SIZE, Transformer

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
_TABLE = read_plain(conf_folder() / "models" / "families.yaml", "models file")
FAMILIES: dict[str, dict[str, Any]] = {
    family: {**_TABLE["traits"][about["like"]], **about.get("traits", {})}
    for family, about in _TABLE["families"].items()
}
"""Traits of `Transformer` by model_type."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_RENAMED = {"num_experts": "num_local_experts"}
"""As transformers 5 writes what older versions wrote."""
_MAY_LACK = ("dense_layers", "query_rank")


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
    family = _family(config, where)
    about, derived = _TABLE["families"][family], _TABLE["families"][family].get("derived", ())
    sizes: dict[str, Any] = {field: _needed(config, where, *_NAMES[field]) for field in _NAMES}
    positions = sizes.pop("positions")
    traits = {**FAMILIES[family], "tied": _switch(config, "tie_word_embeddings", FAMILIES[family]["tied"], where)}
    for key, switched in about.get("biases", {}).items():
        if config.get(key) is not None:
            traits |= dict.fromkeys(switched, _switch(config, key, False, where))

    def size(key: str, field: str) -> int | None:
        return _size(config, key, where) if field in derived else _needed(config, where, key)

    if traits["gated"]:
        sizes |= {
            "kv_heads": size("num_key_value_heads", "num_key_value_heads"),
            "head_size": size("head_dim", "head_dim"),
        }
    for field, key in about.get("experts", {}).items():
        given = key if key in config else _RENAMED.get(key, key)
        sizes[field] = 0 if field in _MAY_LACK and not config.get(key) else _needed(config, where, given)
    if "shared_width" in sizes:
        sizes["shared_width"] *= _needed(config, where, "n_shared_experts")
    more = about.get("more_positions")
    return Transformer(
        name=name,
        **sizes,
        sequence=positions,
        positions=0 if more is None else positions + more,
        feedforward=size(about.get("feedforward", "intermediate_size"), "feedforward"),
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
    about = _TABLE["families"][family]
    for key in () if "experts" in about else _EXPERTS:
        if config.get(key) not in (None, 0, 1):
            raise PlannerError(f"{where}: {key}={config[key]!r} is a mixture of experts, not a {family}: {instead}")
    for key, counted in about.get("only", {}).items():
        if config.get(key) is not None and config[key] not in counted:
            raise PlannerError(f"{where}: {family} with {key}={config[key]} is not counted: {instead}")
    width = _size(config, "word_embed_proj_dim", where) if family == "opt" else None
    if width is not None and width != _needed(config, where, *_NAMES["hidden"]):
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


def _needed(config: Mapping[str, Any], where: str, *keys: str) -> int:
    """The size that has one of the names `keys`."""
    for key in keys:
        value = _size(config, key, where)
        if value is not None:
            return value
    raise PlannerError(f"{where} lacks {' or '.join(keys)}, which the planner needs.")


def _named(name: str, family: str, sequence: int, **sizes: object) -> Transformer:
    """A GPT has as many learned positions as a sample has tokens."""
    traits = {**FAMILIES[family], "positions": sequence if family == "gpt2" else 0, **sizes}
    return Transformer(name=name, sequence=sequence, **traits)


_SHAPES = read_plain(conf_folder() / "models" / "named.yaml", "models file")
ALIASES = {alias: name for name, shape in _SHAPES.items() for alias in shape.pop("aliases", ())}
MODELS = {name: _named(name, **shape) for name, shape in _SHAPES.items()}
_SIZE = re.compile(r"\d+(?:\.\d+)?[mbt]", re.IGNORECASE)


def named_model(name: str) -> Transformer:
    """The model called `name`, or a GPT of exactly the parameters that a size such as `7.5b` says."""
    key = ALIASES.get(name.lower(), name.lower())
    if key in MODELS:
        return MODELS[key]
    if _SIZE.fullmatch(key):
        return sized_model(key)
    hint = did_you_mean(key, [*MODELS, *ALIASES]) or ": write a name such as llama-7b or a size such as 7b."
    raise PlannerError(f"no model is called {name!r}{hint} A config.json file or module.Class works too.")


def sized_model(size: str) -> Transformer:
    """A GPT of exactly `size` parameters, with the layers of the nearest published GPT and width to match."""
    parameters = parse_count(size, "model size")
    gpts = [shape for shape in MODELS.values() if not shape.gated]
    nearest = min(gpts, key=lambda shape: abs(shape.parameters / parameters - parameters / shape.parameters))
    hidden = max(128, round((parameters / (12 * nearest.layers)) ** 0.5 / 128) * 128)
    shape = _named(size, "gpt2", 2048, layers=nearest.layers, hidden=hidden, heads=hidden // 128, vocabulary=51200)
    while shape.embedding_parameters > parameters / 2 and shape.hidden > 128:
        shape = replace(shape, hidden=shape.hidden - 128, heads=shape.heads - 1)
    if parameters < shape.embedding_parameters * 2:
        # Its blocks would have next to no parameters, or fewer than none.
        raise PlannerError(
            f"a GPT of {size} parameters would be little more than its embeddings: give at least"
            f" {show_count(2 * shape.embedding_parameters)}, or --layers --hidden --heads --vocabulary --sequence."
        )
    return replace(shape, nominal=parameters)
