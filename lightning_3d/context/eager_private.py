"""Attention of Hugging Face that is computed by products or other kernels, and torch's function in its place.

Read in transformers 5.23: `config._attn_implementation` chooses, and each attention reads it when it is called.
"""

import copy
from typing import Any

from torch import nn

from lightning_3d.module.undo import UndoStack


def other_attention(block: nn.Module) -> dict[str, str]:
    """The modules in `block` whose configuration asks for another attention than torch's function, and which."""
    configs = ((name, getattr(child, "config", None)) for name, child in block.named_modules())
    chosen = {name: getattr(config, "_attn_implementation", None) for name, config in configs}
    return {name: kind for name, kind in chosen.items() if isinstance(kind, str) and kind != "sdpa"}


def use_torch_attention(module: nn.Module, undo: UndoStack) -> None:
    """Let `module` call torch's function."""
    config: Any = copy.copy(module.config)  # many modules may share one configuration
    config._attn_implementation = "sdpa"
    undo.set(module, "config", config)
