"""Warnings while a job trains: a slow rank, a loader that keeps it waiting, a loss that jumps or is no number.

Ranks leave notes on a board. Rank 0 reads those that are there, so that none waits. Each warning is given once.
"""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.torch_private import in_backward, in_transform, is_compiled
from lightning_3d.ranks.talk import StoreGone, bounded, job_store, place
from lightning_3d.sandbox.trees import leaves

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds for an answer of the store, which a healthy one gives in less than a millisecond."""
MOST = 64
"""Batches that are remembered."""


@dataclass
class BatchSums:
    """The loss of a batch, and the sum of each block's output, on the device until somebody asks."""

    number: int
    loss: Tensor | None = None
    blocks: dict[int, Tensor] = field(default_factory=dict)
    """Position of a block -> sum of its output, over all microbatches."""


class BlockSums:
    """Notes sums while it is attached. It reads nothing from the device before `losses` and `first_bad`.

    A sum is not finite where one element is not. So the first block with such a sum is where a NaN began.
    """

    def __init__(self, module: nn.Module) -> None:
        blocks = Anatomy.of(module).blocks
        self.blocks = [name for name in blocks if any(True for _ in module.get_submodule(name).parameters())]
        """Those with weights: an activation may be a hyperparameter too, which no checkpoint could save with a hook."""
        self.batches: deque[BatchSums] = deque(maxlen=MOST)
        self._now: BatchSums | None = None
        self._hooks: list[RemovableHandle] = []
        if any(is_compiled(each) or isinstance(each, ScriptModule) for each in module.modules()):
            self.blocks = []  # a hook would become a part of the compiled code, and TorchScript has none
        for position, name in enumerate(self.blocks):
            self._hooks.append(module.get_submodule(name).register_forward_hook(self._hook(position)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, number: int) -> None:
        self._now = BatchSums(number)
        self.batches.append(self._now)

    def end(self, loss: Tensor | None) -> None:
        if self._now is not None:
            self._now.loss, self._now = loss, None

    def losses(self) -> dict[int, float]:
        """Number of a batch -> loss. Waits for the device, once."""
        known = {batch.number: batch.loss for batch in self.batches if batch.loss is not None}
        if not known:
            return {}
        values = torch.stack([loss.detach().float().reshape(-1)[0] for loss in known.values()]).tolist()
        return dict(zip(known, values, strict=True))

    def first_bad(self, number: int) -> int | None:
        """Position of the first block of batch `number` with an output that is not finite."""
        batch = next(batch for batch in self.batches if batch.number == number)
        bad = (at for at, total in sorted(batch.blocks.items()) if not torch.isfinite(total))
        return next(bad, None)

    def _hook(self, position: int) -> Any:
        def note(block: nn.Module, args: Any, output: Any) -> None:
            if self._now is None or not torch.is_grad_enabled() or in_backward() or in_transform():
                return  # an evaluation, a block that runs again for its backward, or values that are not there yet
            tensor = next((leaf for leaf in leaves(output) if _is_plain(leaf)), None)
            if tensor is not None:
                total = tensor.detach().sum(dtype=torch.float32)
                earlier = self._now.blocks.get(position)
                self._now.blocks[position] = total if earlier is None else earlier + total

        return note


def _is_plain(leaf: Any) -> bool:
    """True for a tensor with values: subclasses stand for tensors of other ranks, or gather when they are read."""
    return type(leaf) is Tensor and not leaf.is_meta and leaf.is_floating_point()


class Board:
    """One note of each rank about its training, the latest that it wrote. Ranks make boards in the same order."""

    def __init__(self) -> None:
        self.rank, self.size = place()
        self._mine: Any = None
        self._store = job_store() if self.size > 1 else None
        self._key = ""
        if self._store is not None:
            run = self._ask(lambda store: store.add(f"lightning_3d/monitor/runs/{self.rank}", 1))
            self._key = f"lightning_3d/monitor/{run}"  # in the order of runs, so equal on all ranks

    def write(self, note: Any) -> None:
        """Replace the note of this rank. It holds what JSON holds."""
        self._mine = note
        self._ask(lambda store: store.set(f"{self._key}/{self.rank}", json.dumps(note)))

    def read(self) -> dict[int, Any]:
        """The notes of the ranks that have written one. Empty once the store is gone."""
        if self.size == 1:
            return {} if self._mine is None else {0: self._mine}
        return self._ask(self._all) or {}

    def _all(self, store: Any) -> dict[int, Any]:
        keys = {rank: f"{self._key}/{rank}" for rank in range(self.size)}
        if not store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        return {rank: json.loads(note) for rank, note in zip(keys, store.multi_get([*keys.values()]), strict=True)}

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """The answer of the store. It is not asked again once it is gone: the watchdog reports why."""
        store = self._store
        if store is None:
            return None
        try:
            return bounded(lambda: question(store), PATIENCE)
        except (RuntimeError, StoreGone):
            self._store = None
            return None


EXCHANGE_EVERY = 0.5
"""Least seconds between two looks at the board."""
SLOW, SLOW_LOOKS = 1.5, 3
"""A straggler works so many times as long as its peers, in so many looks one after the other."""
STALLED, STALL_LOOKS = 0.2, 3
"""A data stall takes this share of the time, in so many looks one after the other."""
LEAST_LOSSES, KEPT_LOSSES = 20, 200
"""A spike is compared with so many losses before it, and with the last of so many."""
JUMP = 10.0
"""A spike is so many mean deviations above the median."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """One rank about its last batches."""

    busy: float | None = None
    """Seconds of a batch in which it waited for no other rank; None where that is not known."""
    data_waiting: float = 0.0
    """Share of its time."""
    flops: int | None = None
    """Operations of a batch, once they are counted."""
    memory: int = 0
    experts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each mixture whose tokens travel the rows of the fullest expert of this rank in a batch, and of all."""
    bad: tuple[int, int, str] | None = None
    """Batch with the first loss that is not finite, position of the block where that began, and its name."""


class Watch:
    """The warnings of one run. `groups` has the pipeline rank of each rank: those of one have equal work."""

    def __init__(self, board: Board, places: dict[int, str], groups: dict[int, int], sums: BlockSums) -> None:
        self._board, self._places, self._groups, self._sums = board, places, groups, sums
        self._mine = Note()
        self._known: dict[int, Note] = {}
        self._looked = 0.0
        self._losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._read = -1
        """The last batch whose loss was read."""
        self._batch = -1
        self._slow: dict[int, int] = {}
        self._stalls = 0
        self._given: set[str] = set()

    def batch_ended(self, due: bool) -> None:
        """Read the losses of the last batches where it is time to."""
        self._batch += 1
        if self._mine.bad is not None and "nan" not in self._given and self._board.rank == 0:
            self._look()  # a batch later: the other ranks have noticed it too
            self._warn_of_nan()
        elif due or self._batch - self._read >= MOST:
            self._read_losses()

    def exchange(self, note: Note) -> dict[int, Note]:
        """Leave a note; return those of all ranks, on rank 0. Elsewhere only its own."""
        now, self._mine = time.monotonic(), replace(note, bad=self._mine.bad)
        if now - self._looked >= EXCHANGE_EVERY or not self._known:
            self._looked = now
            self._look()
            if self._board.rank == 0:
                self._warn_of_straggler()
                self._warn_of_stall()
        return {**self._known, self._board.rank: self._mine}

    def end(self, notes: dict[int, Note]) -> None:
        """Warn of what the last batches showed. `notes` are those of all ranks at the end."""
        self._known = notes
        self._warn_of_nan()

    def first_bad(self) -> tuple[int, int, str] | None:
        """The first loss of this rank that is not finite, once the last batches are read too."""
        self._read_losses()
        return self._mine.bad

    def _look(self) -> None:
        self._board.write(asdict(self._mine))
        if self._board.rank == 0:
            self._known = {rank: Note(**fields) for rank, fields in self._board.read().items()}

    # ---- losses --------------------------------------------------------------------------------------------------

    def _read_losses(self) -> None:
        fresh = {number: loss for number, loss in self._sums.losses().items() if number > self._read}
        self._read = self._batch
        for number, loss in fresh.items():
            if not math.isfinite(loss):
                if self._mine.bad is None:
                    position, blocks = self._sums.first_bad(number), self._sums.blocks
                    at = (len(blocks), "") if position is None else (position, blocks[position])
                    self._mine = replace(self._mine, bad=(number, *at))
                    self._board.write(asdict(self._mine))
                return
            self._check_jump(number, loss)
            self._losses.append(loss)

    def _check_jump(self, number: int, loss: float) -> None:
        if len(self._losses) < LEAST_LOSSES:
            return
        middle = median(self._losses)
        spread = sum(abs(each - middle) for each in self._losses) / len(self._losses)
        if loss - middle > max(JUMP * spread, 0.1 * abs(middle)):
            self._warn(
                "jump",
                f"The loss jumps to {loss:.4g} in batch {number} on rank {self._at(self._board.rank)}. The median of"
                f" the {len(self._losses)} batches before is {middle:.4g}. Look at that batch, clip gradients, or lower"
                " the learning rate.",
            )

    def _warn_of_nan(self) -> None:
        bad = {rank: note.bad for rank, note in self._known.items() if note.bad is not None}
        if not bad or self._board.rank != 0:
            return
        first = min(bad, key=lambda rank: (bad[rank][:2], rank))
        number, _, block = bad[first]
        if block:
            where = f"began on rank {self._at(first)}, in the output of block {block}"
        else:
            where = f"began on rank {self._at(first)} outside of the blocks: their outputs are finite, or not known"
        self._warn(
            "nan",
            f"The loss of batch {number} is not a finite number. This {where}. If it is the first block and the batch"
            " is sound, the weights were not finite before: the gradient of the batch before it was not.",
        )

    # ---- slow ranks ----------------------------------------------------------------------------------------------

    def _warn_of_straggler(self) -> None:
        for rank, note in self._known.items():
            peers = [
                other.busy
                for at, other in self._known.items()
                if at != rank and self._groups[at] == self._groups[rank] and other.busy is not None
            ]
            slow = note.busy is not None and bool(peers) and note.busy > SLOW * median(peers)
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] >= SLOW_LOOKS and note.busy is not None:
                self._warn(
                    "straggler",
                    f"Rank {self._at(rank)} works {note.busy:.3g} s on a batch, and its peers {median(peers):.3g} s."
                    " They wait for it. Look at its machine: other processes, clocks, its disk.",
                )

    def _warn_of_stall(self) -> None:
        rank = max(self._known, key=lambda each: self._known[each].data_waiting)
        share = self._known[rank].data_waiting
        self._stalls = self._stalls + 1 if share > STALLED else 0
        if self._stalls >= STALL_LOOKS:
            self._warn(
                "stall",
                f"Rank {self._at(rank)} waits {share:.0%} of the time for its data. Give the DataLoader more"
                " num_workers, or a larger prefetch_factor.",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(text, stacklevel=2)

    def _at(self, rank: int) -> str:
        return f"{rank} ({self._places[rank]})"
