"""The rank-local part of a checkpoint: random streams, error feedback of compressed gradients, position in the data.

A resumed run draws the same random numbers, rounds in the same way and reads the same samples as an uninterrupted one.
Error feedback belongs to the layout that it was computed in: after a change of layout or codec it starts at zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.stored import read_tensors
from lightning_3d.data.same_samples import checksum
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.ranks.random_streams import StepRandom, main_streams, set_streams
from lightning_3d.zero.data_axis import DataAxis

RankState = Mapping[str, Any]
"""The entry of one rank in a checkpoint, as `rank_state` returned it."""


def sending(axis: DataAxis, scale: float) -> dict[str, Any]:
    """Return the codec of compressed gradients, the ranks that encode, and the loss scale, which multiplies too."""
    return {"codec": axis.config.grad_compression, "sync": axis.config.grad_sync, "scale": scale}


def rank_state(
    layout: Layout,
    coordinate: Coordinate,
    step_random: StepRandom,
    axis: DataAxis,
    scale: float,
    places: Any,
    loaders: Any,
    shares_order: bool,
) -> dict[str, Any]:
    """Return this rank's random streams, error feedback and position in the data, to be saved. `shares_order` is True
    where several data ranks deal out samples of one order.
    """
    return {
        "layout": repr(layout),
        "data": [coordinate.data, layout.data_parallel_size],
        "streams": main_streams(),
        "step": dict(step_random.states),
        "communication": axis.state_dict(),
        "sending": sending(axis, scale),
        "places": places if coordinate.leads else None,  # equal on all ranks of a data rank
        "loaders": loaders if coordinate.leads else [],
        "shares_order": shares_order,
    }


@dataclass(frozen=True)
class FoundState:
    """The rank-local states of a checkpoint that concern one rank of this run."""

    same: RankState | None = None
    """Of the same rank, if the layout is the same."""
    data: RankState | None = None
    """Of the first rank of the same data rank, else of data rank 0. None where the checkpoint has no such states."""
    compressed: bool = False
    """True where some rank saved error feedback."""
    same_data_ranks: bool = False
    """True where the number of data ranks is the same."""
    loaders: list[Any] = field(default_factory=list)
    """States of the user's stateful dataloaders."""

    @property
    def shares_order(self) -> bool:
        """True where several data ranks shared one order of samples."""
        return self.data is not None and bool(self.data["shares_order"])

    @property
    def places(self) -> Any:
        """Position of each dataloader. None where it was not saved, or was between epochs."""
        return None if self.data is None else self.data["places"]


def find_state(states: Sequence[RankState], layout: Layout, coordinate: Coordinate) -> FoundState:
    """Choose among the saved states of all ranks those that concern the rank at `coordinate`."""
    leaders: dict[int, RankState] = {}
    for state in states:
        if "data" in state:
            leaders.setdefault(state["data"][0], state)
    if not leaders:
        return FoundState()
    rank, ranks = layout.rank(coordinate), len(leaders)
    same = len(states) > rank and states[rank]["layout"] == repr(layout)
    leader = leaders.get(coordinate.data, leaders[0])
    data = read_tensors({key: value for key, value in leader.items() if key != "communication"})
    return FoundState(
        same=read_tensors(states[rank]) if same else None,
        data=data,
        compressed=any(any(state["communication"]["compressions"]) for state in states),
        same_data_ranks=ranks == layout.data_parallel_size,
        loaders=data["loaders"] if ranks == layout.data_parallel_size else _common_loaders(leaders),
    )


def _common_loaders(leaders: Mapping[int, RankState]) -> list[Any]:
    """Return the states of stateful dataloaders for another number of data ranks: they must be equal on all ranks."""
    states = [read_tensors(state["loaders"]) for state in leaders.values()]
    if len({checksum(state) for state in states}) == 1:
        return list(states[0])
    rank_zero_warn(
        f"The dataloaders have a different state on each of {len(states)} data ranks. These states cannot be divided"
        " over another number of ranks, so the epoch starts again. To avoid this, resume with as many data ranks, or"
        " use a dataloader whose state is equal on all ranks."
    )
    return []


def restore_state(found: FoundState, step_random: StepRandom, axis: DataAxis, scale: float) -> None:
    """Restore the random streams of this data rank, and in the same layout its error feedback."""
    state = found.same or found.data
    if state is None:
        return
    try:
        set_streams(state["streams"])
        if found.same_data_ranks and state["step"].keys() == step_random.states.keys():
            step_random.states = dict(state["step"])
        if found.same is not None and found.same["sending"] == sending(axis, scale):
            axis.load_state_dict(found.same["communication"])
        elif found.compressed:
            rank_zero_warn(
                "The checkpoint has error feedback of grad_compression from another layout, codec, grad_sync or loss"
                " scale. It starts at zero: the rounding of one step is lost. Resume with the same settings."
            )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The rank-local state (random streams, error feedback of compression) cannot be restored: {error}"
        ) from error
