"""Torch's own schedules as lists of actions: the one place that touches their private parts (read in torch 2.13)."""

import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_3d.errors import LayoutError
from lightning_3d.layout import SCHEDULES, stage_ranks


class Action(NamedTuple):
    kind: str
    """F forward, B backward, I and W its halves (for inputs, for weights), SEND_F, RECV_F, SEND_B, RECV_B."""
    stage: int
    microbatch: int


def stages_per_rank(schedule: str, asked: int = 1) -> int:
    """Stages of a rank under `schedule`: two for the V-shaped ones, one for `gpipe` and `1f1b`."""
    own = SCHEDULES[schedule].stages_per_rank
    if own is None:
        return asked
    if asked not in (1, own):
        free = [name for name, facts in SCHEDULES.items() if facts.stages_per_rank is None]
        raise LayoutError(
            f"schedule={schedule!r} places {own} stage{'s' * (own > 1)} on a rank, not stages_per_rank={asked}. Use"
            f" {', '.join(free[:-1])} or {free[-1]}."
        )
    return own


@lru_cache(maxsize=64)
def actions(
    order_name: str, schedule: str, ranks: int, per_rank: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in one step, in order, sends and receives included.

    `order_name` is `schedule`, or "fill_and_drain" for all forwards and then all backwards in its placement. Where
    torch's schedule does not exist for so few or so uneven microbatches, that is run too: the numbers are the same.
    """
    try:
        if order_name == "fill_and_drain":
            order = _fill_and_drain(schedule, ranks, per_rank, microbatches)
        else:
            order = _compute_order(schedule, ranks, per_rank, microbatches)
    except ValueError as error:
        if microbatches > 1:
            warnings.warn(
                f"schedule={schedule!r} does not take {microbatches} microbatches ({error}) Steps of that many run all"
                " forwards, then all backwards.",
                stacklevel=2,
            )
        order = _fill_and_drain(schedule, ranks, per_rank, microbatches)
    return lower(order, stage_ranks(schedule, ranks, per_rank))


@lru_cache(maxsize=64)
def forwards(schedule: str, ranks: int, per_rank: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in an evaluation: forwards of all microbatches, stage after stage."""
    placement = stage_ranks(schedule, ranks, per_rank)
    return lower(_fill(placement, ranks, microbatches), placement)


def lower(order: dict[int, list[Any]], placement: tuple[int, ...]) -> tuple[tuple[Action, ...], ...]:
    """Torch's lowering: sends and receives put where they cannot wait for each other in a circle."""
    lowered = torch_schedules._add_send_recv(
        {rank: list(compute) for rank, compute in order.items()}, lambda stage: placement[stage], len(placement)
    )
    return tuple(tuple(map(_plain, lowered[rank])) for rank in sorted(lowered))


def _plain(action: Any) -> Action:
    return Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def _compute_order(schedule: str, ranks: int, per_rank: int, microbatches: int) -> dict[int, list[Any]]:
    facts = SCHEDULES[schedule]
    if facts.torch_class is None:
        return {rank: _one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    cls: Any = getattr(torch_schedules, facts.torch_class)
    if facts.stages_per_rank == 1:
        made = cls(_stage(0, ranks, ranks), microbatches, scale_grads=False)
    else:
        stages = [_stage(index, ranks, ranks * per_rank) for index in range(per_rank)]
        made = cls(stages, microbatches, scale_grads=False)
    return {rank: list(_computations(order)) for rank, order in made.pipeline_order.items()}


def _computations(order: list[Any]) -> Iterator[Any]:
    """Forwards and backwards one by one: torch sends what an overlapped pair gives only when both are through."""
    for action in order:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.value in ("F", "B", "I", "W"):
                yield part


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Any]:
    """1F1B by hand: the order that torch's own class prints leaves out microbatch 0 on the last rank (torch 2.13)."""
    make, kinds = torch_schedules._Action, torch_schedules._ComputationType
    ahead = min(microbatches, ranks - 1 - rank)
    order = [make(rank, kinds.FORWARD, index) for index in range(ahead)]
    for index in range(microbatches):
        if ahead + index < microbatches:
            order.append(make(rank, kinds.FORWARD, ahead + index))
        order.append(make(rank, kinds.FULL_BACKWARD, index))
    return order


def _stage(index: int, ranks: int, stages: int) -> Any:
    """The attributes of a stage that a schedule reads to compute its order."""
    return SimpleNamespace(
        num_stages=stages, group_size=ranks, group_rank=0, stage_index=index, is_first=index == 0,
        is_last=index == stages - 1, has_backward=True, submod=nn.Identity(), stage_index_to_group_rank={},
    )  # fmt: skip


def _fill_and_drain(schedule: str, ranks: int, per_rank: int, microbatches: int) -> dict[int, list[Any]]:
    placement = stage_ranks(schedule, ranks, per_rank)
    make, kinds = torch_schedules._Action, torch_schedules._ComputationType
    order = _fill(placement, ranks, microbatches)
    for stage, rank in reversed(list(enumerate(placement))):
        order[rank] += [make(stage, kinds.FULL_BACKWARD, index) for index in range(microbatches)]
    return order


def _fill(placement: tuple[int, ...], ranks: int, microbatches: int) -> dict[int, list[Any]]:
    make, kinds = torch_schedules._Action, torch_schedules._ComputationType
    order: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
    for stage, rank in enumerate(placement):
        order[rank] += [make(stage, kinds.FORWARD, index) for index in range(microbatches)]
    return order
