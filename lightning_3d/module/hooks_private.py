"""Hooks of modules, which torch keeps in private dicts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

_DICTS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@contextmanager
def restored_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks that the code inside registers, and put back those that it removes.

    Libraries register hooks at the first call and note it in an attribute. Transformers does so for hidden states.
    """
    dicts = [getattr(each, name) for each in module.modules() for name in _DICTS]
    before = [list(hooks.items()) for hooks in dicts]
    try:
        yield
    finally:
        for hooks, items in zip(dicts, before, strict=True):
            if list(hooks.items()) != items:
                hooks.clear()
                hooks.update(items)


def forward_hooks(module: nn.Module) -> list[object]:
    """The hooks that get results."""
    return list(module._forward_hooks.values())


def backward_hooks(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    """The hooks, now and later, that get gradients of inputs or results."""
    return module._backward_hooks, module._backward_pre_hooks
