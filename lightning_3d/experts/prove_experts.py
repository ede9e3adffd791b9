"""The experts that data ranks can share: found by the way they are called, and compared with the undivided ones.

Each of the simulated ranks has tokens of its own, in other numbers, and some experts. Results, the gradients of tokens
and weights, and the summed gradients of parameters must be those of the whole module.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts import expert_plan
from lightning_3d.experts.expert_forward import make_layers
from lightning_3d.module.expert_modules import Experts, ExpertsKind, RoutedCall, expert_around, find_experts
from lightning_3d.module.forward import add_layer
from lightning_3d.module.torch_private import forward_hooks, is_compiled
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.random_streams import restored_streams
from lightning_3d.sandbox.interceptor import Interceptor, is_users
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.sandbox.trial import restored_globals
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import assemble, local_part
from lightning_3d.tensor.scratch import scratch_copy, shard_copy
from lightning_3d.tensor.simulate import run_shards

TOLERANCE = 2e-4
TOKENS, CHOICES = 5, 2
"""Tokens of the first simulated rank, and experts of each token."""
Case = tuple[Tensor, ...]
"""Hidden states, experts of each token and their weights; where it has its own router hidden states alone."""
Computed = tuple[list[Tensor], dict[str, Tensor]]
"""Results with the gradients of a case, and the gradients of parameters."""


@restored_streams()
def plan_experts(module: nn.Module, ranks: int) -> expert_plan.ExpertPlan:
    """The experts of `module` that `ranks` data ranks can share. Raise where there are none."""
    modules: dict[str, expert_plan.DividedExperts] = {}
    whole: dict[str, str] = {}
    known: dict[object, expert_plan.DividedExperts | str] = {}
    compiled = {inner for each in module.modules() if is_compiled(each) for inner in each.modules()}
    for found in find_experts(module):
        name, why = expert_plan.name_of_divided(found), _why_not_tried(module, found, ranks)
        part = module.get_submodule(name)
        if not why and name in modules:
            why = "the experts of another list of its mixture are shared"
        if not why and part in compiled:
            why = "it is compiled, and the exchange of tokens ends a graph"
        if not why:
            experts = expert_plan.divided(module, found)
            shapes = tuple((p.shape, p.dtype) for p in part.parameters())
            kind = (type(part), experts, shapes, repr(part), _settings(part))
            if kind not in known:
                with restored_globals(part.modules()):
                    known[kind] = _proven(part, experts, ranks)
            proven = known[kind]
            if isinstance(proven, expert_plan.DividedExperts):
                modules[name] = proven
                continue
            why = proven
        whole[found.name] = why
    if not modules:
        raise UnsupportedError(_none_divided(type(module).__name__, ranks, whole))
    for name, why in whole.items():
        rank_zero_warn(f"The experts of {name} stay on every data rank: {why}.")
    return expert_plan.ExpertPlan(ranks, modules, whole)


def _proven(part: nn.Module, experts: expert_plan.DividedExperts, ranks: int) -> expert_plan.DividedExperts | str:
    """The result of `prove`. Of several attributes that are the count, one may be the width of a token."""
    alone = [(name,) for name in experts.numbers] if len(experts.numbers) > 1 else []
    tried = (prove(part, replace(experts, numbers=numbers), ranks) for numbers in (experts.numbers, *alone))
    first = next(tried)
    return next((found for found in (first, *tried) if isinstance(found, expert_plan.DividedExperts)), first)


def _settings(part: nn.Module) -> tuple[object, ...]:
    """The plain attributes of `part` and of modules inside, which its code may read."""
    plain = int | float | str | bool | None
    return tuple(
        (name, *((key, value) for key, value in vars(inner).items() if isinstance(value, plain)))
        for name, inner in part.named_modules()
    )


def _why_not_tried(module: nn.Module, found: Experts, ranks: int) -> str:
    part = module.get_submodule(found.name)
    if expert_plan.name_of_divided(found) == "":
        return f"{type(module).__name__} itself calls them, in place of a module inside of it"
    if around := expert_around(module, expert_plan.name_of_divided(found)):
        return f"it is inside of {around}, an expert of another mixture, which is called where tokens go there"
    if found.count % ranks:
        return f"{ranks} ranks do not divide its {found.count} experts"
    if expert_plan.is_named_around(module, found):
        return "a module around it changes its parameters by their names, as adapters of PEFT do"
    shared = expert_plan.is_shared_outside(module, part) or expert_plan.is_read_outside(module, found)
    if found.kind is ExpertsKind.STACKED:
        called = type(part).forward is not nn.Module.forward
        return "" if called and not shared else "other code than its forward uses its parameters"
    if len(found.parameters) != sum(1 for _ in part.parameters()) or any(not p.dim() for p in part.parameters()):
        return "it has parameters that experts share"
    mixture = module.get_submodule(expert_plan.name_of_divided(found))
    if found.kind is ExpertsKind.LISTED and any(
        is_users(hook) for each in mixture.modules() for hook in forward_hooks(each).values()
    ):
        return "it has a forward hook, which would be called twice"
    if found.kind is ExpertsKind.LISTED and expert_plan.has_two_holders(module, part):
        return "several mixtures share them, or one of them"
    if found.kind is ExpertsKind.LISTED and any(type(each).forward is nn.Module.forward for each in part.children()):
        return "its code calls parts of an expert, in place of the expert"
    return "other code uses its parameters too" if shared else ""


def _none_divided(module: str, ranks: int, whole: dict[str, str]) -> str:
    found = "; ".join(f"{name}: {why}" for name, why in whole.items()) or (
        "no module of it is called with hidden states, the experts of each token and their weights, and has parameters"
        " with one row for each expert"
    )
    return (
        f"expert_parallel_size={ranks}: {module} has no experts that data ranks can share ({found}). Every rank would"
        " compute them whole, and nothing would be gained. Use expert_parallel_size=1, and zero_stage=3 or"
        " tensor_parallel_size to divide them."
    )


def prove(part: nn.Module, experts: expert_plan.DividedExperts, ranks: int) -> expert_plan.DividedExperts | str:
    """`experts` as `ranks` ranks can share them, or the reason for which `part` computes something else on them."""
    simulated = next(size for size in range(2, ranks + 1) if ranks % size == 0)
    scratch = scratch_copy(part, seed=1, opened=False)
    own = [name for name, _ in scratch.named_parameters() if name in experts.parameters]
    widths = sorted({size for name in own for size in scratch.get_parameter(name).shape[not experts.listed :]})
    reason = "results have another width than tokens"
    for width, batch in product(widths, ((2,), ()) if experts.copied else ((),)):  # sequences, and tokens in a row
        known, cases = replace(experts, width=width), _cases(part, experts, width, simulated, batch)
        try:
            wanted = [_computed(shard_copy(scratch, lambda _, value: value), case) for case in cases]
        except Exception as error:  # of the user's code, for tokens of another width
            reason = str(error)
            continue
        if experts.copied or all(own[0].shape == case[0].shape for case, (own, _) in zip(cases, wanted, strict=True)):
            return _compared(scratch, known, cases, wanted) or known
    # gathered ones run unchanged, and may need more than tokens
    return experts if experts.gathered else f"no width of a token was found that it computes ({reason})"


def _cases(
    part: nn.Module, experts: expert_plan.DividedExperts, width: int, ranks: int, batch: tuple[int, ...]
) -> list[Case]:
    """Tokens of each rank, and where it is called with routes the experts of each and their weights, in its order."""
    call = RoutedCall(part)
    generator = torch.Generator().manual_seed(2)
    found: list[Case] = []
    for rank in range(ranks):
        tokens = TOKENS + 4 * rank
        if experts.copied:
            found.append((torch.randn(*batch, tokens, width, generator=generator),))
            continue
        index = torch.rand(tokens, experts.count, generator=generator).topk(min(CHOICES, experts.count)).indices
        weights = torch.rand(index.shape, generator=generator) + 0.5
        given = dict(zip(call.routes, (torch.randn(tokens, width, generator=generator), index, weights), strict=True))
        found.append(tuple(given[name] for name in call.arguments[:3]))
    return found


def _computed(module: nn.Module, case: Case) -> Computed:
    """Results with the gradients of tokens and weights, and the gradients of parameters."""
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in case]
    # ranks draw masks and noise of their own, as data ranks do
    with torch.enable_grad(), Interceptor(SilenceRandom()):
        results = [each for each in tensors_in(module(*given)) if each.requires_grad]
        torch.stack(
            [(each * torch.linspace(-1, 1, each.numel()).view_as(each)).sum() for each in results]
        ).sum().backward()
    own = [*(each.detach() for each in results), *(_grad(each) for each in given if each.requires_grad)]
    return own, {name: _grad(p) for name, p in module.named_parameters()}


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _compared(
    scratch: nn.Module, experts: expert_plan.DividedExperts, cases: Sequence[Case], wanted: Sequence[Computed]
) -> str:
    """The reason for which several ranks compute something else than `wanted`, "" where they do not."""
    size = len(cases)
    splits = experts.splits(size)

    def local(name: str, value: Tensor, rank: int) -> Tensor:
        return local_part(value, splits[name], rank).clone() if name in splits else value.clone()

    def compute(axis: Axis) -> Computed:
        twin = shard_copy(scratch, lambda name, value: local(name, value, axis.rank))
        for layer in make_layers(twin, experts, axis):
            add_layer(layer, UndoStack())
        return _computed(twin, cases[axis.rank])

    try:
        ranks = run_shards(size, compute)
    except Exception as error:  # of the user's code, with fewer experts
        return f"it does not run with {experts.count // size} of its experts ({error})"
    got = [tensor for results, _ in ranks for tensor in results]
    expected = [tensor for results, _ in wanted for tensor in results]
    for name, _ in scratch.named_parameters():
        parts = [gradients[name] for _, gradients in ranks]
        got.append(assemble(parts, splits[name]) * size if name in splits else torch.stack(parts).sum(0))
        expected.append(torch.stack([gradients[name] for _, gradients in wanted]).sum(0))
    if [each.shape for each in got] != [each.shape for each in expected]:
        return "its results on several ranks have other shapes"
    off = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(got, expected, strict=True))
    return "" if off <= TOLERANCE else f"its results on several ranks are other ones (off by {off:.1e})"
