"""The experts that data ranks can share: found by the way they are called, and compared with the undivided ones.

Each of the simulated ranks has tokens of its own, in other numbers, and some experts. Results, the gradients of tokens
and weights, and the summed gradients of parameters must be those of the whole module.
"""

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.expert_forward import ExpertForward
from lightning_3d.experts.expert_plan import DividedExperts, ExpertPlan, divided, is_shared_outside
from lightning_3d.module.autograd_private import is_compiled
from lightning_3d.module.expert_modules import Experts, ExpertsKind, find_experts
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.scratch import scratch_copy, shard_copy
from lightning_3d.tensor.simulate import run_shards

TOLERANCE = 2e-4
TOKENS, CHOICES = 5, 2
"""Tokens of the first simulated rank, and experts of each token."""
Case = tuple[Tensor, Tensor, Tensor]
"""Hidden states, experts of each token and their weights."""


def plan_experts(module: nn.Module, ranks: int) -> ExpertPlan:
    """The experts of `module` that `ranks` data ranks can share. Raise where there are none."""
    modules: dict[str, DividedExperts] = {}
    whole: dict[str, str] = {}
    known: dict[object, str] = {}
    compiled = {inner for each in module.modules() if is_compiled(each) for inner in each.modules()}
    for found in find_experts(module):
        part = module.get_submodule(found.name)
        why = _why_not_tried(module, part, found, ranks)
        if not why and part in compiled:
            why = "it is compiled, and the exchange of tokens ends a graph"
        if not why:
            experts = modules[found.name] = divided(module, found)
            kind = (type(part), experts, tuple((p.shape, p.dtype) for p in part.parameters()), part.extra_repr())
            if kind not in known:
                known[kind] = why_not_divided(part, experts, ranks)
            why = known[kind]
        if why:
            modules.pop(found.name, None)
            whole[found.name] = why
    if not modules:
        raise UnsupportedError(_none_divided(type(module).__name__, ranks, whole))
    for name, why in whole.items():
        rank_zero_warn(f"The experts of {name} stay on every data rank: {why}.")
    return ExpertPlan(ranks, modules, whole)


def _why_not_tried(module: nn.Module, part: nn.Module, found: Experts, ranks: int) -> str:
    if found.kind is not ExpertsKind.ROUTED:
        return "its code does not call them with hidden states, the numbers of experts and their weights"
    if found.count % ranks:
        return f"{ranks} ranks do not divide its {found.count} experts"
    if len(found.parameters) != sum(1 for _ in part.parameters()):
        return "it has parameters that all of its experts share"
    return "other code uses its parameters too" if is_shared_outside(module, part) else ""


def _none_divided(module: str, ranks: int, whole: dict[str, str]) -> str:
    found = "; ".join(f"{name}: {why}" for name, why in whole.items()) or (
        "no module of it is called with hidden states, the experts of each token and their weights, and has parameters"
        " with one row for each expert"
    )
    return (
        f"expert_parallel_size={ranks}: {module} has no experts that data ranks can share ({found}). Every rank would"
        " compute them whole, so nothing were gained. Use expert_parallel_size=1, and zero_stage=3 or"
        " tensor_parallel_size to divide them."
    )


def why_not_divided(part: nn.Module, experts: DividedExperts, ranks: int) -> str:
    """The reason for which `part` computes something else on `ranks` ranks, "" where it does not."""
    simulated = next(size for size in range(2, ranks + 1) if ranks % size == 0)
    scratch = scratch_copy(part, seed=1)
    widths = sorted({size for parameter in part.parameters() for size in parameter.shape[1:]})
    reasons = []
    for width in widths:
        cases = _cases(width, experts.count, simulated)
        try:
            wanted = [_results(scratch, case) for case in cases]
        except Exception as error:  # of the user's code, for tokens of another width
            reasons.append(str(error))
            continue
        if any(result.shape != hidden.shape for (hidden, *_), (result, *_) in zip(cases, wanted, strict=True)):
            continue
        return _compared(scratch, experts, cases, wanted)
    return f"no width of a token was found that it computes ({reasons[0] if reasons else 'results have another one'})"


def _cases(width: int, count: int, ranks: int) -> list[Case]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for rank in range(ranks):
        tokens = TOKENS + 4 * rank
        index = torch.rand(tokens, count, generator=generator).topk(min(CHOICES, count)).indices
        weights = torch.rand(index.shape, generator=generator) + 0.5
        found.append((torch.randn(tokens, width, generator=generator), index, weights))
    return found


def _results(module: nn.Module, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Results, and the gradients of tokens and weights. Those of parameters are added up."""
    hidden, index, weights = case
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    with torch.enable_grad():
        result = module(hidden, index, weights)
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    return result.detach(), _grad(hidden), _grad(weights)


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _compared(
    scratch: nn.Module, experts: DividedExperts, cases: Sequence[Case], wanted: Sequence[tuple[Tensor, ...]]
) -> str:
    own = experts.count // len(cases)

    def compute(axis: Axis) -> tuple[list[Tensor], list[Tensor]]:
        start = axis.rank * own
        twin = shard_copy(scratch, lambda _, value: value[start : start + own].clone())
        layer = ExpertForward(twin, experts, axis)
        layer.next = twin.forward
        twin.forward = layer  # type: ignore[method-assign]
        return list(_results(twin, cases[axis.rank])), [_grad(p) for p in twin.parameters()]

    try:
        ranks = run_shards(len(cases), compute)
    except Exception as error:  # of the user's code, with fewer experts
        return f"it does not run with {own} of its experts ({error})"
    gradients = [torch.cat(parts) * len(cases) for parts in zip(*(parts for _, parts in ranks), strict=True)]
    got = [*(tensor for results, _ in ranks for tensor in results), *gradients]
    expected = [*(tensor for results in wanted for tensor in results), *map(_grad, scratch.parameters())]
    off = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(got, expected, strict=True))
    return "" if off <= TOLERANCE else f"its results on several ranks are other ones (off by {off:.1e})"
