"""Attention of Hugging Face that is computed by products or other kernels, and torch's function in its place.

Read in transformers 5.23: `config._attn_implementation` chooses, and each attention reads it when it is called.
"""

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_3d.module.undo import replaced_entries


def other_attention(block: nn.Module) -> dict[str, str]:
    """The modules in `block` whose configuration asks for another attention than torch's function, and which."""
    configs = ((name, getattr(child, "config", None)) for name, child in block.named_modules())
    chosen = {name: getattr(config, "_attn_implementation", None) for name, config in configs}
    return {name: kind for name, kind in chosen.items() if isinstance(kind, str) and kind != "sdpa"}


def torch_attention(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    entries = []
    for module in modules:
        config: Any = copy.copy(module.config)  # many modules may share one configuration
        config._attn_implementation = "sdpa"
        entries.append((vars(module), "config", config))
    return replaced_entries(entries)


def without_empty_cache(value: Any) -> Any:
    """An argument, None for a cache for generation that a model fills in training too: it would get a part."""
    return None if cache_state(value) is False else value


def cache_state(value: Any) -> bool | None:
    """True for a cache that has states of earlier positions, False for an empty one, None for another value."""
    cache = any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
    return any(map(_is_filled, getattr(value, "layers", ()))) if cache else None


def _is_filled(layer: Any) -> bool:
    """True for keys and values of earlier positions, or a state of linear attention."""
    states = getattr(layer, "has_previous_state", {})
    return any(states.values()) or (hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0)
