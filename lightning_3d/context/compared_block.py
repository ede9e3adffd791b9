"""A block on a part of the sequence against the block on all of it, in training.

A proof ahead of training has few positions, random weights and the values of one batch. So the first call of a block is
compared, calls 2, 4, 8 and so on, each with a longer sequence than before, and each after a change of an attribute that
the block reads. Random calls are constant in it, and nothing of it remains.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_3d.context.cut_attention import Part
from lightning_3d.context.cut_plan import parts_of
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer
from lightning_3d.ranks.agreement import raise_if_alone
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import map_leaves, tensors_in
from lightning_3d.sandbox.trial import trial
from lightning_3d.tensor.autograd_collectives import gather_shards
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import LateTensor, compute_late
from lightning_3d.tensor.patch import get_attribute
from lightning_3d.tensor.proof import Refused
from lightning_3d.tensor.sample import Sample, working_dtype

WHOLE = 2**28
"""Bytes of hidden states up to which a block is computed whole. Above, parts with other ends are compared."""
TOLERANCE = {False: (1e-3, 1e-5), True: (5e-2, 4e-3)}
"""Largest difference at a position, relative to what the block adds, and to what it returns. True: in half."""
SHARE = {False: 1e-3, True: 1e-2}
"""Of the tokens that may differ by more: rounding may lead one to another expert."""
_HALVES = (torch.bfloat16, torch.float16)
READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__}
"""Not `bool`: a branch shows in the results."""


class NoteLeft(Rule):
    """Notes the numbers that code reads back, and the tensors that outlive it: in a list, a cache, an attribute."""

    def __init__(self) -> None:
        self.read: list[Any] = []
        self.foreign: list[torch.Size] = []
        """Shapes of tensors that are no arguments, no states and not computed here."""
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._made: list[weakref.ref[Tensor]] = []

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of `block`, as a hook in front of it."""
        given = [*tensors_in((args, kwargs)), *block.state_dict(keep_vars=True).values()]
        self._known |= {id(tensor): weakref.ref(tensor) for tensor in given}

    def before(self, call: Call) -> Call:
        for tensor in call.tensors():
            reference = self._known.get(id(tensor))
            if (reference is None or reference() is not tensor) and tensor.grad_fn is None:
                self.foreign.append(tensor.shape)
        return call

    def after(self, call: Call, result: Any) -> None:
        made = {id(tensor): weakref.ref(tensor) for tensor in tensors_in(result)}
        self._known |= made
        if call.caller.f_globals.get("__name__", "").startswith("lightning_3d"):
            return  # code of ours reads what ranks say, and other ranks may still read what it sends
        self._made += made.values()
        if call.func in READS:
            self.read.append(torch.as_tensor(result))

    def left(self, known: Sequence[Tensor]) -> list[Tensor]:
        """Numbers that were read, and tensors that outlive the call, but results, which share memory with `known`."""
        if self._alive(known):
            gc.collect()  # cycles keep tensors that nothing reaches
        return [*self.read, *self._alive(known)]

    def _alive(self, known: Sequence[Tensor]) -> list[Tensor]:
        memory = {tensor.untyped_storage().data_ptr() for tensor in known}
        made = {id(tensor): tensor for reference in self._made if type(tensor := reference()) is Tensor}
        return [each for each in made.values() if each.untyped_storage().data_ptr() not in memory]


def _place(block: nn.Module, name: str, path: str) -> tuple[Mapping[str, Any], str]:
    """The attributes, of a module in `block` or of its settings, that have the one at `path`, and its name there."""
    inner, _, key = path.rpartition(".")
    module = block.get_submodule(name)
    return vars(get_attribute(module, inner) if inner else module), key


class Seen(NamedTuple):
    """The results of a run of a block."""

    results: list[Tensor]
    left: list[Tensor]
    at: Tensor
    """Positions of the results."""


class ComparedForward(ForwardLayer, rank=Layer.COMPARED):
    """Compares `cut`, which computes the block on a part, now and then.

    It is `alone` where no other data rank has to compare in the same call: then not only in calls 1, 2, 4 ...
    """

    def __init__(self, name: str, cut: Any, alone: bool) -> None:
        super().__init__(cut.module)
        self.name, self.cut, self.calls, self.longest = name, cut, 0, 0
        self.alone, self.changes = alone and not cut.axis.group.silent, 0
        """Calls in a row with other attributes than the call before. A rate that changes in each is no new code."""
        self.reads = [_place(cut.module, *read) for read in cut.cut.reads] if self.alone else []
        self.known = self._values()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.due(args, kwargs) and (split := self.cut.split_of(args, kwargs)) is not None:
            self._compare(args, kwargs, split)
            self.longest = max(self.longest, split.size)
        result = self.next(*args, **kwargs)
        self.known = self._values()  # what the block itself changes may differ by rank
        return result

    def _values(self) -> list[Any]:
        return [space.get(key) for space, key in self.reads]

    def due(self, args: Any, kwargs: Any) -> bool:
        """Count this call, and return True where it is compared. The question costs every step."""
        if self.cut.axis.group.silent or not (self.module.training and torch.is_grad_enabled()):
            return False
        self.calls += 1
        cut, tensors = self.cut.cut, tensors_in((args, kwargs)) if self.alone else []
        longer = cut.stream < len(tensors) and tensors[cut.stream].shape[cut.dim : cut.dim + 1] > (self.longest,)
        self.changes = self.changes + 1 if self._values() != self.known else 0
        return longer or any(count and count & (count - 1) == 0 for count in (self.calls, self.changes))

    def _compare(self, args: Any, kwargs: Any, split: TensorSplit) -> None:
        group, error = self.cut.axis.group, None
        part = Part(self.cut.axis, split, self.cut.cut.attention, agreed=False)
        with group.ledger.aside(group.axis) if group.ledger is not None else nullcontext():
            try:
                with trial(self.module, gradients=False, logs=False):
                    self._check(Sample(*self._whole((args, kwargs))), part)
            except Exception as mine:
                raise_if_alone(mine)
                error = self._refusal(mine, split) if isinstance(mine, Refused) else mine
            part.agree(error, f"the comparison of {self.name}")

    def _refusal(self, why: Refused, split: TensorSplit) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} ({type(self.module).__name__}) computes other numbers on a part of a sequence of"
            f" {split.size} positions than on all of it: {why}. This is call {self.calls} of it in training; its proof"
            " before, on a shorter sequence or other values, saw no difference. Positions meet in it in another way"
            " than in attention. Set context_parallel_size=1 for this module."
        )

    def _whole(self, arguments: Any) -> Any:
        """The arguments whole, as another copy: those of the step stay as they are."""
        axis: Any = self.cut.axis

        def whole(leaf: Any) -> Any:
            if isinstance(leaf, LateTensor) and leaf.axis is axis and leaf.full is None:
                return gather_shards(leaf.local.detach(), self.cut.axis, leaf.division)
            return compute_late(leaf).detach() if isinstance(leaf, Tensor) else leaf

        return map_leaves(whole, arguments)

    def _check(self, call: Sample, part: Part) -> None:
        cut = self.cut.cut
        stream = call.tensors()[cut.stream]
        numbers = [stream, *self.module.parameters()]
        half = torch.is_autocast_enabled(stream.device.type) or any(each.dtype in _HALVES for each in numbers)
        whole = None
        if stream.nbytes > WHOLE:
            others = parts_of(cut.dim, part.split.size, part.axis.size, later=True)
            whole = Part(part.axis, others, cut.attention, agreed=False)
        expected, found = self._run(call, whole), self._run(call, part)
        both = found.at[torch.isin(found.at, expected.at)]

        def common(seen: Seen, index: int) -> Tensor:
            dim, tensor = cut.results.get(index), seen.results[index]
            return tensor if dim is None else tensor.index_select(dim, torch.isin(seen.at, both).nonzero()[:, 0])

        before = stream.index_select(cut.dim, both)
        for index in range(len(expected.results)):
            dim, one, other = cut.results.get(index), common(expected, index), common(found, index)
            share = _share(one, other, before if one.shape == before.shape else torch.zeros_like(one), dim, half)
            if share > SHARE[half]:
                raise Refused(f"result {index} differs for {share:.1%} of the tokens at {len(both)} positions")
        if not _same(expected.left, found.left, half):
            raise Refused("it puts a number of its part aside, in a list or a cache")

    def _run(self, call: Sample, part: Part | None) -> Seen:
        stream, rule, call = call.tensors()[self.cut.cut.stream], NoteLeft(), call.fresh()
        runs = ((0, stream.shape[self.cut.cut.dim]),) if part is None else part.runs
        at = torch.cat([torch.arange(*run, device=stream.device) for run in runs])
        with Interceptor(rule, SilenceRandom()):
            run = self.cut.on_all if part is None else lambda *args, **kwargs: self.cut.on_part(part, args, kwargs)
            result = run(*call.args, **call.kwargs)
        results = [
            each.local if isinstance(each, LateTensor) and each.full is None else compute_late(each)
            for each in tensors_in(result)
        ]
        del result, call
        left = [each for each in rule.left(results) if each.numel() == 1]  # code elsewhere may keep larger ones alive
        return Seen(results, left, at)


def _share(expected: Tensor, found: Tensor, before: Tensor, dim: int | None, half: bool) -> float:
    """The share of tokens, whose positions are `dim`, for which `found` is not `expected`."""
    if expected.shape != found.shape:
        return 1.0
    if not expected.is_floating_point():
        return float(not torch.equal(expected, found))
    last = expected.dim() - 1  # one number for each token; a sample's position is no reason to doubt the others'
    others = [last] if dim not in (None, last) else [each for each in range(last + 1) if each != dim]
    expected, found, before = (each.to(working_dtype(each.dtype)) for each in (expected, found, before))
    nothing = expected.isnan() & found.isnan()

    def largest(tensor: Tensor) -> Tensor:
        return tensor.abs().masked_fill(nothing, 0.0).nan_to_num(torch.inf).amax(others)

    added, returned = TOLERANCE[half]
    allowed = added * largest(expected - before) + returned * largest(expected)
    return float((largest(expected - found) > allowed).float().mean())


def _same(expected: Sequence[Tensor], found: Sequence[Tensor], half: bool) -> bool:
    return len(expected) == len(found) and all(
        one.shape == other.shape and _share(one, other, torch.zeros_like(one), None, half) == 0
        for one, other in zip(expected, found, strict=True)
    )
