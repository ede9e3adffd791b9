"""`recompute_blocks`: have the blocks of a module computed again in backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_3d.activations.recompute_choice import Recompute
from lightning_3d.activations.recomputed_block import RecomputedForward
from lightning_3d.module.undo import UndoStack


@dataclass
class RecomputedBlocks:
    """The blocks of one rank that are computed again."""

    blocks: Mapping[str, RecomputedForward]
    choice: Recompute


def recompute_blocks(module: nn.Module, names: Sequence[str], choice: Recompute, undo: UndoStack) -> RecomputedBlocks:
    """Put a `RecomputedForward` around each block of `names` that this rank owns and that has parameters."""
    blocks: dict[int, RecomputedForward] = {}
    for name in names if choice.mode is not None else ():
        block = module.get_submodule(name)
        here = any(not parameter.is_meta for parameter in block.parameters())
        if here and id(block) not in blocks and type(block).forward is not nn.Module.forward:
            blocks[id(block)] = forward = RecomputedForward(block, name, choice.mode == "selective")
            undo.set(block, "forward", forward)
    return RecomputedBlocks({block.name: block for block in blocks.values()}, choice)
