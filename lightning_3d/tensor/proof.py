"""Proof of a plan: a block runs unsplit and in shards on one random input, and all results that training uses agree.

Gradients of the matrices of a large block would be as large as the block. Sums of each are compared, with random signs,
along its two longest dimensions. Where an element differs, its sums do.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_3d.errors import module_of
from lightning_3d.module.host_memory import own_pages, return_freed_memory
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Call, Interceptor, NoteAsked, Rule
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.patch import local_value, patch_unit
from lightning_3d.tensor.sample import Sample, is_activation
from lightning_3d.tensor.scratch import RefuseNoHeads, shard_copy
from lightning_3d.tensor.simulate import ThreadGroup, run_shards
from lightning_3d.tensor.tensor_plan import UnitPlan

T = TypeVar("T")
TOLERANCE = 2e-4
"""Largest difference, relative to the largest value. In fp32 sums in another order differ by some 1e-6, and a wrong
split by more than 1e-2."""
FLOOR = 5e-3
"""Gradients below this share of a block's largest are compared relative to that share of it: the gradient of a key
bias is rounding alone."""

LARGE = 2_000_000
"""Parameters from which sums of a block's gradients are compared: the gradients would be as large as the block."""
SIGNS = 8
"""Sums of each row and column. Two elements that are off by the same cancel in all of them once in 256 times."""
Key = tuple[str, int | None]
"""A parameter, and the dimension along which its gradient is summed: None where it is not."""


@dataclass
class Outcome:
    """Results of one forward and backward of a block."""

    outputs: list[Tensor]
    input_grads: dict[int, Tensor]
    parameter_grads: dict[Key, Tensor]
    dropped: list[tuple[int, ...]]
    """Shapes of the random calls."""
    dropped_by: list[str | None]
    """The dropout module of the block that makes each of them, None for other code."""
    dropped_in: list[Any]
    """The function that each of them is a call of."""
    numbers: list[Tensor]
    """See `_number`."""
    summed: int = 0
    """Elements that were summed over the ranks."""


def _number(call: Call, result: Any) -> Tensor | None:
    """The number by which code decides: one that it reads or compares, or the size of a tensor with a hook."""
    first = call.args[0] if call.args else None
    if type(first) is not Tensor or not first.is_floating_point():  # experts on other ranks have other numbers
        return None
    if module_of(call.outside).startswith("lightning_3d."):
        return None
    if call.asks == "hook":
        return torch.tensor(first.numel())
    of_many = call.asks == "comparison" and (not isinstance(result, Tensor) or result.dim())
    return None if of_many else first.detach().clone()


class Refused(Exception):
    """A candidate does not compute the same. The message says where and by how much."""


def outcome(module: nn.Module, sample: Sample, sums: Mapping[str, Sequence[int]], *rules: Rule) -> Outcome:
    """Forward and backward of `module` on new leaves of `sample`, with nothing random.

    `sums` has the dimensions along which gradients are summed. `rules` are asked about the forward.
    """
    call = sample.fresh()
    inputs = call.tensors()
    silence, numbers = SilenceRandom(), NoteAsked(("number", "truth", "comparison", "hook"), _number)
    with torch.enable_grad(), Interceptor(RefuseNoHeads(), silence, numbers, *rules):
        results = compute_late(tensors_in(module(*call.args, **call.kwargs)))
    with torch.enable_grad():  # outside of the interceptor, where random numbers are constants
        generator = torch.Generator().manual_seed(1)
        losses = [
            (result * torch.randn(result.shape, generator=generator)).sum()
            for result in results
            if result.is_floating_point() and result.requires_grad
        ]
    summed: dict[Key, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in sums:
            parameter.register_post_accumulate_grad_hook(partial(add_sums, summed, name, sums[name]))
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()
    names: dict[Any, str] = {inner: name for name, inner in module.named_modules()}
    return Outcome(
        outputs=[result.detach() for result in results],
        input_grads={index: tensor.grad for index, tensor in enumerate(inputs) if tensor.grad is not None},
        parameter_grads=summed | {(name, None): p.grad for name, p in module.named_parameters() if p.grad is not None},
        dropped=silence.dropped,
        dropped_by=[names.get(each) for each in silence.modules],
        dropped_in=silence.functions,
        numbers=numbers.found,
    )


def add_sums(summed: dict[Key, Tensor], name: str, dims: Sequence[int], parameter: Tensor) -> None:
    """Add sums of a gradient, and free it. Some checkpoints add to it later."""
    grad, parameter.grad = parameter.grad, None
    assert grad is not None
    for dim in dims:
        generator = torch.Generator().manual_seed(2)
        signs = torch.randint(2, (SIGNS, grad.shape[dim]), generator=generator).to(grad.dtype) * 2 - 1
        found = torch.tensordot(signs, grad, ([1], [dim])).movedim(0, dim)
        summed[name, dim] = summed[name, dim] + found if (name, dim) in summed else found


def dims_to_sum(block: nn.Module, large: bool) -> dict[str, list[int]]:
    """The two longest dimensions of each matrix of a `large` block."""
    if not large:
        return {}
    matrices = {name: each.shape for name, each in block.named_parameters() if each.dim() > 1}
    return {name: torch.tensor(shape).argsort(descending=True)[:2].tolist() for name, shape in matrices.items()}


class Prover:
    """Proves candidates for one block. The unsplit block's results are computed once for each call.

    `original`, the block with its author's code and the parameters of `scratch`, computes them.

    The calls of the first sample's form decide. A plan may differ in a call of another form, for example evaluation
    with a cache. Such calls are not proven and compute unsplit.
    """

    def __init__(self, scratch: nn.Module, original: nn.Module, samples: Sequence[Sample], ranks: int) -> None:
        self.scratch, self.original, self.ranks = scratch, original, ranks
        self.large = is_large(scratch)
        self.sums = dims_to_sum(scratch, self.large)
        self.samples = samples

    @cached_property
    def cases(self) -> "list[Case]":
        """The calls of the first sample's form in both modes, computed unsplit when the first candidate comes."""
        first = self.samples[0].form
        return [self._case(training, s) for training in (True, False) for s in self.samples if s.form == first]

    @cached_property
    def others(self) -> "list[list[Case]]":
        """The calls of each other form, in the mode of their recorded call."""
        found = []
        for form in dict.fromkeys(s.form for s in self.samples if s.form != self.samples[0].form):
            with suppress(Exception):  # such a call may need an earlier one (a filled cache)
                alike = [s for s in self.samples if s.form == form]
                found.append([self._case(s.training, s) for s in alike])
        return found

    def run_unsplit(self) -> None:
        """Compute the results that candidates are compared with, now. An error is the block's own, no candidate's."""
        _ = self.cases

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
            compare("output {}", dict(enumerate(unsplit.outputs)), dict(enumerate(shards[0])))
        except Refused as refusal:
            return [f"{refusal}, each tensor rank with its own shard and zeros elsewhere"]
        return []

    def _agree(self, cases: Sequence["Case"], plan: UnitPlan) -> UnitPlan:
        for training, sample, unsplit in cases:
            self.scratch.train(training)
            with own_pages() if self.large else nullcontext():
                if training:  # before anything large: most candidates do not run at all
                    outputs = {**plan.outputs, **_split_outputs(self.scratch, sample, plan, self.ranks, unsplit)}
                    plan = replace(plan, outputs=outputs, results=len(unsplit.outputs))
                if self.large:
                    gc.collect()  # shards of other candidates, which an error still refers to
                    return_freed_memory()
                plan = _prove_once(self.scratch, sample, unsplit, plan, self.ranks, self.sums)
        return plan

    def _case(self, training: bool, sample: Sample) -> "Case":
        self.original.train(training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return training, sample, outcome(shard_copy(self.original, _same), sample, self.sums)

    def _covers(self, cases: Sequence["Case"], plan: UnitPlan) -> bool:
        try:
            proven = self._agree(cases, plan)
        except Exception:  # a plan that does not fit a call makes the block's code fail in any way
            return False
        return replace(proven, summed_per_position=plan.summed_per_position) == plan


Case = tuple[bool, Sample, Outcome]
"""Training mode, a call, and its results in the unsplit block."""


def _same(_: str, value: Tensor) -> Tensor:
    return value


def is_large(block: nn.Module) -> bool:
    """Return True for a block whose proof frees what it can on the way."""
    return sum(parameter.numel() for parameter in block.parameters()) > LARGE


def _prove_once(
    scratch: nn.Module, sample: Sample, unsplit: Outcome, plan: UnitPlan, ranks: int, sums: Mapping[str, Sequence[int]]
) -> UnitPlan:
    shards = _quiet_shards(ranks, lambda axis: _shard(scratch, sample, plan, axis, sums))
    largest = _largest(unsplit.parameter_grads.values())
    for rank, shard in enumerate(shards):
        compare(f"output {{}} on tensor rank {rank}", dict(enumerate(unsplit.outputs)), dict(enumerate(shard.outputs)))
        compare(f"gradient of input {{}} on tensor rank {rank}", unsplit.input_grads, shard.input_grads)
        compare_gradients(plan, rank, unsplit.parameter_grads, shard.parameter_grads, largest)
        _compare_numbers(rank, unsplit.numbers, shard.numbers)
    if scratch.training:
        positions = next((t.numel() // t.shape[-1] for t in sample.tensors() if is_activation(t)), 1)
        plan = replace(plan, summed_per_position=shards[0].summed // positions)
    if scratch.training and unsplit.dropped:
        flags = tuple(ours != theirs for ours, theirs in zip(shards[0].dropped, unsplit.dropped, strict=True))
        plan = replace(plan, dropouts=flags, dropout_modules=tuple(shards[0].dropped_by))
    return plan


def _shard(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: Axis, sums: Mapping[str, Sequence[int]]
) -> Outcome:
    shard = shard_copy(scratch, lambda name, value: local_value(plan, name, value, axis.rank))
    with UndoStack() as undo:
        patch_unit(shard, plan, axis, undo)
        found = outcome(shard, sample, sums)
        return replace(found, summed=axis.group.summed) if isinstance(axis.group, ThreadGroup) else found


def _split_outputs(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, ranks: int, unsplit: Outcome
) -> dict[int, TensorSplit]:
    """The results that are sharded: their sizes along one dimension add up to the full size. Others are compared."""
    shards = _quiet_shards(ranks, lambda axis: _forward(scratch, sample, plan, axis))
    found: dict[int, TensorSplit] = {}
    largest = _largest(unsplit.outputs)
    for index, expected in enumerate(unsplit.outputs):
        shapes = [shard[index].shape for shard in shards]
        if all(shape == expected.shape for shape in shapes):
            for rank, shard in enumerate(shards):
                if type(shard[index]) is Tensor:  # not one that is gathered late
                    size = max(_size(expected), FLOOR * largest)
                    _compare_one(f"output {index} on tensor rank {rank}", expected, shard[index], size)
            continue
        for dim in range(expected.dim()):
            sizes = [shape[dim] for shape in shapes if len(shape) == expected.dim()]
            if len(sizes) == ranks and sum(sizes) == expected.shape[dim] and len(set(sizes)) == 1:
                found[index] = TensorSplit.even(dim, expected.shape[dim], ranks)
                break
    return found


def _quiet_shards(size: int, job: Callable[[Axis], T]) -> list[T]:
    """`run_shards` without warnings. Their filters belong to the process, so they are set around all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_shards(size, job)


def _forward(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: Axis, value_of: Callable[..., Tensor] = local_value
) -> list[Tensor]:
    shard = shard_copy(scratch, lambda name, value: value_of(plan, name, value, axis.rank))
    with UndoStack() as undo:
        patch_unit(shard, plan, axis, undo)
        call = sample.fresh()
        with torch.enable_grad(), Interceptor(RefuseNoHeads(), SilenceRandom()):  # as in training
            results = tensors_in(shard(*call.args, **call.kwargs))
        return [result.detach() if type(result) is Tensor else result for result in results]


def _masked(plan: UnitPlan, name: str, value: Tensor, rank: int) -> Tensor:
    split = plan.splits.get(name)
    if split is None:
        return value
    masked = torch.zeros_like(value)
    for start, stop in split.pieces[rank]:
        masked.narrow(split.dim, start, stop - start).copy_(value.narrow(split.dim, start, stop - start))
    return masked


def compare_gradients(
    plan: UnitPlan, rank: int, expected: Mapping[Key, Tensor], found: Mapping[Key, Tensor], largest: float
) -> None:
    """Compare a rank's gradients of parameters. Sums along the dimension that is split are not of one rank alone."""
    odd = sorted({name for name, _ in expected.keys() ^ found.keys()})
    if odd:
        name = ", ".join(odd)
        raise Refused(f"gradient of {name} on tensor rank {rank} exists only in the unsplit block or in shards")
    for (name, dim), grad in expected.items():
        split = plan.splits.get(name)
        if split is None or split.dim != dim:
            what = f"gradient of {name} on tensor rank {rank}"
            own = local_value(plan, name, grad, rank)
            _compare_one(what, own, found[name, dim], max(_size(grad), FLOOR * largest))


def compare(what: str, expected: Mapping[Any, Tensor], found: Mapping[Any, Tensor]) -> None:
    """Raise `Refused` where tensors differ. `what` is a name for each, with a place for its key."""
    if expected.keys() != found.keys():
        odd = sorted(map(str, expected.keys() ^ found.keys()))
        raise Refused(f"{what.format(', '.join(odd))} exists only in the unsplit block or only in shards")
    largest = _largest(expected.values())
    for key, tensor in expected.items():
        _compare_one(what.format(key), tensor, found[key], max(_size(tensor), FLOOR * largest))


def _compare_numbers(rank: int, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Compare what code decides by, each number by its own size. Masks have infinities."""
    if len(expected) != len(found):
        raise Refused(
            f"on tensor rank {rank} its code reads {len(found)} numbers, and {len(expected)} in the unsplit block"
        )
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        own, shard = one.double().nan_to_num(), other.double().nan_to_num()
        _compare_one(
            f"number {index} that its code reads, or gives a hook, on tensor rank {rank}", own, shard, _size(own)
        )


def _compare_one(what: str, expected: Tensor, found: Tensor, size: float) -> None:
    if expected.shape != found.shape:
        raise Refused(f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.is_floating_point():
        if not torch.equal(expected, found):
            raise Refused(f"{what} differs")
        return
    difference = _size(expected - found) / max(size, 1e-30)
    if not difference <= TOLERANCE:
        raise Refused(f"{what} is off by {difference:.2g} of its largest value")


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(map(_size, tensors), default=0.0)


def _size(tensor: Tensor) -> float:
    """The largest magnitude. NaN where a value is NaN, which then compares as too large."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    least, most = torch.aminmax(tensor)  # on a CPU `vector_norm` takes twenty times as long
    return float(torch.maximum(-least, most))
