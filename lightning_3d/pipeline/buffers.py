"""Buffers that code around the blocks changes (a queue of keys, a centre, a count): those of the last stage count.

That code runs on every stage, up to the stage's cut, so only the last one has run all of it. The others undo what they
did, and take what the last stage made of these buffers at the end of a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Mark = tuple[int, int]


def open_buffers(module: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the buffers that belong to no unit."""
    inside = tuple(f"{unit}." for unit in units)
    return [name for name, _ in module.named_buffers() if not name.startswith(inside)]


def marks(module: nn.Module, names: Sequence[str]) -> dict[str, Mark]:
    """What changes when a buffer is replaced, or changed in place."""
    found = dict(module.named_buffers())
    return {name: (id(found[name]), found[name]._version) for name in names if name in found}


def changed(module: nn.Module, before: Mapping[str, Mark]) -> tuple[str, ...]:
    """Names of those that were."""
    now = marks(module, list(before))
    return tuple(name for name, mark in before.items() if now.get(name) != mark)


@contextmanager
def undone(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let what runs inside change copies of these buffers; the buffers themselves are back at the end.

    They are not written to: a backward may still need the values that the copies had.
    """
    held = [(owner, leaf, owner._buffers[leaf]) for owner, leaf in (_place(module, name) for name in names)]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held if buffer is not None}
    for owner, leaf, buffer in held:
        owner._buffers[leaf] = None if buffer is None else copies[id(buffer)]
    try:
        yield
    finally:
        for owner, leaf, buffer in held:
            owner._buffers[leaf] = buffer


@torch.no_grad()
def put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, in place where they fit."""
    for name, value in values.items():
        owner, leaf = _place(module, name)
        buffer = owner._buffers[leaf]
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            owner._buffers[leaf] = value.clone()


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
