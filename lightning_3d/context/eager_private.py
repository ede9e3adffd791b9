"""Attention of Hugging Face that is computed by matrix products, and torch's function in its place.

Read in transformers 5.23: `config._attn_implementation` chooses, and each attention reads it when it is called.
"""

import copy
from typing import Any

from torch import nn

from lightning_3d.module.undo import UndoStack


def eager_modules(block: nn.Module) -> tuple[str, ...]:
    """Names of the modules in `block` whose configuration asks for matrix products."""
    configs = ((name, getattr(child, "config", None)) for name, child in block.named_modules())
    return tuple(name for name, config in configs if getattr(config, "_attn_implementation", None) == "eager")


def use_torch_attention(module: nn.Module, undo: UndoStack) -> None:
    """Let `module` call torch's function."""
    config: Any = copy.copy(module.config)  # many modules may share one configuration
    config._attn_implementation = "sdpa"
    undo.set(module, "config", config)
