"""`recompute_blocks`: have the blocks of a module computed again in backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_3d.activations.recompute_choice import Recompute
from lightning_3d.activations.recomputed_block import RecomputedForward
from lightning_3d.module.forward import add_layer
from lightning_3d.module.undo import UndoStack


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
