"""Compares the first batches of tensor and pipeline peers, before set-up uses one."""

from collections.abc import Mapping

from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.data.same_samples import SEED, leaf_checksums
from lightning_3d.errors import DivergenceError
from lightning_3d.layout import Layout
from lightning_3d.ranks import agreement, talk
from lightning_3d.sandbox.first_batch import FirstBatch

Marks = dict[str, tuple[str, int]]
"""Name of a leaf of a batch -> its kind and a number that depends on its values."""


def compare_first_batch(first: FirstBatch, layout: Layout) -> None:
    """Raise on every rank if peers would train on different first batches. Collective over all ranks.

    Evaluation uses the first peer's data instead (`SampleCheck.first_peers_batch`). A proof that runs on different data
    would blame the module.
    """
    trainer = first.trainer
    if layout.peers == 1 or trainer.state.fn != TrainerFn.FITTING:
        return
    batches = talk.gather(_marks_of(first))
    everyone: dict[int, dict[int, Marks | None]] = {}
    for rank, marks in enumerate(batches):
        everyone.setdefault(layout.coordinate(rank).data, {})[rank] = marks
    own = layout.coordinate(trainer.global_rank).data
    for data in (own, *(other for other in everyone if other != own)):
        peers = everyone[data]
        read = {rank: marks for rank, marks in peers.items() if marks is not None}
        if len(read) == len(peers) and (difference := _difference_between(read)) is not None:
            raise DivergenceError(
                f"batch 0 of training_step is not the same on the ranks of data rank {data}, which work on the same"
                f" samples: {difference}. Most often each process drew its own data. {SEED}"
            )


def _marks_of(first: FirstBatch) -> Marks | None:
    """None where reading fails: the step that reads it raises then."""
    try:
        return leaf_checksums(first())
    except Exception as error:
        agreement.raise_if_alone(error)
        return None


def _difference_between(marks: Mapping[int, Marks]) -> str | None:
    """The first leaf that differs between ranks, with its kinds; None where all are equal."""
    names = list(dict.fromkeys(name for each in marks.values() for name in each))
    differing = [name for name in names if len({each.get(name) for each in marks.values()}) > 1]
    if not differing:
        return None
    ranks: dict[tuple[str, int] | None, list[str]] = {}
    for rank, each in marks.items():
        ranks.setdefault(each.get(differing[0]), []).append(str(rank))
    kinds = [mark[0] if mark else "absent" for mark in ranks]
    how = f"has other values ({kinds[0]})" if len(set(kinds)) == 1 else f"is {' | '.join(kinds)}"
    more = f"; so do {len(differing) - 1} more of its {len(names)} parts" if len(differing) > 1 else ""
    return f"{differing[0]} {how} (equal on: {' | '.join(', '.join(same) for same in ranks.values())}){more}"
