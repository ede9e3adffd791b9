"""Whole experts: each tensor rank computes some experts for all tokens, and their results are summed.

Slices of every expert are the other way. They become thin where experts are small, and their products are slow then.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.expert_modules import Experts, ExpertsKind, find_experts, of_expert
from lightning_3d.module.torch_private import forward_hooks
from lightning_3d.sandbox.interceptor import Interceptor, is_users
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import leaves
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.module_forward import SENTINEL
from lightning_3d.tensor.proof import Prover, Refused
from lightning_3d.tensor.sample import is_activation
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.tensor_plan import Attribute, UnitPlan
from lightning_3d.tensor.written_plan import WrittenSplit, innermost

THIN = 256
"""Width of a slice of an expert below which whole experts are tried first."""


def plan_experts(
    prover: Prover, called: set[str], read: Mapping[Attribute, Any], ways: Mapping[str, WrittenSplit], *, must: bool
) -> UnitPlan:
    """The proven plan of whole experts of a block, empty where it has none or slices are wide.

    Where the `ways` are the user's, they `must` be kept: raise `Refused` where they ask for what is not proven.
    """
    plan, parameters = UnitPlan(), dict(prover.scratch.named_parameters())
    asked = [name for name, way in ways.items() if way.kind == "experts"]
    for experts in find_experts(prover.scratch):
        written = must and any(name in ways for name in experts.parameters)
        if written and not set(asked).intersection(experts.parameters):
            continue
        if not written and not _are_thin(experts, parameters, prover):
            continue
        try:
            plan = _prove(prover, plan, experts, called, read)
        except Refused as refusal:
            if written:
                raise Refused(f"whole experts of {experts.name or 'the block'}: {refusal}") from None
    left = [name for name in asked if name not in plan.splits and name not in plan.summed]
    if left:
        raise Refused(f"{left[0]} is no parameter of experts")
    return plan


def _prove(
    prover: Prover, plan: UnitPlan, experts: Experts, called: set[str], read: Mapping[Attribute, Any]
) -> UnitPlan:
    if experts.kind is ExpertsKind.LISTED and (kept := kept_aside(prover)):
        raise Refused(kept)
    refusals = list[str]()
    for candidate in _candidates(experts, prover.scratch, called, read, prover.ranks):
        prover.run_unsplit()
        try:
            return prover.prove(plan.merged(candidate))
        except Refused as refusal:
            refusals.insert(0, str(refusal))
        except Exception as error:  # a wrong candidate makes the block's code fail in any way
            refusals.append(f"it does not run ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    raise Refused(refusals[0])


def kept_aside(prover: Prover) -> str:
    """The reason to keep a router out of a region: the block keeps values beside its results. "" where it does not."""
    block, call = shard_copy(prover.original, lambda _, value: value), prover.samples[0].fresh()
    hooked = [name for name, each in block.named_modules() if name and any(map(is_users, forward_hooks(each).values()))]
    with warnings.catch_warnings(), torch.enable_grad(), Interceptor(SilenceRandom()):
        warnings.simplefilter("ignore")
        block.train()(*call.args, **call.kwargs)
    left = [
        f"{name}.{key}".lstrip(".")
        for name, each in block.named_modules()
        for key, value in vars(each).items()
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves(value))
    ]
    if not hooked and not left:
        return ""
    return (
        f"{'a hook of ' + hooked[0] if hooked else left[0]} keeps a value beside the results (a router's loss,"
        " perhaps), whose gradient would be counted on each tensor rank. Return it from the block"
    )


def _are_thin(experts: Experts, parameters: Mapping[str, Tensor], prover: Prover) -> bool:
    """Return True where a slice of each expert would be thin."""
    hidden = next((tensor.shape[-1] for tensor in prover.samples[0].tensors() if is_activation(tensor)), 0)
    matrices = [parameters[name].shape[-2:] for name in experts.parameters if parameters[name].dim() > 1]
    widths = [rows if columns == hidden else columns for rows, columns in matrices]
    return min(widths, default=THIN * prover.ranks) < THIN * prover.ranks


def _candidates(
    experts: Experts, block: nn.Module, called: set[str], read: Mapping[Attribute, Any], ranks: int
) -> Iterator[UnitPlan]:
    """Plans that give each rank whole experts. Raises `Refused` where there can be none."""
    if experts.count < ranks:
        raise Refused(
            f"{experts.count} experts are fewer than {ranks} tensor ranks, so some would have none. Leave them out of"
            " tensor_plan: each is divided in slices then."
        )
    if experts.kind is ExpertsKind.STACKED:
        raise Refused(
            "its code multiplies all experts at once, so no rank can leave any out. Leave it out of tensor_plan: each"
            " expert is divided in slices then, where that is proven."
        )
    numbers = TensorSplit.even(0, experts.count, ranks)
    routed = experts.kind is ExpertsKind.ROUTED
    plan = _routed(experts, block, numbers) if routed else _listed(experts, block, called, numbers)
    counts = tuple(numbers.local_size(rank) for rank in range(ranks))
    sizes = [key for key, value in read.items() if key[0] in plan.routes and value == experts.count]
    marks = {(name, SENTINEL): (True,) * ranks for name in plan.routes if hasattr(block.get_submodule(name), SENTINEL)}
    for chosen in dict.fromkeys((tuple(sizes), *((key,) for key in sizes), ())):
        yield replace(plan, attributes={**dict.fromkeys(chosen, counts), **marks})


def _routed(experts: Experts, block: nn.Module, numbers: TensorSplit) -> UnitPlan:
    name = experts.name
    own = [f"{name}.{key}" if name else key for key, _ in block.get_submodule(name).named_parameters()]
    return UnitPlan(
        splits=dict.fromkeys(experts.parameters, numbers),
        summed=tuple(key for key in own if key not in experts.parameters),
        copies=(name,),
        reduces=(name,),
        routes={name: numbers},
        holders=tuple((key, name) for key in own),
        edges=(((name,),),),
    )


def _listed(experts: Experts, block: nn.Module, called: set[str], numbers: TensorSplit) -> UnitPlan:
    around = experts.name if experts.name in called else experts.name.rpartition(".")[0]
    prefix = f"{around}." if around else ""
    parameters = dict(block.named_parameters())
    splits, holders, owners = dict[str, TensorSplit](), list[tuple[str, str]](), dict[str, int]()
    for number, (child, _) in enumerate(block.get_submodule(experts.name).named_children()):
        expert, owner = f"{experts.name}.{child}", next(r for r, (own,) in enumerate(numbers.pieces) if number < own[1])
        owners[expert] = owner
        for name in of_expert(experts.parameters, experts.count, number):
            whole = ((0, parameters[name].shape[0]),)
            splits[name] = TensorSplit(0, tuple(whole if rank == owner else () for rank in range(numbers.ranks)))
            holders.append((name, expert))
    others = [name for name in parameters if name.startswith(prefix) and name not in splits]
    return UnitPlan(
        splits=splits,
        summed=tuple(others),
        copies=(around,),
        reduces=(around,),
        owners=owners,
        holders=(*holders, *((name, innermost(name, called)) for name in others)),
        edges=(((around,),),) if around else (),
    )
