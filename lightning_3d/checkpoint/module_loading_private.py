"""Code of a module that changes what `load_state_dict` gives its parameters, and the buffers of a state."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_BY_NAME = ("lightning_3d.", "torch.distributed.", "torch.nn.modules.", "torchmetrics.")
"""Packages whose code takes each tensor by itself, so that it does not matter which others are there."""


def loads_by_name(module: nn.Module) -> bool:
    """Return True where no code of the user is called when `module` and its children load a state."""
    code: list[Any] = [type(module).load_state_dict]
    for each in module.modules():
        code += [type(each)._load_from_state_dict, *(hook for hooks in _HOOKS for hook in vars(each)[hooks].values())]
    return all((getattr(each, "__module__", None) or "").startswith(_BY_NAME) for each in code)


def copies_parameters(owner: nn.Module) -> bool:
    """Return True where `owner` copies a state to its own parameters as it is."""
    return type(owner)._load_from_state_dict is nn.Module._load_from_state_dict


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a state by name, without the hooks of `state_dict`."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer
