"""Proof of a cut: a block computes whole, and in parts on threads, and all results that training uses agree."""

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_3d.context.cut_attention import Part, replace_attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.context.cut_plan import BlockCut
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.random_streams import Streams, equal, main_streams, set_streams
from lightning_3d.sandbox.own_generators import drawn_from, is_generator, state_of
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.proof import Key, Outcome, Refused, compare, dims_to_sum, is_large, outcome
from lightning_3d.tensor.sample import Sample, tensors_in
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards

_OF_TORCH = vars(nn.Module()).keys()


WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)


class CutProver:
    """Proves cuts of one block by one call. `original`, the block with its author's code, computes whole."""

    def __init__(self, original: nn.Module, sample: Sample, ranks: int) -> None:
        self.original, self.sample, self.ranks = original.train(), sample, ranks
        self.sums = dims_to_sum(original, is_large(original))
        twin, self.start = self._copy(), main_streams()
        own = {each: state_of(each) for child in twin.modules() for each in vars(child).values() if is_generator(each)}
        self.whole = outcome(twin, sample, self.sums)
        self.kept = _kept(twin)
        self.draws = not equal(self.start, main_streams())
        """True where it draws random numbers other than for dropout."""
        self.draws_alone = bool(drawn_from(own))
        """True where it has a generator of its own for them."""

    def prove(self, cut: BlockCut) -> BlockCut:
        """`cut` with the facts of the runs. Raises `Refused`, or any error of the block's code."""
        if self.draws_alone:
            raise Refused("it draws random numbers from a generator of its own")
        drawn = self._streams_after_runs() if self.draws else None
        with UndoStack() as undo, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replace_attention([self.original], undo)
            found = run_shards(self.ranks, lambda axis: self._on_part(cut, axis))
        if drawn is not None and not equal(drawn, main_streams()):
            raise Refused("it draws random numbers for each position, other than for dropout")
        on_part = self._acting_on_part([own for _, own, _ in found])
        for rank, (part, own, kept) in enumerate(found):
            if part is None:
                raise Refused("its other arguments cannot be told from a part of the sequence")
            compare(f"output {{}} on context rank {rank}", _numbered(self.whole), _numbered(own))
            compare(f"gradient of input {{}} on context rank {rank}", self.whole.input_grads, own.input_grads)
            compare(f"tensor {{}}, which it keeps, on context rank {rank}", self.kept, kept)
        compare("gradient of {}", self.whole.parameter_grads, self._averages([own for _, own, _ in found]))
        meetings = {tuple(part.met) for part, *_ in found if part is not None}
        if len(meetings) > 1:
            raise Refused("parts of other lengths call attention in another way")
        return replace(cut, attention=meetings.pop(), draws=tuple(found[0][1].dropped_by), on_part=on_part)

    def _acting_on_part(self, found: list[Outcome]) -> tuple[bool, ...]:
        """True for each random call whose tensor is a part. Raises where a part would draw what positions share."""
        drawing = [self.original.get_submodule(name) for name in self.whole.dropped_by if name is not None]
        if any(isinstance(child, WHOLE_CHANNELS) for child in drawing):
            raise Refused("its dropout zeroes whole channels, the same at all positions")
        whole, parts = self.whole.dropped, [own.dropped for own in found]
        if len(parts[0]) < len(whole):  # torch's attention asks for no mask of pairs where the rate is 0
            whole = [shape for shape in whole if len(shape) != 4 or shape[-1] != shape[-2]]
        if any(len(part) != len(whole) for part in parts):
            raise Refused("it draws more or fewer random masks on a part")
        return tuple(any(part[at] != shape for part in parts) for at, shape in enumerate(whole))

    def _streams_after_runs(self) -> Streams:
        """The random streams after as many whole runs as there are ranks. Those on parts start where these did."""
        set_streams(self.start)
        for _ in range(self.ranks):
            outcome(self._copy(), self.sample, self.sums)
        drawn = main_streams()
        set_streams(self.start)
        return drawn

    def _copy(self) -> nn.Module:
        return shard_copy(self.original, lambda _, value: value)

    def _on_part(self, cut: BlockCut, axis: Axis) -> tuple[Part | None, Outcome, dict[str, Tensor]]:
        twin = self._copy()
        with UndoStack() as undo:
            forward = patch_block(twin, cut, Axis(axis.group, weight=axis.size), undo)
            found = outcome(twin, self.sample, self.sums)
            return forward.last, found, _kept(twin)

    def _averages(self, found: list[Outcome]) -> dict[Key, Tensor]:
        """Gradients of parameters as data and context ranks average them."""
        keys = dict.fromkeys(key for each in found for key in each.parameter_grads)
        parts = {key: [each.parameter_grads[key] for each in found if key in each.parameter_grads] for key in keys}
        return {key: torch.stack(grads).sum(dim=0) / self.ranks for key, grads in parts.items()}


def _kept(block: nn.Module) -> dict[str, Tensor]:
    """The buffers of a block, and the tensors among its attributes: later code may read them."""
    return {
        f"{name}.{key}.{number}".lstrip("."): tensor.detach()
        for name, child in block.named_modules()
        for space in (child._buffers, vars(child))
        for key, value in space.items()
        if not isinstance(value, nn.Module) and key not in _OF_TORCH
        for number, tensor in enumerate(tensors_in(value))
    }


def _numbered(found: Outcome) -> dict[int, Tensor]:
    return dict(enumerate(found.outputs))
