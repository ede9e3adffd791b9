"""Cuts a module into stages: `plan_split` plans on the uncut module, `apply_split` makes other stages' units absent."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.axes.group import Group
from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, module_of
from lightning_3d.layout import stage_ranks
from lightning_3d.module.anatomy import Anatomy, parameter_names, place_of
from lightning_3d.module.materialize import ABSENT
from lightning_3d.module.packed_weights import PARTS_OF_SPARSE
from lightning_3d.module.torch_private import no_torch_function, own_buffers, own_parameters
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.stage_costs import balanced_cut
from lightning_3d.pipeline.units import Unit, find_units, in_running_order, parameters_used_everywhere
from lightning_3d.ranks import talk
from lightning_3d.sandbox.deferred import RECORDED

_DEVICE: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_INSIDE = os.path.join(os.path.dirname(torch.__file__), "_")
"""Prefix of the files of torch's private modules."""


def _stays(plain: Any) -> Any:
    """`plain` for a placeholder, which stays where it is when its module moves, as by `self.net.to(self.device)`."""

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if module_of(sys._getframe(1)) != nn.Module.__module__:
            return plain(self, *args, **kwargs)
        return plain(self, args[1]) if len(args) > 1 and args[1] is not None else self  # the dtype

    return move


class _StandsOn:
    stands_on: torch.device | None = None
    to, cpu, cuda = map(_stays, (Tensor.to, Tensor.cpu, Tensor.cuda))

    @property
    def device(self) -> torch.device:
        """The device of the rank; meta for torch's own Python code, which computes on meta tensors."""
        inside = sys._getframe(1).f_code.co_filename.startswith(_INSIDE)
        return _DEVICE(self) if inside or self.stands_on is None else self.stands_on


class _AbsentParameter(_StandsOn, nn.Parameter):  # type: ignore[override]
    pass


setattr(_AbsentParameter, ABSENT, True)  # a copy has no attributes of its own


class _AbsentBuffer(_StandsOn, Tensor):  # type: ignore[override]
    __torch_function__ = no_torch_function


def absent_like(tensor: Tensor) -> Tensor:
    """A placeholder for `tensor` that reports the device of `tensor`."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = _AbsentParameter(empty, requires_grad=tensor.requires_grad)
    elif type(empty) is Tensor:  # tensors of a dry run have a class of their own
        empty = empty.as_subclass(_AbsentBuffer)
    empty.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != RECORDED})
    empty.__dict__.update({ABSENT: True, "stands_on": tensor.device})
    return empty


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages own."""

    name: str
    """Its first name in `named_parameters`."""
    names: tuple[str, ...]
    stages: tuple[int, ...]
    """Stages that use it, in order. The first one counts it in norms and writes it to checkpoints."""


@dataclass(frozen=True)
class PipelineSplit:
    """The units of each stage. Pure data, equal on every rank."""

    stages: tuple[tuple[str, ...], ...]
    """Names of units per stage, in running order; a stage may be empty."""
    units: tuple[Unit, ...]
    everywhere: tuple[str, ...]
    """Parameters that code outside of units uses: real on every stage."""
    ties: tuple[Tie, ...]
    holders: Mapping[str, tuple[int, ...]]
    """Stages on which each unit's parameters are real, by every name the unit has."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def has_one_stage(self) -> bool:
        """True where one stage does all the work, because there is nothing to cut."""
        return sum(bool(stage) for stage in self.stages) <= 1

    def stages_of(self, parameter: str) -> tuple[int, ...]:
        """The stages that have the parameter of this name."""
        owners = [tie.stages for tie in self.ties if parameter in tie.names]
        owners += [stages for unit, stages in self.holders.items() if parameter.startswith(f"{unit}.")]
        return owners[0] if owners and parameter not in self.everywhere else tuple(range(self.num_stages))

    def stages_on(self, rank: int, ranks: int, schedule: str) -> tuple[int, ...]:
        placement = stage_ranks(schedule, ranks, self.num_stages // ranks)
        return tuple(stage for stage, at in enumerate(placement) if at == rank)

    @property
    def shares(self) -> tuple[float, ...]:
        cost = {unit.name: unit.cost for unit in self.units}
        total = sum(cost.values()) or 1.0
        return tuple(sum(cost[name] for name in names) / total for names in self.stages)

    def warning(self, ranks: int, schedule: str) -> str | None:
        """A line for `ranks` of which one does so much that a pipeline gains less than a tenth of what it could."""
        mine = [sum(self.shares[stage] for stage in self.stages_on(rank, ranks, schedule)) for rank in range(ranks)]
        if max(mine) * (1 + (ranks - 1) / 10) <= 1:
            return None
        return (
            f"The pipeline ranks do {', '.join(f'{share:.0%}' for share in mine)} of the work: most of them wait for"
            f" one. Use {NO_PIPELINE} with more data ranks, or more blocks of equal size."
        )

    def describe(self) -> str:
        lines = []
        for index, (names, share) in enumerate(zip(self.stages, self.shares, strict=True)):
            span = f"{names[0]} .. {names[-1]}" if len(names) > 1 else "".join(names) or "nothing"
            lines.append(f"stage {index}: {span} ({share:.0%} of the work)")
        return "\n".join(lines)


def plan_split(
    module: nn.Module,
    anatomy: Anatomy | None = None,
    num_stages: int = 2,
    *,
    cuts: Sequence[str] | None = None,
    uncut: UncutRun | None = None,
) -> PipelineSplit:
    """Cut `module`, before anything is sharded, into `num_stages` stages of about equal cost, or where `cuts` says.

    `uncut`, the run of one microbatch, has the order in which units run, those that are called again, and their
    parameters that other code reads. Without it, units run in the order of their declaration. A module with a single
    unit leaves all stages but the last empty; units that the step does not call stay with the one before them. Raises
    `PipelineSplitError` where there are several units but fewer than stages.
    """
    anatomy = anatomy or Anatomy.of(module)
    units = find_units(module, anatomy, num_stages)
    running = units
    if uncut is not None:
        units = in_running_order(units, module, uncut.calls)
        called = {id(module.get_submodule(name)) for name in uncut.calls}
        running = tuple(unit for unit in units if id(module.get_submodule(unit.name)) in called)
    names = tuple(unit.name for unit in units)
    if cuts is not None:
        stages = _by_hand(names, cuts, num_stages)
    elif len(running) <= 1:
        stages = ((),) * (num_stages - 1) + (names,)
    elif len(running) < num_stages:
        raise PipelineSplitError(
            f"The pipeline has {num_stages} stages but the module only {len(running)} blocks to place"
            f" ({', '.join(unit.name for unit in running)}). Use a pipeline_parallel_size x stages per rank of at most"
            f" {len(running)}."
        )
    else:
        bounds = balanced_cut(tuple(unit.cost for unit in running), num_stages)
        balanced = tuple(tuple(unit.name for unit in running[start:stop]) for start, stop in pairwise(bounds))
        stages = _with_idle(balanced, names)
    everywhere = parameters_used_everywhere(module, units)
    holders = _holders(module, stages)
    if uncut is not None:
        everywhere = tuple(dict.fromkeys([*everywhere, *uncut.read]))
        _refuse_all_everywhere(module, uncut.read)
        holders = _with_later_calls(holders, uncut.calls, anatomy)
    return PipelineSplit(stages, units, everywhere, _ties(module, holders, everywhere, num_stages), holders)


def _by_hand(names: tuple[str, ...], cuts: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    if len(cuts) != num_stages - 1:
        raise PipelineSplitError(
            f"pipeline_split names {len(cuts)} cuts ({', '.join(cuts)}), but {num_stages} stages need {num_stages - 1}:"
            " the first block of each stage but the first."
        )
    starts = [0]
    for cut in cuts:
        matches = [index for index, name in enumerate(names) if name == cut or name.startswith(cut + ".")]
        if not matches:
            raise PipelineSplitError(
                f"pipeline_split: {cut!r} is not a block of the module. Blocks: {', '.join(names)}."
            )
        if matches[0] <= starts[-1]:
            raise PipelineSplitError(
                f"pipeline_split: {cut!r} does not run after {names[starts[-1]]!r}, where the stage before it starts."
            )
        starts.append(matches[0])
    return tuple(names[start:stop] for start, stop in zip(starts, [*starts[1:], len(names)], strict=True))


def _with_idle(stages: tuple[tuple[str, ...], ...], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """`stages` of the units that run, with the other `names` on the stage of the one before."""
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage}
    complete: list[list[str]] = [[] for _ in stages]
    index = 0
    for name in names:
        index = stage_of.get(name, index)
        complete[index].append(name)
    return tuple(map(tuple, complete))


def _holders(module: nn.Module, stages: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, ...]]:
    """Stages by unit; a module that stands at several places in the tree belongs to the stages of all of them."""
    by_module: dict[int, list[int]] = {}
    for index, names in enumerate(stages):
        for name in names:
            by_module.setdefault(id(module.get_submodule(name)), []).append(index)
    return {name: tuple(dict.fromkeys(by_module[id(module.get_submodule(name))])) for names in stages for name in names}


def _with_later_calls(
    holders: dict[str, tuple[int, ...]], calls: Sequence[str], anatomy: Anatomy
) -> dict[str, tuple[int, ...]]:
    """Stages by unit, with later stages that call a unit again (an embedding, for encoder and decoder).

    Blocks of a chain stay where they are: a pipeline whose stages all own the chain is none. The rehearsal refuses it.
    """
    blocks = tuple(name for chain in anatomy.chains if len(chain.blocks) > 1 for name in chain.blocks)
    owners, reached = dict(holders), 0
    for name in calls:
        later = [stage for stage in owners[name] if stage >= reached]
        if later:
            reached = later[0]
        elif not any(name == block or name.startswith(block + ".") for block in blocks):
            owners[name] = (*owners[name], reached)
    return owners


def _refuse_all_everywhere(module: nn.Module, read: Sequence[str]) -> None:
    total = sum(parameter.numel() for parameter in module.parameters())
    outside = sum(module.get_parameter(name).numel() for name in read)
    if 2 * outside > total:
        raise PipelineSplitError(
            f"The step reads {len(read)} parameters of blocks ({read[0]}, ...) outside of these blocks: {outside:,} of"
            f" the module's {total:,} elements, which every stage would need. Let the block that owns them use"
            " them (a penalty on weights: weight_decay, or p.grad.add_(...) in on_before_optimizer_step), and call a"
            f" block by block(x), as its other methods pass its hooks by; or use {NO_PIPELINE}."
        )


def _ties(
    module: nn.Module, holders: Mapping[str, tuple[int, ...]], everywhere: tuple[str, ...], num_stages: int
) -> tuple[Tie, ...]:
    names = parameter_names(module)
    used = {parameter: set[int]() for parameter in names}
    for unit, stages in holders.items():
        for parameter in module.get_submodule(unit).parameters():
            used[parameter] |= set(stages)
    for name in everywhere:
        used[module.get_parameter(name)] |= set(range(num_stages))
    return tuple(
        Tie(group[0], group, tuple(sorted(used[each]))) for each, group in names.items() if len(used[each]) > 1
    )


def restore(
    module: nn.Module,
    absent: Mapping[str, int],
    group: dist.ProcessGroup,
    stage_rank: Sequence[int],
    before: Mapping[str, nn.Parameter],
) -> None:
    """Make the module whole on every rank of `group`: each absent tensor is received from its stage.

    `before` has the user's parameters, by each name: code may have kept the objects, and their classes count. Every
    rank of `group` calls this, with real plain tensors for its own stages.
    """
    named = module.named_buffers(remove_duplicate=False)
    # a cache that a block fills when it runs (rotary tables) has not the shape of before the cut
    buffers = {name: (buffer.shape, buffer.dtype) for name, buffer in named if name not in absent}
    everywhere = talk.gather((absent, buffers), group)
    stage_of = {name: stage for theirs, _ in everywhere for name, stage in theirs.items()}
    tensors = [*module.parameters(), *module.buffers()]
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    peers = Group(group)
    for name in sorted(stage_of):
        source = stage_rank[stage_of[name]]
        owner, leaf = place_of(module, name)
        if not hasattr(owner, leaf):  # code has removed a buffer on every rank: `prune.remove`
            continue
        tensor = getattr(owner, leaf)
        if name not in absent:
            peers.broadcast(tensor.detach().contiguous(), source)
            continue
        shape, dtype = everywhere[source][1].get(name) or (tensor.shape, tensor.dtype)
        data = peers.broadcast(torch.empty(shape, dtype=dtype, device=device), source)
        if not isinstance(tensor, nn.Parameter):
            own_buffers(owner)[leaf] = data
            continue
        own_parameters(owner)[leaf] = mine = before[name]
        mine.data, mine.requires_grad = data, tensor.requires_grad


def apply_split(module: nn.Module, split: PipelineSplit, my_stages: Sequence[int]) -> dict[str, int]:
    """Move parameters and buffers of units that none of `my_stages` owns to meta; returns their owners, by every name.

    Names, order, sharing and `requires_grad` stay, so `configure_optimizers` builds the same groups on every rank. An
    absent parameter never gets a gradient, so optimizers pass over it.
    """
    mine = set(my_stages)
    kept = {id(module.get_parameter(name)) for name in split.everywhere}
    for unit, stages in split.holders.items():
        if mine & set(stages):
            inner = module.get_submodule(unit)
            kept |= {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    replaced: dict[int, torch.Tensor] = {}
    absent: dict[str, int] = {}
    for unit, stages in split.holders.items():
        if mine & set(stages):
            continue
        for prefix, inner in module.get_submodule(unit).named_modules(prefix=unit):
            for tensors in (own_parameters(inner), own_buffers(inner)):
                for name, tensor in tensors.items():
                    # a sparse tensor (a graph) stays, since its placeholder would have no memory to share
                    if tensor is None or id(tensor) in kept or tensor.layout in PARTS_OF_SPARSE:
                        continue
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = absent_like(tensor)
                        kept.add(id(replaced[id(tensor)]))
                    tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]
                    absent[f"{prefix}.{name}"] = stages[0]
    return absent
