"""`plan_tensor`: the plan for a whole module, one kind of block at a time."""

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.anatomy import tied_parameters
from lightning_3d.tensor.block_calls import Recording
from lightning_3d.tensor.blocks import find_units, structure
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.patch import get_attribute
from lightning_3d.tensor.plan_block import Study, find_plan, with_sequence
from lightning_3d.tensor.proof import Refused
from lightning_3d.tensor.sample import Sample, shortened, working_dtype
from lightning_3d.tensor.scratch import scratch_copy
from lightning_3d.tensor.tensor_plan import Attribute, TensorPlan, UnitPlan
from lightning_3d.tensor.vocabulary import find_vocabulary, holding_heads
from lightning_3d.tensor.written_plan import WrittenSplit, declared_plan, read_plan

SEED = 20_240_229
SEQUENCE = "(sequence parallelism)"
"""Stands for the residual stream among the names of what stays whole."""
WORTH = 0.005
"""Share of the module's parameters from which a matrix that stays whole is worth a warning."""


@dataclass
class _Kind:
    """A block that has been planned, and what others must share with it to use its plan."""

    read: Mapping[Attribute, Any]
    signature: str
    plan: UnitPlan | None
    whole: Mapping[str, str]


def plan_tensor(
    module: nn.Module,
    size: int,
    *,
    tensor_plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    calls: Recording | None = None,
) -> TensorPlan:
    """Find out how `module` can be split over `size` tensor ranks.

    Reads the whole module (on any device, also meta) and changes nothing; needs no process group, leaves the global
    random state alone and gives the same answer on every rank.

    Args:
        module: the module to split, with nothing split off it yet.
        size: ranks on the tensor axis.
        tensor_plan: module or parameter names (patterns) -> "column", "row", "column:3" (three fused sections) or
            "whole". It overrides what would be inferred, is proven too, and is an error if it computes something else.
        sequence_parallel: also divide the residual stream between the split parts of a block, where that can be proven.
        calls: what each block is called with, from `record_calls`. Without it an input is made up for blocks that
            take one tensor.
    """
    units: dict[str, UnitPlan] = {}
    whole: dict[str, str] = {}
    kinds: dict[tuple[object, ...], list[_Kind]] = {}
    samples = calls.samples if calls else {}
    told = read_plan(module, tensor_plan or {})
    declared = declared_plan(module)
    vocabulary, headed = _vocabulary(module, told, calls, size)
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):  # what is looked at must run
        torch.manual_seed(SEED)
        for name in find_units(module):
            if name in headed:
                continue
            unit = module.get_submodule(name)
            made_up = None if name in samples else _made_up(unit)
            calls_of = samples.get(name, ()) if made_up is None else (made_up,)
            theirs = _under(told, name)
            try:
                if calls and name in calls.in_parts:
                    whole[name] = _in_parts(theirs)
                    continue
                plan, reasons = _plan_unit(
                    unit, calls_of, size, kinds, theirs or _under(declared, name), bool(theirs), sequence_parallel
                )
            except Refused as refusal:
                raise TensorPlanError(
                    f"tensor_plan: {name or type(module).__name__} does not compute the same thing when split as given:"
                    f" {refusal}"
                ) from None
            if plan is not None:
                units[name] = plan if made_up is None else replace(plan, forms=())
            whole |= {_join(name, inner): why for inner, why in reasons.items()}
    result = _with_splits(module, TensorPlan(size=size, units=units, vocabulary=vocabulary, whole=whole))
    _warn_whole(module, result.whole)
    return result


def _vocabulary(
    module: nn.Module, told: Mapping[str, WrittenSplit], calls: Recording | None, size: int
) -> tuple[dict[str, TensorSplit], list[str]]:
    """What is split by vocabulary, and blocks that are nothing but a split head and what is before it."""
    units = find_units(module)
    headed = [] if calls is None else holding_heads(module, units, calls.heads, size)
    elsewhere = {*(calls.elsewhere if calls else ()), *(name for name, way in told.items() if way.kind == "whole")}
    blocks = [unit for unit in units if unit not in headed]
    found = find_vocabulary(module, blocks, elsewhere, size, ends=None if calls is None else calls.heads)
    headed = [unit for unit in headed if any(name.startswith(f"{unit}.") for name in found)]
    for name, way in told.items():
        inside = any(name.startswith(f"{unit}." if unit else "") for unit in units if unit not in headed)
        if not inside and way.kind != "whole" and not (name in found and way == WrittenSplit("column")):
            raise TensorPlanError(
                f"tensor_plan: {name} is outside every block, so it cannot be split by {way.kind}s. Leave it out, or"
                ' set it to "whole".'
            )
    return found, headed


def _plan_unit(
    unit: nn.Module,
    calls: Sequence[Sample],
    size: int,
    kinds: dict[tuple[object, ...], list[_Kind]],
    ways: dict[str, WrittenSplit],
    must: bool,
    sequence: bool,
) -> tuple[UnitPlan | None, Mapping[str, str]]:
    if not calls and must:
        raise Refused("it was not called in the recorded run, so there is nothing to prove it on")
    if not calls:
        return None, {"": "it was not called in the recorded run, and takes more than one tensor"}
    same = kinds.setdefault((structure(unit), must, *ways.items()), [])
    signature = " ".join(call.signature() for call in calls)
    for kind in same:
        if kind.signature == signature and _reads_same(unit, kind.read):
            return kind.plan, kind.whole
    try:
        samples = _samples(unit, calls[0])
        for call in calls[1:]:
            with suppress(Exception):  # one that cannot be run alone computes whole
                samples += _samples(unit, call, most=1)
        original = scratch_copy(unit, SEED, opened=False)
        known = Study(lambda seed: scratch_copy(unit, SEED + seed), original, samples, size)
    except Exception as error:
        return None, {"": f"a copy of it cannot be run alone ({type(error).__name__}: {error})"}
    try:
        plan, whole = _like(known, same) or find_plan(known, ways, must=must)
    except (Refused, TensorPlanError):
        raise
    except Exception as error:  # whatever the block's code does while it is looked at, whole it is right
        return None, {"": f"looking for a plan failed ({type(error).__name__}: {error})"}
    if sequence and plan is not None and plan.sequence is None:
        divided = with_sequence(known, plan)
        if divided is None:
            whole = {**whole, SEQUENCE: "no way of dividing its sequence too computes the same"}
        plan = divided or plan
    same.append(_Kind(known.read, signature, plan, whole))
    return plan, whole


def _in_parts(ways: Mapping[str, WrittenSplit]) -> str:
    """Why a block whose parts are called by themselves stays whole."""
    reason = "parts of it are called by themselves, so what is between them is needed whole"
    if any(way.kind != "whole" for way in ways.values()):
        raise Refused(reason)
    return reason


def _under(ways: Mapping[str, WrittenSplit], unit: str) -> dict[str, WrittenSplit]:
    """What concerns one block, by names relative to it."""
    prefix = f"{unit}." if unit else ""
    return {name.removeprefix(prefix): way for name, way in ways.items() if name.startswith(prefix)}


def _like(known: Study, same: list[_Kind]) -> tuple[UnitPlan, Mapping[str, str]] | None:
    """The plan of a block of the same structure, if it can be proven for this one too."""
    for kind in same:
        if kind.plan is None:
            continue
        try:
            return known.prover.prove(kind.plan), kind.whole
        except Refused:
            continue
        except Exception:
            continue
    return None


def _samples(unit: nn.Module, sample: Sample, most: int = 2) -> list[Sample]:
    """Up to `most` calls of different sizes on which the block runs."""
    found: list[Sample] = []
    cuts = shortened(sample)
    for number, cut in enumerate(cuts):
        made = cut.random(torch.Generator().manual_seed(SEED + number))
        if any(made.signature() == other.signature() for other in found):
            continue
        try:
            call = made.fresh()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scratch_copy(unit, SEED)(*call.args, **call.kwargs)
        except Exception:
            if number == len(cuts) - 1 and not found:
                raise
            continue
        found.append(made)
        if len(found) == most:
            break
    return found


def _reads_same(unit: nn.Module, read: Mapping[Attribute, Any]) -> bool:
    """Whether every plain value that the planned block's code read is the same here."""
    missing = object()

    def value(name: str, path: str) -> object:
        try:
            return get_attribute(unit.get_submodule(name), path)
        except AttributeError:
            return missing

    return all(value(name, path) == seen for (name, path), seen in read.items())


def _made_up(unit: nn.Module) -> Sample | None:
    parameters = inspect.signature(unit.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = next((child for child in unit.modules() if isinstance(child, nn.Linear)), None)
    if first is not None and (isinstance(unit, nn.Sequential) or len(needed) == 1):
        dtype = working_dtype(first.weight.dtype)
        return Sample((torch.full((2, 8, first.in_features), 2.0, dtype=dtype),), {})
    return None


def _with_splits(module: nn.Module, plan: TensorPlan) -> TensorPlan:
    """List the splits under every name, and give up blocks that share a module, or parameters that they split
    otherwise."""
    sharing = _sharing(module, plan)
    if sharing:
        return _without(module, plan, sharing, "a module inside of it is inside of another block too")
    splits = {_join(unit, name): split for unit, found in plan.units.items() for name, split in found.splits.items()}
    splits |= plan.vocabulary
    owners = dict(module.named_modules(remove_duplicate=False))
    for group in tied_parameters(module):
        ways: dict[tuple[int, str], TensorSplit | None] = {}
        for name in group:
            owner, _, own_name = name.rpartition(".")
            place = id(owners[owner]), own_name  # a module that has two names is one place
            ways[place] = splits.get(name) or ways.get(place)
        if len(set(ways.values())) > 1:
            users = {unit for unit, found in plan.units.items() for name in found.splits if _join(unit, name) in group}
            return _without(module, plan, users, "it shares a parameter with a module that is not split the same way")
        splits |= {name: way for name in group for way in ways.values() if way is not None}
    return TensorPlan(plan.size, plan.units, plan.vocabulary, splits, plan.whole)


def _sharing(module: nn.Module, plan: TensorPlan) -> set[str]:
    """Blocks with a divided module that another block has too: for the other it would be divided, or summed, again."""
    homes: dict[nn.Module, set[str]] = {}
    for unit in find_units(module):
        for part in module.get_submodule(unit).modules():
            homes.setdefault(part, set()).add(unit)
    return {
        unit
        for unit, found in plan.units.items()
        if any(len(homes.get(module.get_submodule(_join(unit, name)), ())) > 1 for name in found.patched)
    }


def _without(module: nn.Module, plan: TensorPlan, refused: set[str], reason: str) -> TensorPlan:
    """The plan without these blocks."""
    units = {name: found for name, found in plan.units.items() if name not in refused}
    whole = {**plan.whole, **dict.fromkeys(refused, reason)}
    return _with_splits(module, TensorPlan(plan.size, units, plan.vocabulary, {}, whole))


def _warn_whole(module: nn.Module, whole: Mapping[str, str]) -> None:
    """Say once what stays whole, blocks of a kind in one line and small matrices (a router, an adapter) not at all."""
    total = sum(parameter.numel() for parameter in module.parameters())
    worth = {name: why for name, why in whole.items() if SEQUENCE in name or _numel(module, name) >= WORTH * total}
    lines = dict.fromkeys(
        f"  {re.sub(r'[0-9]+', '*', name) or type(module).__name__}: {why}" for name, why in worth.items()
    )
    if lines:
        warnings.warn("These stay whole on every tensor rank:\n" + "\n".join(lines), stacklevel=3)


def _numel(module: nn.Module, name: str) -> int:
    parameters = (p for full, p in module.named_parameters() if not name or full == name or full.startswith(name + "."))
    return sum(parameter.numel() for parameter in parameters)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
