"""`BudgetFit`: keep the activations of as many blocks as a memory budget allows."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_3d.activations.recompute_blocks import RecomputedBlocks
from lightning_3d.activations.recomputed_block import BlockBytes, SavedBytes
from lightning_3d.module.forward import Layer, ranks_of
from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.ranks import talk


@dataclass
class _Found:
    """What one rank has measured."""

    stage: int
    base: int
    """The most bytes that were kept with every block computed again."""
    blocks: dict[str, tuple[int, int]]
    """For each block, in running order, its further bytes in one call, and the most calls at one time."""


@dataclass
class BudgetFit(StepCheck):
    """Chooses the blocks whose activations are kept, so that a rank stays within its budget. See [Note: fit].

    [Note: fit] The first batch runs with every block computed again. Autograd's hooks count what is kept between
    blocks and behind them, and each block runs once more to count what it would keep. Then the activations of as many
    blocks as fit are kept, the last blocks first. Those are freed by their own backward, before another block of the
    same microbatch is computed again. Ranks that compute the same blocks must decide alike, or one of them would send
    what no other receives. So they decide on the largest numbers of all of them.
    """

    recomputed: RecomputedBlocks
    module: nn.Module
    stage: int
    trained: int = -1
    """Parameters that were trained when the bytes were measured; others may be thawed later."""
    saved: SavedBytes | None = None
    fitted: bool = True
    order: list[str] = field(default_factory=list)
    """Names of measured blocks, as they ran."""

    def before_train(self, args: Args) -> None:
        """Decide if the last batch was measured, and begin to measure if this one is to be. Collective."""
        trained = sum(parameter.requires_grad for parameter in self.module.parameters())
        if trained != self.trained:
            self.trained, self.fitted, self.order = trained, False, []
            self.saved = SavedBytes([*self.module.parameters(), *self.module.buffers()])
            for block in self.recomputed.blocks.values():
                inner = block.module.modules()
                together = any(isinstance(each, nn.SyncBatchNorm) or Layer.DATA in ranks_of(each) for each in inner)
                block.on, block.measured = True, BlockBytes(order=self.order, together=together)
        elif not self.fitted:
            self._fit()

    def around_train(self) -> SavedBytes | nullcontext[None]:
        return nullcontext() if self.fitted or self.saved is None else self.saved

    def _fit(self) -> None:
        assert self.saved is not None
        self.fitted, blocks = True, self.recomputed.blocks
        measured = {name: blocks[name].measured for name in self.order}
        found = _Found(self.stage, self.saved.peak, {n: (b.extra, b.most) for n, b in measured.items() if b})
        self.saved = None
        ranks = talk.gather(found)
        for stage in sorted({each.stage for each in ranks}):
            mine = [each for each in ranks if each.stage == stage]
            kept = self._kept(mine, stage)
            if stage == self.stage:
                for name, block in blocks.items():
                    block.on = name not in kept

    def _kept(self, ranks: Sequence[_Found], stage: int) -> set[str]:
        """The blocks of a pipeline rank whose activations are kept."""
        budget = self.recomputed.choice.budget
        assert budget is not None
        names = list(ranks[0].blocks)
        extra = {name: max(each.blocks[name][0] for each in ranks) for name in names}
        calls = {name: max(each.blocks[name][1] for each in ranks) for name in names}
        base = max(each.base for each in ranks)

        def peak(first: int) -> int:
            """The most bytes where the blocks from `first` on are kept."""
            kept, again = names[first:], max((extra[name] for name in names[:first]), default=0)
            waiting = sum(extra[name] * max(calls[name] - 1, 0) for name in kept)  # of other microbatches
            return base + max(sum(extra[name] * calls[name] for name in kept), waiting + again)

        for first in range(len(names) + 1):
            if peak(first) <= budget:
                return set(names[first:])
        rank_zero_warn(
            f"recompute_budget={budget / 1e9:.3g} GB is less than the {peak(len(names)) / 1e9:.3g} GB that pipeline"
            f" rank {stage} keeps even with every block computed again. Training goes on like that. Use smaller batches"
            " or microbatches, or more tensor ranks with sequence_parallel=True."
        )
        return set()
