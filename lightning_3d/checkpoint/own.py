"""What is one rank's alone and makes a resumed run draw, round and read as the uninterrupted one would have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.leftovers import Leftovers, Sending
from lightning_3d.checkpoint.stored import materialize
from lightning_3d.data.same_samples import fingerprint
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.ranks.random_streams import StepRandom, main_streams, set_main_streams
from lightning_3d.zero.data_axis import DataAxis

Own = Mapping[str, Any]


def own_state(
    layout: Layout,
    coordinate: Coordinate,
    step_random: StepRandom,
    communication: DataAxis,
    sending: Sending,
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
        "sending": sending.plain(),
        "places": places if leads else None,  # the same on all ranks of a data rank
        "loaders": loaders if leads else [],
        "shares_order": shares_order,
    }


@dataclass(frozen=True)
class Found:
    """What was saved for a rank that is in this place now."""

    same: Own | None = None
    """Of the very rank, if the layout is the same."""
    everyone: Sequence[Own] = ()
    """Of all ranks, tensors perhaps still on disk."""
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


def find_own_state(states: Sequence[Own], layout: Layout, coordinate: Coordinate) -> Found:
    """Which of the states of all ranks that were saved concern the rank at `coordinate`."""
    leaders: dict[int, Own] = {}
    for state in states:
        if "data" in state:
            leaders.setdefault(state["data"][0], state)
    if not leaders:
        return Found()
    rank, ranks = layout.rank(coordinate), len(leaders)
    same = len(states) > rank and states[rank]["layout"] == repr(layout)
    leader = leaders.get(coordinate.data, leaders[0])
    data = materialize({key: value for key, value in leader.items() if key != "communication"})
    return Found(
        same=materialize(states[rank]) if same else None,
        everyone=states,
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


def restore_own(found: Found, step_random: StepRandom, communication: DataAxis, sending: Sending) -> None:
    """Go on with the random streams of this data rank, and with what compression left over."""
    state = found.same or found.data
    if state is None:
        return
    try:
        set_main_streams(state["streams"])
        if state["cuda"] is not None and step_random.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], step_random.device)
        if found.same_data_ranks and len(state["step"]) == len(step_random.states):
            step_random.states = list(state["step"])
        if found.same is not None and sending.was(found.same):
            communication.load_state_dict(found.same["communication"])
        elif any(any(each["communication"]["compressions"]) for each in found.everyone):
            _take_over(found.everyone, sending)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"what is this rank's own (random states, leftovers of compression) cannot be taken up: {error}"
        ) from error


def _take_over(states: Sequence[Own], sending: Sending) -> None:
    leftovers = Leftovers.find(states)
    if leftovers is not None and sending.compressions:
        leftovers.hand_out(sending)
        return
    reason, remedy = (
        ("belongs to ranks of another layout", "Resume in the same layout to keep it.")
        if leftovers is None
        else ("has nowhere to go: no gradients are compressed here", "Resume with grad_compression to keep it.")
    )
    rank_zero_warn(
        f"What grad_compression had left over when this checkpoint was saved {reason}: it starts at zero again, and one"
        f" step's rounding is lost. {remedy}"
    )
