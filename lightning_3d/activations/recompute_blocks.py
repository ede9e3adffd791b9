"""`recompute_blocks`: have the blocks of a module computed again in backward."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_3d.activations.recompute_choice import Recompute
from lightning_3d.activations.recomputed_block import RecomputedForward
from lightning_3d.module.anatomy import Anatomy


@dataclass
class RecomputedBlocks:
    """The blocks of one rank that are computed again."""

    blocks: Mapping[str, RecomputedForward]
    choice: Recompute

    def undo(self) -> None:
        """Give the blocks their own forwards back."""
        for block in self.blocks.values():
            if block.original is None:
                vars(block.module).pop("forward", None)
            else:
                block.module.forward = block.original  # type: ignore[method-assign]


def recompute_blocks(module: nn.Module, anatomy: Anatomy, choice: Recompute) -> RecomputedBlocks:
    """Put a `RecomputedForward` around each block of `module` that this rank owns and that has parameters."""
    blocks: dict[int, RecomputedForward] = {}
    names = [name for chain in anatomy.chains for name in chain.blocks] if choice.mode is not None else []
    for name in names:
        block = module.get_submodule(name)
        here = any(not parameter.is_meta for parameter in block.parameters())
        if here and id(block) not in blocks and type(block).forward is not nn.Module.forward:
            blocks[id(block)] = forward = RecomputedForward(block, name, choice.mode == "selective")
            block.forward = forward  # type: ignore[method-assign]
    return RecomputedBlocks({block.name: block for block in blocks.values()}, choice)
