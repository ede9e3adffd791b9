"""`recompute_blocks`: have the blocks of a module computed again in backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_3d.activations.recomputed_block import RecomputedForward
from lightning_3d.errors import ConfigurationError
from lightning_3d.module.forward import add_layer
from lightning_3d.module.host_memory import bytes_in
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.deferred import computed_on_use, is_deferred

RecomputeArgument = Literal["full", "selective", "auto"]


@dataclass(frozen=True)
class Recompute:
    """Which activations of a block backward computes again."""

    mode: RecomputeArgument | None = None
    """None keeps all. "full" keeps what enters a block. "selective" also keeps results of products, attention and
    collectives. "auto" is "full" for as few blocks as the budget allows."""
    budget: int | None = None
    """For "auto": bytes of activations that one rank may keep."""

    @classmethod
    def of(cls, mode: RecomputeArgument | None, budget: str | float | None) -> "Recompute":
        """Check the two arguments of `Strategy3D`."""
        if mode is not None and mode not in get_args(RecomputeArgument):
            known = ", ".join(map(repr, get_args(RecomputeArgument)))
            raise ConfigurationError(f"recompute={mode!r} is none of None, {known}.")
        if (mode == "auto") != (budget is not None):
            raise ConfigurationError(
                f"recompute={mode!r} with recompute_budget={budget!r}: the budget is what recompute='auto' needs, and"
                " only that reads it. It is the memory of one rank for activations. Use"
                " recompute='auto', recompute_budget='20GB', or recompute='full' without a budget."
            )
        return cls(mode, None if budget is None else bytes_in(budget, "recompute_budget"))


KEEP_ALL = Recompute()


@dataclass
class RecomputedBlocks:
    """The blocks of one rank that are computed again."""

    blocks: Mapping[str, RecomputedForward]
    choice: Recompute


def recompute_blocks(module: nn.Module, names: Sequence[str], choice: Recompute, undo: UndoStack) -> RecomputedBlocks:
    """Put a `RecomputedForward` around each of the `owned_blocks`."""
    found = owned_blocks(module, names if choice.mode is not None else ())
    blocks = {name: RecomputedForward(block, name, choice.mode == "selective") for name, block in found.items()}
    for forward in blocks.values():
        add_layer(forward, undo)
    return RecomputedBlocks(blocks, choice)


def owned_blocks(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Those blocks of `names` that are called and of which this rank has parameters, each by its first name."""
    owned: dict[str, nn.Module] = {}
    for name in names:
        block = module.get_submodule(name)
        new = not any(block is each for each in owned.values()) and type(block).forward is not nn.Module.forward
        if new and any(not parameter.is_meta for parameter in block.parameters()):
            owned[name] = block
    return owned


Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def one_block_at_a_time(module: nn.Module, blocks: Sequence[str], context: Context) -> Iterator[Context]:
    """Let the code inside train `module`, of which some parameters may be deferred. Yields the context of its steps.

    A module that is built in parts may not fit, and so may its activations and its weights in half precision. Backward
    computes each of its blocks again.
    """
    if not is_deferred(module):
        yield context
        return
    with computed_on_use(module), UndoStack() as undo:
        recompute_blocks(module, blocks, Recompute("full"), undo)
        yield lambda: _uncached(context)


@contextmanager
def _uncached(context: Context) -> Iterator[None]:
    """Enter `context`, in which autocast would keep each weight that it has cast until the end."""
    cached = torch.is_autocast_cache_enabled()
    with context():
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
