"""What is one rank's alone and makes a resumed run draw, round and read as the uninterrupted one would have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.stored import materialize
from lightning_3d.communication import Communication
from lightning_3d.data import fingerprint
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.randomness import StepRandom, main_streams, set_main_streams

Own = Mapping[str, Any]


def own_state(
    layout: Layout,
    coordinate: Coordinate,
    step_random: StepRandom,
    communication: Communication,
    places: Any,
    loaders: Any,
    shares_order: bool,
) -> dict[str, Any]:
    """Random streams, what compression left over and where the data is, to be saved for this rank.

    Args:
        shares_order: whether samples are dealt out in an order that several data ranks share.
    """
    leads = coordinate.tensor == coordinate.pipeline == 0
    return {
        "layout": repr(layout),
        "data": [coordinate.data, layout.data_parallel_size],
        "streams": main_streams(),
        "cuda": torch.cuda.get_rng_state(step_random.device) if step_random.device.type == "cuda" else None,
        "step": list(step_random.states),
        "communication": communication.state_dict(),
        "places": places if leads else None,  # the same on all ranks of a data rank
        "loaders": loaders if leads else [],
        "shares_order": shares_order,
    }


@dataclass(frozen=True)
class Found:
    """What was saved for a rank that is in this place now."""

    same: Own | None = None
    """Of the very rank, if the layout is the same."""
    data: Own | None = None
    """Of the first rank of its data rank, or else of data rank 0; None where nothing was saved."""
    same_data_ranks: bool = False
    loaders: list[Any] = field(default_factory=list)
    """States of the user's stateful dataloaders."""

    @property
    def shares_order(self) -> bool:
        """Whether the run dealt out samples in an order that several data ranks share."""
        return self.data is not None and bool(self.data["shares_order"])

    @property
    def places(self) -> Any:
        """Where each dataloader was; None where that was not saved, or it was between epochs."""
        return None if self.data is None else self.data["places"]


def find_own(states: Sequence[Own], layout: Layout, coordinate: Coordinate) -> Found:
    """Which of the states of all ranks that were saved concern the rank at `coordinate`."""
    leaders: dict[int, Own] = {}
    for state in states:
        if "data" in state:
            leaders.setdefault(state["data"][0], state)
    if not leaders:
        return Found()
    rank, ranks = layout.rank(coordinate), len(leaders)
    same = len(states) > rank and states[rank]["layout"] == repr(layout)
    data = materialize(leaders.get(coordinate.data, leaders[0]))
    return Found(
        same=materialize(states[rank]) if same else None,
        data=data,
        same_data_ranks=ranks == layout.data_parallel_size,
        loaders=data["loaders"] if ranks == layout.data_parallel_size else _one_for_all(leaders),
    )


def _one_for_all(leaders: Mapping[int, Own]) -> list[Any]:
    """The states of stateful dataloaders for another number of data ranks."""
    states = [materialize(state["loaders"]) for state in leaders.values()]
    if len({fingerprint(state) for state in states}) == 1:
        return list(states[0])
    rank_zero_warn(
        f"The dataloaders have a state of their own on each of {len(states)} data ranks, which cannot be dealt out to"
        " another number: they start the epoch over. To avoid that, have their state be the same on all ranks (samples"
        " read by all of them together, say), or resume with as many data ranks."
    )
    return []


def restore_own(found: Found, step_random: StepRandom, communication: Communication) -> None:
    """Go on with the random streams of this data rank, and in the same layout with what compression left over."""
    state = found.same or found.data
    if state is None:
        return
    try:
        set_main_streams(state["streams"])
        if state["cuda"] is not None and step_random.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], step_random.device)
        if found.same_data_ranks and len(state["step"]) == len(step_random.states):
            step_random.states = list(state["step"])
        if found.same is not None:
            communication.load_state_dict(state["communication"])
        elif any(state["communication"]["compressions"]):
            rank_zero_warn(
                "What grad_compression had left over when this checkpoint was saved belongs to ranks of another layout:"
                " it starts at zero again, and one step's rounding is lost. Resume in the same layout to keep it."
            )
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random states of this rank cannot be taken up: {error}") from error
