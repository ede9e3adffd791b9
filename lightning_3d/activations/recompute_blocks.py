"""Activations of the blocks of a module: computed again in backward, where a budget asks for it, or in host memory.

Copies to and from a device are made in the stream that computes, by pinned memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.recomputed_block import BlockBytes, RecomputedForward, SavedBytes
from lightning_3d.errors import ConfigurationError, check_one_of
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, ranks_of
from lightning_3d.module.host_memory import bytes_in, is_on_device
from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.module.torch_private import version_of
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks import talk
from lightning_3d.sandbox.deferred import computed_on_use, is_deferred
from lightning_3d.sandbox.interceptor import storage

RecomputeArgument = Literal["full", "selective", "auto"]


@dataclass(frozen=True)
class Recompute:
    """The activations of a block that backward computes again."""

    mode: RecomputeArgument | None = None
    """None keeps all. "full" keeps what enters a block. "selective" also keeps results of products, attention and
    collectives. "auto" is "full" for as few blocks as the budget allows."""
    budget: int | None = None
    """For "auto": bytes of activations that one rank may keep."""

    @classmethod
    def of(cls, mode: RecomputeArgument | None, budget: str | float | None) -> "Recompute":
        """Check the two arguments of `Strategy3D`."""
        check_one_of("recompute", mode, (None, *get_args(RecomputeArgument)))
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
    blocks: Mapping[str, RecomputedForward]
    choice: Recompute


def recompute_blocks(module: nn.Module, names: Sequence[str], choice: Recompute, undo: UndoStack) -> RecomputedBlocks:
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


SMALL = 2**20
"""Bytes of an activation that is not worth a copy."""


@dataclass(frozen=True)
class OnHost:
    """A copy of an activation, and the device that it came from."""

    copy: Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "OnHost":
        pinned = is_on_device(tensor)
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        copy.copy_(tensor.detach(), non_blocking=pinned)
        return cls(copy, tensor.device)

    def back(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True)


class OffloadedForward(ForwardLayer, rank=Layer.OFFLOAD):
    """The forward of a block that moves to the host what its backward needs. Weights stay where they are."""

    bytes = 0
    """Of the last call, on the host."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.next(*args, **kwargs)
        weights = {storage(parameter) for parameter in self.module.parameters()}
        copies: dict[Any, tuple[Tensor, OnHost]] = {}
        """With the tensors: while one is alive, no other has its memory."""
        self.bytes = 0

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is not Tensor or tensor.nbytes < SMALL or storage(tensor) in weights:
                return tensor
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
            if key not in copies:
                copies[key] = tensor, OnHost.of(tensor)
                self.bytes += tensor.nbytes
            return copies[key][1]

        with saved_tensors_hooks(pack, _unpack):
            result = self.next(*args, **kwargs)
        copies.clear()
        return result


def _unpack(packed: Any) -> Tensor:
    return packed.back() if isinstance(packed, OnHost) else packed


def offload_activations(module: nn.Module, anatomy: Anatomy, undo: UndoStack) -> None:
    for block in owned_blocks(module, anatomy.blocks).values():
        add_layer(OffloadedForward(block), undo)


@dataclass
class _Found:
    """The measurements of one rank."""

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
