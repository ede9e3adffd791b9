"""Run a block whole and in shards on the same random input and compare everything that training depends on."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.tensor.fallback import form_of
from lightning_3d.tensor.geometry import TensorSplit, assemble
from lightning_3d.tensor.late_gather import whole as whole_tensors
from lightning_3d.tensor.patch import local_value, patch_unit
from lightning_3d.tensor.sample import Sample, is_activation
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import ThreadAxis, run_shards
from lightning_3d.tensor.tensor_plan import UnitPlan
from lightning_3d.tensor.trace import tensors_in

T = TypeVar("T")
TOLERANCE = 2e-4
"""Largest difference, relative to the largest value. Sums in another order differ by some 1e-6 in fp32, a wrong split
by
more than 1e-2."""
FLOOR = 5e-3
"""Gradients this much smaller than a block's largest are compared with that instead: a key bias has none but
rounding."""


@dataclass
class Outcome:
    """What one forward and backward of a block gave."""

    outputs: list[Tensor]
    input_grads: dict[int, Tensor]
    parameter_grads: dict[str, Tensor]
    dropped: list[tuple[int, ...]]
    """Shapes of the random calls."""
    summed: int = 0
    """Elements that were summed over the ranks."""


class Refused(Exception):
    """A candidate does not compute the same thing; the message says where and by how much."""


def outcome(module: nn.Module, sample: Sample) -> Outcome:
    """Forward and backward of `module` on new leaves of `sample`, with nothing random."""
    call = sample.fresh()
    inputs = call.tensors()
    silence = SilenceRandom()
    with torch.enable_grad(), Interceptor(silence):
        results = whole_tensors(tensors_in(module(*call.args, **call.kwargs)))
    with torch.enable_grad():  # outside of the interceptor, where random numbers are constants
        generator = torch.Generator().manual_seed(1)
        losses = [
            (result * torch.randn(result.shape, generator=generator)).sum()
            for result in results
            if result.is_floating_point() and result.requires_grad
        ]
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()
    return Outcome(
        outputs=[result.detach() for result in results],
        input_grads={index: tensor.grad for index, tensor in enumerate(inputs) if tensor.grad is not None},
        parameter_grads={name: p.grad for name, p in module.named_parameters() if p.grad is not None},
        dropped=silence.dropped,
    )


class Prover:
    """Proves candidates for one block. What the whole block gives is computed once for each call.

    That is computed by `original`, the block as its author wrote it, with the parameters of `scratch`.

    The calls of the first sample's form decide. A plan that computes something else in a call of another form (with a
    cache, say, as in evaluation) is right all the same: such calls are not among its proven ones, and compute whole.
    """

    def __init__(self, scratch: nn.Module, original: nn.Module, samples: Sequence[Sample], ranks: int) -> None:
        self.scratch, self.ranks = scratch, ranks
        first = _form(samples[0])
        self.cases = [_case(original, training, s) for training in (True, False) for s in samples if _form(s) == first]
        self.others: list[list[Case]] = []
        for form in dict.fromkeys(_form(s) for s in samples if _form(s) != first):
            with suppress(Exception):  # such a call may not be possible without what came before it
                alike = [s for s in samples if _form(s) == form]
                self.others.append([_case(original, s.training, s) for s in alike])

    def prove(self, plan: UnitPlan) -> UnitPlan:
        """`plan` with what the run taught about it (gathered outputs, dropouts, proven forms), or `Refused`."""
        plan = replace(plan, forms=())  # a call that no proof covered would compute whole, which proves nothing
        plan = self._agree(self.cases, plan)
        proven = [self.cases, *(cases for cases in self.others if self._covers(cases, plan))]
        forms = [(training, _form(sample)) for cases in proven for training, sample, _ in cases]
        return replace(plan, forms=tuple(dict.fromkeys(forms)))

    def difference(self, plan: UnitPlan) -> list[str]:
        """By how much a plan that may not run computes something else: nothing where it does not.

        Every rank has matrices of full size in which what others hold is zero, so that all shapes fit.
        """
        training, sample, whole = self.cases[0]
        self.scratch.train(training)
        plan = replace(plan, attributes={}, decoys={}, inputs=dict.fromkeys(plan.inputs), slices={})
        shards = _quiet_shards(self.ranks, lambda axis: _forward(self.scratch, sample, plan, axis, _masked))
        try:
            _compare("output {}", dict(enumerate(whole.outputs)), dict(enumerate(shards[0])))
        except Refused as refusal:
            return [f"{refusal}, each tensor rank with what it holds and zeros elsewhere"]
        return []

    def _agree(self, cases: Sequence["Case"], plan: UnitPlan) -> UnitPlan:
        for training, sample, whole in cases:
            self.scratch.train(training)
            plan = _prove_once(self.scratch, sample, whole, plan, self.ranks)
        return plan

    def _covers(self, cases: Sequence["Case"], plan: UnitPlan) -> bool:
        try:
            seen = self._agree(cases, plan)
        except Exception:  # a plan that does not fit a call breaks the block's own code in any way it likes
            return False
        return replace(seen, summed_per_position=plan.summed_per_position) == plan


Case = tuple[bool, Sample, Outcome]
"""Training mode, a call, and what the whole block gave."""


def _case(original: nn.Module, training: bool, sample: Sample) -> Case:
    original.train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return training, sample, outcome(shard_copy(original, _same), sample)


def _form(sample: Sample) -> Any:
    return form_of((sample.args, sample.kwargs))


def _same(_: str, value: Tensor) -> Tensor:
    return value


def _prove_once(scratch: nn.Module, sample: Sample, whole: Outcome, plan: UnitPlan, ranks: int) -> UnitPlan:
    if scratch.training:
        outputs = {**plan.outputs, **_split_outputs(scratch, sample, plan, ranks, whole)}
        plan = replace(plan, outputs=outputs, results=len(whole.outputs))
    shards = _quiet_shards(ranks, lambda axis: _shard(scratch, sample, plan, axis))
    for rank, shard in enumerate(shards):
        _compare(f"output {{}} on tensor rank {rank}", dict(enumerate(whole.outputs)), dict(enumerate(shard.outputs)))
        _compare(f"gradient of input {{}} on tensor rank {rank}", whole.input_grads, shard.input_grads)
    _compare_parameters(whole, shards, plan)
    if scratch.training:
        positions = next((t.numel() // t.shape[-1] for t in sample.tensors() if is_activation(t)), 1)
        plan = replace(plan, summed_per_position=shards[0].summed // positions)
    if scratch.training and whole.dropped:
        flags = tuple(ours != theirs for ours, theirs in zip(shards[0].dropped, whole.dropped, strict=True))
        plan = replace(plan, dropouts=flags)
    return plan


def _shard(scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: ThreadAxis) -> Outcome:
    shard = shard_copy(scratch, lambda name, value: local_value(plan, name, value, axis.rank))
    patch_unit(shard, plan, axis)
    return replace(outcome(shard, sample), summed=axis.summed)


def _split_outputs(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, ranks: int, whole: Outcome
) -> dict[int, TensorSplit]:
    """Which results come out in parts: those whose sizes along one dimension add up to the whole's."""
    shards = _quiet_shards(ranks, lambda axis: _forward(scratch, sample, plan, axis))
    found: dict[int, TensorSplit] = {}
    for index, expected in enumerate(whole.outputs):
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
    """Filters of warnings are the process's and the threads' turns interleave: so they are set around all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_shards(size, job)


def _forward(
    scratch: nn.Module, sample: Sample, plan: UnitPlan, axis: ThreadAxis, held: Callable[..., Tensor] = local_value
) -> list[Tensor]:
    shard = shard_copy(scratch, lambda name, value: held(plan, name, value, axis.rank))
    patch_unit(shard, plan, axis)
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


def _compare_parameters(whole: Outcome, shards: Sequence[Outcome], plan: UnitPlan) -> None:
    for rank, shard in enumerate(shards):
        kept = {name: grad for name, grad in whole.parameter_grads.items() if name not in plan.splits}
        found = {name: grad for name, grad in shard.parameter_grads.items() if name not in plan.splits}
        _compare(f"gradient of {{}} on tensor rank {rank}", kept, found, whole.parameter_grads)
    split = {name: grad for name, grad in whole.parameter_grads.items() if name in plan.splits}
    parts: dict[str, Tensor] = {}
    for name in split:
        grads = [shard.parameter_grads.get(name) for shard in shards]
        if any(grad is None for grad in grads):
            raise Refused(f"gradient of {name} is missing on a tensor rank")
        parts[name] = assemble([grad for grad in grads if grad is not None], plan.splits[name])
    _compare("gradient of {}", split, parts, whole.parameter_grads)


def _compare(
    what: str, expected: Mapping[Any, Tensor], found: Mapping[Any, Tensor], scale: Mapping[str, Tensor] | None = None
) -> None:
    if expected.keys() != found.keys():
        odd = sorted(map(str, expected.keys() ^ found.keys()))
        raise Refused(f"{what.format(', '.join(odd))} exists only whole or only in shards")
    largest = max((_size(tensor) for tensor in (scale or expected).values()), default=0.0)
    for key, tensor in expected.items():
        other = found[key]
        if tensor.shape != other.shape:
            raise Refused(f"{what.format(key)} has shape {tuple(other.shape)}, not {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            if not torch.equal(tensor, other):
                raise Refused(f"{what.format(key)} differs")
            continue
        difference = _size(tensor - other) / max(_size(tensor), FLOOR * largest, 1e-30)
        if not difference <= TOLERANCE:
            raise Refused(f"{what.format(key)} is off by {difference:.2g} of its largest value")


def _size(tensor: Tensor) -> float:
    """The largest magnitude; not a number where something in it is none, which then compares as too large."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, float("inf")))
