"""Proof of a plan: a block runs unsplit and in shards on one random input, and all results that training uses agree."""

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_3d.module.host_memory import own_pages, return_freed_memory
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.patch import local_value, patch_unit
from lightning_3d.tensor.sample import Sample, is_activation, tensors_in
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import ThreadAxis, run_shards
from lightning_3d.tensor.tensor_plan import UnitPlan

T = TypeVar("T")
TOLERANCE = 2e-4
"""Largest difference, relative to the largest value. In fp32 sums in another order differ by some 1e-6, and a wrong
split by more than 1e-2."""
FLOOR = 5e-3
"""Gradients below this share of a block's largest are compared relative to that share of it: the gradient of a key
bias is rounding alone."""

LARGE = 2_000_000
"""Parameters from which a block's unsplit gradients are computed again for each candidate. Those of four calls would
be as large as four blocks."""
PIECE = 4_000_000
"""Elements that are compared at a time."""
Keep = Callable[[str, Tensor], bool]
"""Of the name of a parameter and its gradient: True where that stays in memory."""


@dataclass
class Outcome:
    """Results of one forward and backward of a block."""

    outputs: list[Tensor]
    input_grads: dict[int, Tensor]
    parameter_grads: dict[str, Tensor]
    largest: float
    """The largest magnitude of a gradient of a parameter."""
    dropped: list[tuple[int, ...]]
    """Shapes of the random calls."""
    dropped_by: list[str | None]
    """The dropout module of the block that makes each of them, None for other code."""
    summed: int = 0
    """Elements that were summed over the ranks."""


class Refused(Exception):
    """A candidate does not compute the same. The message says where and by how much."""


def outcome(module: nn.Module, sample: Sample, keep: Keep = lambda *_: True) -> Outcome:
    """Forward and backward of `module` on new leaves of `sample`, with nothing random.

    Each gradient that is not to `keep` is freed as soon as it is complete.
    """
    call = sample.fresh()
    inputs = call.tensors()
    silence = SilenceRandom()
    with torch.enable_grad(), Interceptor(silence):
        results = compute_late(tensors_in(module(*call.args, **call.kwargs)))
    with torch.enable_grad():  # outside of the interceptor, where random numbers are constants
        generator = torch.Generator().manual_seed(1)
        losses = [
            (result * torch.randn(result.shape, generator=generator)).sum()
            for result in results
            if result.is_floating_point() and result.requires_grad
        ]
    sizes = [0.0]

    def note(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        sizes.append(_size(parameter.grad))
        if not keep(name, parameter.grad):
            parameter.grad = None

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(note, name))
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()
    names: dict[Any, str] = {inner: name for name, inner in module.named_modules()}
    return Outcome(
        outputs=[result.detach() for result in results],
        input_grads={index: tensor.grad for index, tensor in enumerate(inputs) if tensor.grad is not None},
        parameter_grads={name: p.grad for name, p in module.named_parameters() if p.grad is not None},
        largest=max(sizes),
        dropped=silence.dropped,
        dropped_by=[names.get(each) for each in silence.modules],
    )


class Prover:
    """Proves candidates for one block. The unsplit block's results are computed once for each call.

    `original`, the block with its author's code and the parameters of `scratch`, computes them.

    The calls of the first sample's form decide. A plan may differ in a call of another form, for example evaluation
    with a cache. Such calls are not proven and compute unsplit.
    """

    def __init__(self, scratch: nn.Module, original: nn.Module, samples: Sequence[Sample], ranks: int) -> None:
        self.scratch, self.original, self.ranks = scratch, original, ranks
        self.large = is_large(scratch)
        first = samples[0].form
        self.cases = [self._case(training, s) for training in (True, False) for s in samples if s.form == first]
        self.others: list[list[Case]] = []
        for form in dict.fromkeys(s.form for s in samples if s.form != first):
            with suppress(Exception):  # such a call may need an earlier one (a filled cache)
                alike = [s for s in samples if s.form == form]
                self.others.append([self._case(s.training, s) for s in alike])

    def prove(self, plan: UnitPlan) -> UnitPlan:
        """`plan` with the facts of the runs: gathered outputs, dropouts, proven forms. Raises `Refused`."""
        plan = replace(plan, forms=())  # a call of an unproven form would compute unsplit, which proves nothing
        plan = self._agree(self.cases, plan)
        proven = [self.cases, *(cases for cases in self.others if self._covers(cases, plan))]
        forms = [(training, sample.form) for cases in proven for training, sample, _ in cases]
        return replace(plan, forms=tuple(dict.fromkeys(forms)))

    def difference(self, plan: UnitPlan) -> list[str]:
        """By how much the result of a plan that cannot run differs. Empty where it does not.

        Every rank has matrices of full size, with zeros for other ranks' shards, so that all shapes fit.
        """
        training, sample, unsplit = self.cases[0]
        self.scratch.train(training)
        plan = replace(plan, attributes={}, decoys={}, inputs=dict.fromkeys(plan.inputs), slices={})
        shards = _quiet_shards(self.ranks, lambda axis: _forward(self.scratch, sample, plan, axis, _masked))
        try:
            _compare("output {}", dict(enumerate(unsplit.outputs)), dict(enumerate(shards[0])))
        except Refused as refusal:
            return [f"{refusal}, each tensor rank with its own shard and zeros elsewhere"]
        return []

    def _agree(self, cases: Sequence["Case"], plan: UnitPlan) -> UnitPlan:
        for training, sample, unsplit in cases:
            self.scratch.train(training)
            if training:  # before anything large: most candidates do not run at all
                outputs = {**plan.outputs, **_split_outputs(self.scratch, sample, plan, self.ranks, unsplit)}
                plan = replace(plan, outputs=outputs, results=len(unsplit.outputs))
            if self.large:
                gc.collect()  # shards of other candidates, which an error still refers to
                return_freed_memory()
            full = self._unsplit(training, sample) if self.large else unsplit
            with own_pages() if self.large else nullcontext():
                plan = _prove_once(self.scratch, sample, full, plan, self.ranks)
            del full
            if self.large:
                return_freed_memory()
        return plan

    def _case(self, training: bool, sample: Sample) -> "Case":
        return training, sample, self._unsplit(training, sample, keep=not self.large)

    def _unsplit(self, training: bool, sample: Sample, keep: bool = True) -> Outcome:
        """The results of the unsplit block, with gradients of parameters if they are to `keep`."""
        self.original.train(training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome(shard_copy(self.original, _same), sample, lambda *_: keep)

    def _covers(self, cases: Sequence["Case"], plan: UnitPlan) -> bool:
        try:
            proven = self._agree(cases, plan)
        except Exception:  # a plan that does not fit a call makes the block's code fail in any way
            return False
        return replace(proven, summed_per_position=plan.summed_per_position) == plan


Case = tuple[bool, Sample, Outcome]
"""Training mode, a call, and its results in the unsplit block, for a large block without gradients of parameters."""


def _same(_: str, value: Tensor) -> Tensor:
    return value


def is_large(block: nn.Module) -> bool:
    """Return True for a block whose proof frees what it can on the way."""
    return sum(parameter.numel() for parameter in block.parameters()) > LARGE


def _prove_once(scratch: nn.Module, sample: Sample, unsplit: Outcome, plan: UnitPlan, ranks: int) -> UnitPlan:
    wanted = _Gradients(unsplit, plan, ranks)
    shards = _quiet_shards(ranks, lambda axis: _shard(scratch, sample, plan, axis, wanted))
    if is_large(scratch):
        return_freed_memory()
    for rank, shard in enumerate(shards):
        _compare(f"output {{}} on tensor rank {rank}", dict(enumerate(unsplit.outputs)), dict(enumerate(shard.outputs)))
        _compare(f"gradient of input {{}} on tensor rank {rank}", unsplit.input_grads, shard.input_grads)
    wanted.compare(shards)
    if scratch.training:
        positions = next((t.numel() // t.shape[-1] for t in sample.tensors() if is_activation(t)), 1)
        plan = replace(plan, summed_per_position=shards[0].summed // positions)
    if scratch.training and unsplit.dropped:
        flags = tuple(ours != theirs for ours, theirs in zip(shards[0].dropped, unsplit.dropped, strict=True))
        plan = replace(plan, dropouts=flags, dropout_modules=tuple(shards[0].dropped_by))
    return plan


def _shard(scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: ThreadAxis, wanted: "_Gradients") -> Outcome:
    shard = shard_copy(scratch, lambda name, value: local_value(plan, name, value, axis.rank))
    with UndoStack() as undo:
        patch_unit(shard, plan, axis, undo)
        results = outcome(shard, sample, lambda name, grad: wanted.keep(name, grad, axis.rank))
        return replace(results, summed=axis.summed)


def _split_outputs(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, ranks: int, unsplit: Outcome
) -> dict[int, TensorSplit]:
    """The results that are sharded: their sizes along one dimension add up to the full size."""
    shards = _quiet_shards(ranks, lambda axis: _forward(scratch, sample, plan, axis))
    found: dict[int, TensorSplit] = {}
    for index, expected in enumerate(unsplit.outputs):
        shapes = [shard[index].shape for shard in shards]
        if all(shape == expected.shape for shape in shapes):
            continue
        for dim in range(expected.dim()):
            sizes = [shape[dim] for shape in shapes if len(shape) == expected.dim()]
            if len(sizes) == ranks and sum(sizes) == expected.shape[dim] and len(set(sizes)) == 1:
                found[index] = TensorSplit.even(dim, expected.shape[dim], ranks)
                break
    return found


def _quiet_shards(size: int, job: Callable[[ThreadAxis], T]) -> list[T]:
    """`run_shards` without warnings. Their filters belong to the process, so they are set around all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_shards(size, job)


def _forward(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: ThreadAxis, value_of: Callable[..., Tensor] = local_value
) -> list[Tensor]:
    shard = shard_copy(scratch, lambda name, value: value_of(plan, name, value, axis.rank))
    with UndoStack() as undo:
        patch_unit(shard, plan, axis, undo)
        call = sample.fresh()
        with torch.no_grad(), Interceptor(SilenceRandom()):
            return tensors_in(shard(*call.args, **call.kwargs))


def _masked(plan: UnitPlan, name: str, value: Tensor, rank: int) -> Tensor:
    split = plan.splits.get(name)
    if split is None:
        return value
    masked = torch.zeros_like(value)
    for start, stop in split.pieces[rank]:
        masked.narrow(split.dim, start, stop - start).copy_(value.narrow(split.dim, start, stop - start))
    return masked


class _Gradients:
    """Comparison of the gradients of parameters on the ranks. One that agrees is freed at once."""

    def __init__(self, unsplit: Outcome, plan: UnitPlan, ranks: int) -> None:
        self.expected, self.largest = unsplit.parameter_grads, unsplit.largest
        self.plan = plan
        self.sizes = {name: _size(grad) for name, grad in self.expected.items()}
        self.agreed: list[set[str]] = [set() for _ in range(ranks)]

    def keep(self, name: str, grad: Tensor, rank: int) -> bool:
        """Return True for a gradient that does not agree. It may be complete later: some checkpoints add to it."""
        if name not in self.expected:
            return True
        try:
            self._compare(name, grad, rank)
        except Refused:
            self.agreed[rank].discard(name)
            return True
        self.agreed[rank].add(name)
        return False

    def compare(self, shards: Sequence[Outcome]) -> None:
        """Compare the gradients that were kept, and raise `Refused` where one differs."""
        for rank, shard in enumerate(shards):
            odd = sorted(self.expected.keys() ^ (shard.parameter_grads.keys() | self.agreed[rank]))
            if odd:
                name = ", ".join(odd)
                raise Refused(f"gradient of {name} on tensor rank {rank} exists only in the unsplit block or in shards")
            for name, grad in shard.parameter_grads.items():
                self._compare(name, grad, rank)

    def _compare(self, name: str, grad: Tensor, rank: int) -> None:
        expected = local_value(self.plan, name, self.expected[name], rank)
        _compare_one(
            f"gradient of {name} on tensor rank {rank}", expected, grad, max(self.sizes[name], FLOOR * self.largest)
        )


def _compare(what: str, expected: Mapping[Any, Tensor], found: Mapping[Any, Tensor]) -> None:
    if expected.keys() != found.keys():
        odd = sorted(map(str, expected.keys() ^ found.keys()))
        raise Refused(f"{what.format(', '.join(odd))} exists only in the unsplit block or only in shards")
    largest = max(map(_size, expected.values()), default=0.0)
    for key, tensor in expected.items():
        _compare_one(what.format(key), tensor, found[key], max(_size(tensor), FLOOR * largest))


def _compare_one(what: str, expected: Tensor, found: Tensor, size: float) -> None:
    if expected.shape != found.shape:
        raise Refused(f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.is_floating_point():
        if not torch.equal(expected, found):
            raise Refused(f"{what} differs")
        return
    rows = max(1, PIECE * len(expected) // max(1, expected.numel())) if expected.dim() else 1
    pieces = zip(expected.split(rows), found.split(rows), strict=True) if expected.dim() else [(expected, found)]
    differences = [_size(one - other) for one, other in pieces]
    difference = float(torch.tensor(differences or [0.0]).max()) / max(size, 1e-30)  # NaN where one is
    if not difference <= TOLERANCE:
        raise Refused(f"{what} is off by {difference:.2g} of its largest value")


def _size(tensor: Tensor) -> float:
    """The largest magnitude. NaN where a value is NaN, which then compares as too large."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, float("inf")))
