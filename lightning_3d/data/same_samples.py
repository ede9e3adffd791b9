"""`SampleCheck`: a comparison of the first batches of tensor and pipeline peers, which work on the same samples.

`seed_workers_by_data_rank` gives their dataloader workers the same seeds.
"""

import os
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.group import Group
from lightning_3d.errors import DivergenceError, UnsupportedError
from lightning_3d.layout import DATA_AXIS, Coordinate, Layout
from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.ranks import agreement, random_streams, talk
from lightning_3d.sandbox.first_batch import STEPS, FirstBatch, holders

BATCHES = 2
"""Number of batches compared of each kind of step: of training in each epoch, else in each run over a loader."""
SEED = (
    "Where data is made, split or augmented at random, call seed_everything(1, workers=True) first; do not shuffle or"
    " shard by global rank, but by trainer.distributed_sampler_kwargs. torch.empty draws too: use torch.zeros."
)

_APART = (
    "random numbers of torch, Python or numpy are not the same on the ranks of data rank {}, which work on the same"
    " samples, as after torch.manual_seed(trainer.global_rank). Dropout would have other masks on each, and blocks that"
    " are left out at random would wait for each other. From now on all of them draw as the first rank does. Draw on"
    " every rank, and seed by trainer.strategy.data_parallel_rank."
)


def seed_workers_by_data_rank(dataloader: object, data_rank: int) -> None:
    """Under `seed_everything(workers=True)` seed dataloader workers by data rank.

    Lightning would seed them by global rank, so that tensor and pipeline peers augment the same sample differently.
    """
    wanted = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if wanted and getattr(dataloader, "worker_init_fn", False) is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)  # type: ignore[attr-defined]


def refuse_other_shares(dataloader: object, ranks: int, rank: int) -> None:
    """Refuse data that divide themselves for another number of ranks, as litData's do by WORLD_SIZE."""
    given = getattr(dataloader, "dataset", None)
    for data in holders([given]):  # a dataset of datasets, or what a subset is of
        own = getattr(data, "distributed_env", None) if data is given else vars(data).get("distributed_env")
        theirs = getattr(own, "world_size", ranks), getattr(own, "global_rank", rank)
        if theirs != (ranks, rank):
            raise UnsupportedError(  # on all ranks: the number is another one for each of them
                f"{type(data).__name__} has the samples of rank {theirs[1]} of {theirs[0]}, and this is data"
                f" rank {rank} of {ranks}. Samples would be left out or used twice. Make the data in train_dataloader,"
                " and set there for each of them, with dist = torch.distributed: data.distributed_env ="
                " type(data.distributed_env)(dist.get_world_size(), dist.get_rank(), 1)."
            )


class SampleCheck(StepCheck):
    """Compares the first batches of the peers of one data rank, and their random streams less and less often later.

    Peers only: another data rank may be at another batch. Data ranks compare one, where equal batches are the doubt.
    """

    def __init__(
        self, layout: Layout, coordinate: Coordinate, mesh: DeviceMesh, device: torch.device, trainer: Trainer
    ) -> None:
        self.layout, self.coordinate, self.device, self.trainer = layout, coordinate, device, trainer
        self.peers = [mesh.get_group(axis) for axis in layout.peer_axes]
        self.groups = [Group(ranks) for ranks in self.peers]
        self.alone = all(group.silent for group in self.groups)
        self.others = Group(mesh.get_group(DATA_AXIS))
        self.unread = not self.others.silent
        self.seen: Counter[str] = Counter()
        self.epoch = 0
        self.evaluation: object = None
        self.differing: set[str] = set()
        self.apart = False
        """True once the peers' random streams differed: they are compared before each batch then."""

    def before_train(self, args: Args) -> None:
        """Raise on every peer if they were given different batches. Collective over them.

        Repeated in each epoch, and after each evaluation: a callback may draw from the main random stream on one rank
        only, for example for a plot. The next order of that rank then differs.
        """
        if self.trainer.current_epoch != self.epoch:
            self.epoch, self.seen["training_step"] = self.trainer.current_epoch, 0
        if (difference := self._difference("training_step", args)) is not None:
            raise DivergenceError(difference)
        if self.unread:
            self.unread = False
            self._compare_data_ranks(args[0])

    def _compare_data_ranks(self, batch: Any) -> None:
        """Warn where all data ranks have one batch. Collective over them."""
        leaves = {name: leaf for name, leaf in named_leaves(batch, "batch") if type(leaf) is Tensor}
        if talk.all_equal(leaf_checksums(leaves), self.others.ranks) and leaves and self.trainer.is_global_zero:
            warnings.warn(
                f"the first batches of all {self.others.size} data ranks are equal. If the data do not repeat one"
                f" sample, each step trains on {self.others.size} copies of one batch, also in DDP: a stream, or a"
                " sampler of your own, divides nothing by itself. In train_dataloader, divide its samples by"
                " **self.trainer.distributed_sampler_kwargs (num_replicas and rank).",
                stacklevel=2,
            )

    def before_evaluate(self, name: str, args: Args, evaluation: int) -> Args:
        """`args`, or those of the first peer where they were given different batches. Collective over the peers.

        Different data on each process does no harm in evaluation. Repeated in each run over a loader.
        """
        loader = args[2:]  # after batch and batch_idx: its index, where there are several
        if (evaluation, loader) != self.evaluation:
            self.evaluation, self.seen = (evaluation, loader), Counter()
        if name not in self.differing:
            difference = self._difference(name, args)
            if difference is None:
                return args
            self.differing.add(name)
            warnings.warn(f"{difference} From now on all of them use the batches of the first rank.", stacklevel=2)
        args = move_data_to_device(args, torch.device("cpu"))
        for group in self.groups:
            args = talk.from_first(lambda value=args: value, group.ranks)  # type: ignore[misc]
        return move_data_to_device(args, self.device)

    def _difference(self, step: str, batch: Any) -> str | None:
        """Describe which peers have which of the first batches; None if they are equal."""
        seen, self.seen[step] = self.seen[step], self.seen[step] + 1
        if self.alone:
            return None
        if step == "training_step" and (self.apart or seen & (seen + 1) == 0):  # batches 0, 1, 3, 7 and so on
            self._compare_streams()
        if seen >= BATCHES:
            return None
        table = torch.tensor([checksum(batch)], device=self.device)
        for group in self.groups:
            table = group.all_rows(table).view(-1)
        marks = table.tolist()
        return None if len(set(marks)) == 1 else self._describe(step, marks)

    def _compare_streams(self) -> None:
        """Let all peers draw as the first one does. Blocks left out at random (LayerDrop) would wait for each other."""
        drawn = [zlib.crc32(talk.pickled(random_streams.main_streams()))]
        for ranks in self.peers:  # between hosts: a later step waits for no device
            drawn = [mark for marks in talk.gather(drawn, ranks) for mark in marks]
        if len(set(drawn)) == 1:
            return
        random_streams.share_random_state(self.peers)
        if not self.apart and not any(group.rank for group in self.groups):
            warnings.warn(_APART.format(self.coordinate.data), stacklevel=2)
        self.apart = True

    def _describe(self, step: str, marks: list[int]) -> str:
        data = self.coordinate.data
        ranks: dict[int, list[int]] = {}
        for rank, mark in zip(self.layout.peers_of(data), marks, strict=True):
            ranks.setdefault(mark, []).append(rank)
        sets = " | ".join(", ".join(map(str, same)) for same in ranks.values())
        return (
            f"batch {self.seen[step] - 1} of {step} is not the same on the ranks of data rank {data}, which work on the"
            f" same samples (equal on: {sets}). {SEED}"
        )


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text in `value`, in order, with the expression that finds it."""
    if isinstance(value, Tensor | str | int | float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield from named_leaves(getattr(value, field), f"{name}.{field}")
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for index, item in enumerate(value):
            yield from named_leaves(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from named_leaves(getattr(value, each.name, None), f"{name}.{each.name}")


def leaf_checksums(batch: Any) -> dict[str, tuple[str, int]]:
    """The kind of each tensor, number and text in `batch`, and a number that depends on its value."""
    return {name: (_kind(leaf), zlib.crc32(_bytes(leaf))) for name, leaf in named_leaves(batch, "batch")}


def checksum(batch: Any) -> int:
    """A number that depends on every tensor, number and text in `batch`, in order."""
    return zlib.crc32(repr(leaf_checksums(batch)).encode())


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def _bytes(leaf: Any) -> bytes | memoryview:
    """The bytes of a leaf: equal for equal leaves."""
    if not isinstance(leaf, Tensor):
        return repr(leaf).encode()
    if leaf.layout != torch.strided:
        return repr((leaf.shape, leaf.dtype)).encode()
    try:
        leaf.detach().clone() if type(leaf).clone is not Tensor.clone else None
    except Exception as error:  # of that class
        raise UnsupportedError(
            f"The batch has a {type(leaf).__name__}, a class of tensors whose own `clone` fails behind `detach`."
            " Tensor, pipeline and context ranks exchange plain tensors, which lose what that class keeps."
            " Use data ranks alone, with any zero_stage."
        ) from error
    plain = leaf.detach().cpu().resolve_conj().resolve_neg()  # a lazy view has no bytes of its own
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().data


Marks = dict[str, tuple[str, int]]
"""Name of a leaf of a batch -> its kind and a number that depends on its values."""


def compare_first_batch(first: FirstBatch, layout: Layout) -> None:
    """Raise on every rank if peers would train on different first batches. Collective over all ranks.

    Evaluation uses the first peer's data instead (`SampleCheck.before_evaluate`). Else a proof would blame the module.
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


_NUMBERS = ("world_size", "device_ids", "num_devices", "global_rank")
_ASKED = {getattr(Trainer, name).fget.__code__: name for name in _NUMBERS}
_ASKED[LightningModule.global_rank.fget.__code__] = "global_rank"  # type: ignore[attr-defined]


def code_that_asks(asker: FrameType) -> str | None:
    """The method of a datamodule, or the hook of a module, around `asker`, and the number that it reads."""
    frame: FrameType | None = asker
    asked = ""
    while frame is not None and frame.f_code in _ASKED:
        asked, frame = _ASKED[frame.f_code], frame.f_back
    if not asked or frame is None or frame.f_globals["__name__"].startswith("lightning."):
        return None
    # steps also ask if there are several devices: for `sync_dist`
    steps = STEPS.values() if asked in ("world_size", "global_rank") else ()
    hooks = {"setup", "configure_optimizers", "on_fit_start", "on_train_start", *steps}
    while frame is not None:
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        counts = isinstance(owner, LightningModule) and (name.endswith("_dataloader") or name in hooks)
        if counts or isinstance(owner, LightningDataModule):
            return f"{type(owner).__name__}.{name} reads trainer.{asked}"
        frame = frame.f_back
    return None
