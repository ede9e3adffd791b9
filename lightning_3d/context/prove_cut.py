"""Proof of a cut: a block computes whole, and in parts on threads, and all results that training uses agree."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_3d.context.compared_block import NoteLeft
from lightning_3d.context.cut_attention import Part, attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.context.cut_plan import BlockCut
from lightning_3d.module.torch_private import own_buffers
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks import random_streams
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.proof import Key, Outcome, Refused, compare, dims_to_sum, is_large, outcome
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards

_OF_TORCH = vars(nn.Module()).keys()


WHOLE_CHANNELS = {
    F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip


class CutProver:
    """Proves cuts of one block by one call. `original`, the block with its author's code, computes whole."""

    def __init__(self, original: nn.Module, sample: Sample, ranks: int) -> None:
        self.original, self.sample, self.ranks = original.train(), sample, ranks
        self.sums = dims_to_sum(original, is_large(original))
        twin, self.start = self._copy(), random_streams.main_streams()
        own = {
            each: random_streams.state_of(each)
            for child in twin.modules()
            for each in vars(child).values()
            if random_streams.is_generator(each)
        }
        self.whole, self.left, self.foreign = _observed(twin, sample, self.sums)
        self.kept = _kept(twin)
        self.draws = not random_streams.equal(self.start, random_streams.main_streams())
        """True where it draws random numbers other than for dropout."""
        self.draws_alone = bool(random_streams.drawn_from(own))
        """True where it has a generator of its own for them."""

    def prove(self, cut: BlockCut) -> BlockCut:
        """`cut` with the facts of the runs. Raises `Refused`, or any error of the block's code."""
        if self.draws_alone:
            raise Refused("it draws random numbers from a generator of its own")
        if any(self.sample.tensors()[cut.stream].shape[cut.dim] in shape for shape in self.foreign):
            raise Refused("it reads a tensor as long as the sequence that is no argument: its values may change")
        drawn = self._streams_after_runs() if self.draws else None
        with UndoStack() as undo, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            undo.replace(SDPA, attention, [self.original])
            found = run_shards(self.ranks, lambda axis: self._on_part(cut, axis))
        if drawn is not None and not random_streams.equal(drawn, random_streams.main_streams()):
            raise Refused("it draws random numbers for each position, other than for dropout")
        draws, on_part = self._acting_on_part([own for _, own, *_ in found], bool(cut.eager))
        for rank, (part, own, kept, left) in enumerate(found):
            if part is None:
                raise Refused("its other arguments cannot be distinguished from a part of the sequence")
            compare(f"output {{}} on context rank {rank}", _numbered(self.whole), _numbered(own))
            compare(f"gradient of input {{}} on context rank {rank}", self.whole.input_grads, own.input_grads)
            compare(f"tensor {{}}, which it keeps, on context rank {rank}", self.kept, kept)
            compare(f"number {{}}, which it reads back or puts aside, on context rank {rank}", self.left, left)
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in self.left.values()):
            raise Refused("it puts a tensor aside, in a list or a cache, where a loss may read it")
        compare("gradient of {}", self.whole.parameter_grads, self._averages([own for _, own, *_ in found]))
        meetings = {tuple(part.met) for part, *_ in found if part is not None}
        if len(meetings) > 1:
            raise Refused("parts of other lengths call attention in another way")
        (met,) = meetings
        if cut.heads is not None and "alone" in met and SDPA in self.whole.dropped_in:
            raise Refused("ranks would draw equal dropout for different heads of an attention")
        return replace(cut, attention=met, draws=draws, on_part=on_part)

    def _acting_on_part(self, found: list[Outcome], eager: bool) -> tuple[tuple[str | None, ...], tuple[bool, ...]]:
        """For each random call, attention apart, its module, and True where its tensor is a part.

        Raises where a part would draw what positions share. `eager` attention has masks of pairs.
        """
        if WHOLE_CHANNELS & {*self.whole.dropped_in}:
            raise Refused("its dropout zeroes whole channels, the same at all positions")
        whole, *parts = ([*_masks(each)] for each in (self.whole, *found))
        whole = [(name, shape) for name, shape in whole if not eager or len(shape) != 4]
        if any(len(part) != len(whole) for part in parts):
            raise Refused("it draws more or fewer random masks on a part")
        on_part = (any(part[at] != mask for part in parts) for at, mask in enumerate(whole))
        return tuple(name for name, _ in whole), tuple(on_part)

    def _streams_after_runs(self) -> random_streams.Streams:
        """The random streams after as many whole runs as there are ranks. Those on parts start where these did."""
        random_streams.set_streams(self.start)
        for _ in range(self.ranks):
            outcome(self._copy(), self.sample, self.sums)
        drawn = random_streams.main_streams()
        random_streams.set_streams(self.start)
        return drawn

    def _copy(self) -> nn.Module:
        return shard_copy(self.original, lambda _, value: value)

    def _on_part(self, cut: BlockCut, axis: Axis) -> tuple[Part | None, Outcome, dict[str, Tensor], dict[int, Tensor]]:
        twin = self._copy()
        with UndoStack() as undo:
            forward = patch_block(twin, cut, Axis(axis.group, weight=axis.size), undo)
            found, left, _ = _observed(twin, self.sample, self.sums)
            return forward.last, found, _kept(twin), left

    def _averages(self, found: list[Outcome]) -> dict[Key, Tensor]:
        """Gradients of parameters as data and context ranks average them."""
        keys = dict.fromkeys(key for each in found for key in each.parameter_grads)
        parts = {key: [each.parameter_grads[key] for each in found if key in each.parameter_grads] for key in keys}
        return {key: torch.stack(grads).sum(dim=0) / self.ranks for key, grads in parts.items()}


def _observed(
    block: nn.Module, sample: Sample, sums: Mapping[str, Sequence[int]]
) -> tuple[Outcome, dict[int, Tensor], list[torch.Size]]:
    """The results of `block`, what else is left of its run, and shapes of what it reads besides its arguments."""
    rule = NoteLeft()
    handle = block.register_forward_pre_hook(rule.enter, prepend=True, with_kwargs=True)
    found = outcome(block, sample, sums, rule)
    handle.remove()
    known = [*found.outputs, *found.input_grads.values(), *found.parameter_grads.values(), *block.parameters()]
    return found, dict(enumerate(rule.left(known))), rule.foreign


def _kept(block: nn.Module) -> dict[str, Tensor]:
    """The buffers of a block, and the tensors among its attributes: later code may read them."""
    return {
        f"{name}.{key}.{number}".lstrip("."): tensor.detach()
        for name, child in block.named_modules()
        for space in (own_buffers(child), vars(child))
        for key, value in space.items()
        if not isinstance(value, nn.Module) and key not in _OF_TORCH
        for number, tensor in enumerate(tensors_in(value))
    }


def _masks(found: Outcome) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """The module and the shape of each random call. Attention draws by itself."""
    calls = zip(found.dropped_by, found.dropped, found.dropped_in, strict=True)
    return ((name, shape) for name, shape, function in calls if function is not SDPA)


def _numbered(found: Outcome) -> dict[int, Tensor]:
    return dict(enumerate(found.outputs))
