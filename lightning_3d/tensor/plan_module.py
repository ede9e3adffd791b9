"""`plan_tensor`: the plan for a module, one kind of block at a time."""

import gc
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.anatomy import place_of, tied_parameters
from lightning_3d.module.host_memory import quick_collections, return_freed_memory
from lightning_3d.module.packed_weights import is_special
from lightning_3d.tensor.block_calls import Recording
from lightning_3d.tensor.blocks import find_blocks, structure
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.patch import get_attribute
from lightning_3d.tensor.plan_block import Study, find_plan, with_sequence
from lightning_3d.tensor.proof import Refused, is_large
from lightning_3d.tensor.sample import Sample, shortened, working_dtype
from lightning_3d.tensor.scratch import SEED, opened_copy, proofs_of, scratch_copy
from lightning_3d.tensor.tensor_plan import Attribute, TensorPlan, UnitPlan
from lightning_3d.tensor.vocabulary import find_vocabulary, holding_heads
from lightning_3d.tensor.written_plan import WrittenSplit, declared_plan, read_plan

SEQUENCE = "(sequence parallelism)"
"""Stands for the residual stream among the names of unsplit modules."""
SHARED = "a module inside it is also inside another block"
WORTH = 0.005
"""Share of the module's parameters from which an unsplit matrix is worth a warning."""


@dataclass
class _Kind:
    """A planned block, and the facts that another block must share to use its plan."""

    read: Mapping[Attribute, Any]
    signature: str
    plan: UnitPlan | None
    unsplit: Mapping[str, str]


def plan_tensor(
    module: nn.Module,
    size: int,
    *,
    tensor_plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    calls: Recording | None = None,
) -> TensorPlan:
    """Find a proven plan of splitting `module` over `size` tensor ranks. `Strategy3D` explains the other arguments.

    The module may be on any device, also meta, and does not change. No process group is needed. The global random state
    stays, and every rank gets the same plan. Without `calls`, blocks that take one tensor get a made-up one.
    """
    units: dict[str, UnitPlan] = {}
    unsplit: dict[str, str] = {}
    kinds: dict[tuple[object, ...], list[_Kind]] = {}
    samples = calls.samples if calls else {}
    written = read_plan(module, tensor_plan or {})
    declared = declared_plan(module)
    vocabulary, headed = _vocabulary(module, written, calls, size)
    blocks = find_blocks(module)
    large = any(is_large(module.get_submodule(name)) for name in blocks)  # then copies are freed at once
    collections = quick_collections() if large else nullcontext()
    with proofs_of(module), collections:
        studied = 0
        for name in blocks:
            if name in headed:
                continue
            unit = module.get_submodule(name)
            passed_by = calls is not None and not samples  # by copies of all blocks (meta-learning by `higher`)
            made_up = None if name in samples or passed_by else _made_up(unit)
            calls_of = samples.get(name, ()) if made_up is None else (made_up,)
            ways = _under(written, name)
            try:
                if calls and name in calls.opened:
                    unsplit[name] = _opened(calls.opened[name], ways)
                    continue
                plan, reasons = plan_unit(
                    unit, calls_of, size, kinds, ways or _under(declared, name), bool(ways), sequence_parallel
                )
            except Refused as refusal:
                raise TensorPlanError(
                    f"tensor_plan: {name or type(module).__name__} does not compute the same when split as written:"
                    f" {refusal}. Correct the plan, or leave this block out of it."
                ) from None
            if plan is not None:
                units[name] = plan if made_up is None else replace(plan, forms=())
            unsplit |= {_join(name, inner): why for inner, why in reasons.items()}
            if large and len(kinds) > studied:
                studied = len(kinds)
                gc.collect()  # copies of the block are in cycles
                return_freed_memory()
    result = _with_splits(module, TensorPlan(size=size, units=units, vocabulary=vocabulary, unsplit=unsplit))
    _warn_unsplit(module, result.unsplit)
    return result


def _vocabulary(
    module: nn.Module, written: Mapping[str, WrittenSplit], calls: Recording | None, size: int
) -> tuple[dict[str, TensorSplit], list[str]]:
    """Parameters split by vocabulary, and blocks that are a split head with the layers before it."""
    units = find_blocks(module)
    headed = [] if calls is None else holding_heads(module, units, calls.heads, size)
    elsewhere = {*(calls.elsewhere if calls else ()), *(name for name, way in written.items() if way.kind == "whole")}
    blocks = [unit for unit in units if unit not in headed]
    found = find_vocabulary(module, blocks, elsewhere, size, ends=None if calls is None else calls.heads)
    headed = [unit for unit in headed if any(name.startswith(f"{unit}.") for name in found)]
    for name, way in written.items():
        inside = any(name.startswith(f"{unit}." if unit else "") for unit in units if unit not in headed)
        if not inside and way.kind != "whole" and not (name in found and way == WrittenSplit("column")):
            raise TensorPlanError(
                f"tensor_plan: {name} is outside every block, so it cannot be split by {way.kind.rstrip('s')}s. Leave"
                ' it out, or set it to "whole".'
            )
    return found, headed


def plan_unit(
    unit: nn.Module,
    calls: Sequence[Sample],
    size: int,
    kinds: dict[tuple[object, ...], list[_Kind]],
    ways: dict[str, WrittenSplit],
    must: bool,
    sequence: bool,
) -> tuple[UnitPlan | None, Mapping[str, str]]:
    """The plan of one block, None where it stays unsplit, and the reasons. `kinds` has those of blocks before it."""
    if not calls and must:
        raise Refused("it was not called in the recorded run, so its plan cannot be proven")
    if not calls:
        return None, {"": "it was not called in the recorded run, as no block was, or takes more than one tensor"}
    same = kinds.setdefault((structure(unit), must, *ways.items()), [])
    signature = " ".join(call.signature() for call in calls)
    for kind in same:
        if kind.signature == signature and reads_same(unit, kind.read):
            return kind.plan, kind.unsplit
    try:
        original = scratch_copy(unit, SEED, opened=False)
        samples = _samples(original, calls[0])
        for call in calls[1:]:
            with suppress(Exception):  # a call that cannot run alone computes unsplit
                samples += _samples(original, call, most=1)
        return_freed_memory()
        large = is_large(original)  # then runs differ in their inputs alone
        make = lambda seed: opened_copy(original) if large or not seed else scratch_copy(unit, SEED + seed)  # noqa: E731
        known = Study(make, original, samples, size)
    except Exception as error:
        return None, {"": f"a copy of it cannot be run alone ({type(error).__name__}: {error})"}
    try:
        plan, unsplit = _like(known, same) or find_plan(known, ways, must=must)
    except (Refused, TensorPlanError):
        raise
    except Exception as error:  # unsplit the block is right, whatever its code does here
        return None, {"": f"the search for a plan failed ({type(error).__name__}: {error})"}
    if sequence and plan is not None and plan.sequence is None:
        divided = with_sequence(known, plan)
        if divided is None:
            unsplit = {**unsplit, SEQUENCE: "no division of its sequence computes the same"}
        plan = divided or plan
    same.append(_Kind(known.read, signature, plan, unsplit))
    return plan, unsplit


def _opened(reason: str, ways: Mapping[str, WrittenSplit]) -> str:
    """The reason for which a block that is called in another way than alone stays unsplit."""
    if any(way.kind != "whole" for way in ways.values()):
        raise Refused(reason)
    return reason


def _under(ways: Mapping[str, WrittenSplit], unit: str) -> dict[str, WrittenSplit]:
    """The written splits of one block, by names relative to it."""
    prefix = f"{unit}." if unit else ""
    return {name.removeprefix(prefix): way for name, way in ways.items() if name.startswith(prefix)}


def _like(known: Study, same: list[_Kind]) -> tuple[UnitPlan, Mapping[str, str]] | None:
    """The plan of a block of the same structure, if it can be proven for this one too."""
    for kind in same:
        if kind.plan is None:
            continue
        try:
            return known.prover.prove(kind.plan), kind.unsplit
        except Exception:  # `Refused`, or the block's code fails under a wrong plan
            continue
    return None


def _samples(original: nn.Module, sample: Sample, most: int = 2) -> list[Sample]:
    """Up to `most` calls of different sizes on which the block runs."""
    found: list[Sample] = []
    cuts = shortened(sample)
    for number, cut in enumerate(cuts):
        drawn = cut.random(torch.Generator().manual_seed(SEED + number))
        if any(drawn.signature() == other.signature() for other in found):
            continue
        try:
            call = drawn.fresh()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opened_copy(original)(*call.args, **call.kwargs)
        except Exception:
            if number == len(cuts) - 1 and not found:
                raise
            continue
        found.append(drawn)
        if len(found) == most:
            break
    return found


def reads_same(unit: nn.Module, read: Mapping[Attribute, Any]) -> bool:
    """Return True if every plain value that the planned block's code read is the same in `unit`."""
    missing = object()

    def value(name: str, path: str) -> object:
        try:
            return get_attribute(unit.get_submodule(name), path)
        except AttributeError:
            return missing

    return all(value(name, path) == known for (name, path), known in read.items())


def _made_up(unit: nn.Module) -> Sample | None:
    parameters = inspect.signature(unit.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = next((child for child in unit.modules() if isinstance(child, nn.Linear)), None)
    if first is not None and (isinstance(unit, nn.Sequential) or len(needed) == 1):
        dtype = working_dtype(first.weight.dtype)
        return Sample((torch.full((2, 8, first.in_features), 2.0, dtype=dtype),), {})
    return None


def _with_splits(module: nn.Module, plan: TensorPlan) -> TensorPlan:
    """`plan` with the splits under every name.

    Blocks that share a split module, or a parameter with another split, stay unsplit.
    """
    sharing = blocks_sharing(module, plan.units)
    if sharing:
        return _without(module, plan, sharing, SHARED)
    special = {name for name, each in module.named_parameters(remove_duplicate=False) if is_special(each)}
    keeping = {unit for unit, found in plan.units.items() if any(_join(unit, name) in special for name in found.splits)}
    if keeping:
        return _without(module, plan, keeping, "its optimizer knows a parameter by a class of its own")
    plan = replace(plan, vocabulary={name: way for name, way in plan.vocabulary.items() if name not in special})
    splits = {_join(unit, name): split for unit, found in plan.units.items() for name, split in found.splits.items()}
    splits |= plan.vocabulary
    for group in tied_parameters(module):
        ways: dict[tuple[nn.Module, str], TensorSplit | None] = {}
        for name in group:
            place = place_of(module, name)  # a module with two names is one place
            ways[place] = splits.get(name) or ways.get(place)
        if len(set(ways.values())) > 1:
            users = {unit for unit, found in plan.units.items() for name in found.splits if _join(unit, name) in group}
            return _without(module, plan, users, "it shares a parameter with a module that is split differently")
        splits |= {name: way for name in group for way in ways.values() if way is not None}
    return TensorPlan(plan.size, plan.units, plan.vocabulary, splits, plan.unsplit)


def blocks_sharing(module: nn.Module, units: Mapping[str, UnitPlan]) -> set[str]:
    """Blocks with a patched module that is inside another block too, which would split or sum it again."""
    homes: dict[nn.Module, set[str]] = {}
    for unit in find_blocks(module):
        for inner in module.get_submodule(unit).modules():
            homes.setdefault(inner, set()).add(unit)
    return {
        unit
        for unit, found in units.items()
        if any(len(homes.get(module.get_submodule(_join(unit, name)), ())) > 1 for name in found.patched)
    }


def _without(module: nn.Module, plan: TensorPlan, refused: set[str], reason: str) -> TensorPlan:
    units = {name: found for name, found in plan.units.items() if name not in refused}
    unsplit = {**plan.unsplit, **dict.fromkeys(refused, reason)}
    return _with_splits(module, TensorPlan(plan.size, units, plan.vocabulary, {}, unsplit))


def _warn_unsplit(module: nn.Module, unsplit: Mapping[str, str]) -> None:
    """Warn about unsplit modules: one line for blocks of a kind, none for small matrices (a router, an adapter)."""
    total = sum(parameter.numel() for parameter in module.parameters())
    worth = {name: why for name, why in unsplit.items() if SEQUENCE in name or _numel(module, name) >= WORTH * total}
    lines = dict.fromkeys(
        f"  {re.sub(r'[0-9]+', '*', name) or type(module).__name__}: {why}" for name, why in worth.items()
    )
    if lines:
        warnings.warn("These stay unsplit on every tensor rank:\n" + "\n".join(lines), stacklevel=3)


def _numel(module: nn.Module, name: str) -> int:
    parameters = (p for full, p in module.named_parameters() if not name or full == name or full.startswith(name + "."))
    return sum(parameter.numel() for parameter in parameters)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
