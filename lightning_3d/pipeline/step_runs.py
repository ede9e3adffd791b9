"""Runs of a step ahead of training: what they give, what they write, and the division of them among peers.

Tensor and pipeline peers have equal modules and equal samples until the module is cut (`data.same_samples` compares the
samples). All of them would make the same runs.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric, MetricCollection

from lightning_3d.axes.group import Group
from lightning_3d.errors import NO_PIPELINE, Lightning3DError, UnsupportedError
from lightning_3d.module.torch_private import own_buffers
from lightning_3d.module.undo import UndoStack, replaced_attributes
from lightning_3d.pipeline.across_samples import NoteOperations
from lightning_3d.pipeline.gates import Gates
from lightning_3d.pipeline.loss_mean import Arrays, Runs, StepResult, step_result, trained_in, training_only
from lightning_3d.pipeline.microbatch import NORMS
from lightning_3d.pipeline.observe import UncutRun, called, run_step
from lightning_3d.ranks import agreement, talk
from lightning_3d.ranks.random_streams import drawn_since_restart
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.fingerprint import fingerprint
from lightning_3d.sandbox.first_batch import following, second_step
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record, logged_numbers
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.snapshot import Changes, Watched, changed, isolated, isolated_buffers, marks, open_buffers
from lightning_3d.sandbox.trees import leaves, loss_of
from lightning_3d.sandbox.trial import holders, kept_by, shared_spaces, trial
from lightning_3d.sandbox.writes import check_places

Kind = Literal["attribute", "buffer", "new buffer", "block", "buffer of a block", "object"]
"""Of the module itself; around blocks, the second registered by the step; inside of one; of an object around blocks."""

T = TypeVar("T")


class Place(NamedTuple):
    """Something that a step writes."""

    name: str
    kind: Kind
    unit: str | None = None
    """The block that has it."""


Written = Mapping[Place, str]
"""By place, a print of what a step wrote there."""


class StateWatch:
    """Notes what a step writes into buffers, attributes, objects, classes and files from now on.

    Batch norms and metrics are left out.
    """

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        self.module = module
        self.parameters = {name: id(item) for name, item in module.named_parameters()}
        self.inside = {id(each): unit for unit in units for each in holders(module.get_submodule(unit).modules())}
        metrics = [each for each in module.modules() if isinstance(each, Metric | MetricCollection)]
        passed = {id(inner) for each in metrics for inner in each.modules()}
        self.owners = {name: each for name, each in module.named_modules() if id(each) not in passed}
        self.watched = [(each, Watched(each)) for each in holders(module.modules()) if id(each) not in passed]
        self.watched += [(each, Watched(each, kept_by)) for each in shared_spaces(self.owners.values())]
        named = [name for name, each in self._buffers().items() if not isinstance(each, NORMS)]
        self.before = marks(module, named)
        self.known = {name for name, _ in module.named_buffers()}
        self.arrays: dict[str, Arrays] = {}

    def _buffers(self) -> dict[str, nn.Module]:
        """The owner of each buffer, by the buffer's name."""
        pairs = (
            (f"{name}.{leaf}" if name else leaf, each)
            for name, each in self.owners.items()
            for leaf in own_buffers(each)
        )
        return dict(pairs)

    def written(self) -> Written:
        """The places that have changed. Raises where a parameter is another one now."""
        check_places(self.module, self.parameters)
        found: dict[Place, str] = {}
        owners, buffers = self._buffers(), dict(self.module.named_buffers())
        for name in (*changed(self.module, self.before), *(name for name in buffers if name not in self.known)):
            unit = self.inside.get(id(owners.get(name)))
            around: Kind = "buffer" if name in self.known else "new buffer"
            found[Place(name, around if unit is None else "buffer of a block", unit)] = _print(buffers.get(name))
        names = {id(each): name for name, each in self.owners.items()}
        for holder, watched in self.watched:
            unit = self.inside.get(id(holder))
            kind: Kind = "block" if unit is not None else "attribute" if holder is self.module else "object"
            prefix = names.get(id(holder), getattr(holder, "__name__", type(holder).__name__))
            for path, change in watched.changes().items():
                place = Place(f"{prefix}.{path[0]}" if prefix else str(path[0]), kind, unit)
                found[place] = found.get(place, "") + _print((path, change))
                if kind == "attribute":
                    arrays = [each for each in leaves(change) if isinstance(each, Tensor | np.ndarray) and each.ndim]
                    own = ((tuple(each.shape), _mean(each)) for each in arrays)
                    self.arrays[place.name] = (*self.arrays.get(place.name, ()), *own)
        return found


def _print(value: Any) -> str:
    every = [torch.as_tensor(leaf) if is_numbers(leaf) else leaf for leaf in leaves(value)]
    return repr((fingerprint(every), [leaf for leaf in every if isinstance(leaf, str | int | float | bool)]))


def _mean(value: Any) -> float:
    """The mean of floats; NaN of what has none."""
    floats = torch.as_tensor(value) if isinstance(value, Tensor) or value.dtype.kind == "f" else None
    if floats is None or floats.layout != torch.strided or floats.is_meta or not floats.is_floating_point():
        return math.nan
    return float(floats.detach().double().mean())


def is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"


class PeerRuns:
    """The runs of one observation. Every peer exchanges results once, and then, or after an error, calls `close`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = [group for group in map(Group, groups) if not group.silent]
        self._number, self._count = 0, 1
        for group in self._groups:
            self._number += self._count * group.rank
            self._count *= group.size

    def divide(self, runs: Sequence[Callable[[], T]], costs: Sequence[float]) -> list[T]:
        """The results of all `runs`, the first of which is made by the first peer. After one exchange all run here."""
        found: Mapping[int, T] = {}
        if self._groups:
            owners = _owners(costs, self._count)
            found = self._exchanged({at: run() for at, run in enumerate(runs) if owners[at] == self._number})
        return [found[at] if at in found else run() for at, run in enumerate(runs)]

    def close(self) -> None:
        """Let peers that wait for results of this one know that there are none."""
        self._exchanged({})

    def _exchanged(self, mine: Mapping[int, T]) -> Mapping[int, T]:
        while self._groups:  # an error leaves the groups that have not exchanged results to `close`
            answers = talk.gather(mine, self._groups[0].ranks)
            del self._groups[0]
            mine = {at: result for answer in answers for at, result in answer.items()}
        return mine


def _owners(costs: Sequence[float], count: int) -> list[int]:
    """The peer that makes each run: the first gets the first run, and the next expensive one the peer with least."""
    owners, loads = [0] * len(costs), [0.0] * count
    for at in sorted(range(len(costs)), key=lambda at: (at > 0, -costs[at])):
        owners[at] = min(range(count), key=lambda peer: loads[peer])
        loads[owners[at]] += costs[at]
    return owners


_BACKWARD = 2
"""Cost of a full backward of the first microbatch, beside that of a forward of some of them."""


@dataclass
class StepRuns:
    """The runs of one observation: of the first microbatch, and of all of the batch and its parts.

    The others run without dropout and noise. Each has another seed: the stages of a pipeline must know which block
    comes next, whatever is drawn.
    """

    module: Any
    step: str
    args: tuple[Any, ...]
    """The full batch, and the step's other arguments."""
    seed: int
    units: Sequence[str]
    context: Callable[[], AbstractContextManager[Any]]
    on_full_batch: Callable[[], AbstractContextManager[Any]]
    """Entered around runs on the full batch."""
    first: Callable[[], UncutRun]
    peers: PeerRuns
    block: str | None
    """The block whose gradients are compared: the last one. Before the first run the order of declaration counts."""
    rounding: float
    uncut: UncutRun | None = None
    results: list[StepResult | None] = field(default_factory=list)
    latest: Sequence[StepResult | None] = ()
    """The results that were divided last."""
    logs: Record = field(default_factory=Record)
    """Of the run that is made."""

    def observed(self) -> UncutRun:
        """The run of the first microbatch, made here unless a peer has made it."""
        self.uncut = self.uncut or self.first()
        return self.uncut

    def divide(self, runs: Runs, costs: Sequence[float]) -> list[StepResult | None]:
        """The results of `runs`, made by this rank and its peers. One of them also observes the first microbatch."""
        if self.uncut is None:

            def first() -> UncutRun:
                with rank_local():
                    return replace(self.first(), args=())  # peers have the batch

            tasks: list[Callable[[], Any]] = [runs[0], first, *runs[1:]]
            full, self.uncut, *parts = self.peers.divide(tasks, [costs[0], _BACKWARD, *costs[1:]])
            results = [full, *parts]
        else:
            results = self.peers.divide(runs, costs)
        self.results += results
        self.latest = results
        return results

    def __call__(self, rows: Any, seed: int, marked: bool, *, fresh: bool = False) -> StepResult | None:
        """The result on some rows. None where the step has no loss, or fails."""
        with self._trial() as gates:
            result = self._run(gates, rows, seed, marked, fresh=fresh)
        if isinstance(result, Exception):  # code that needs real noise, or differentiates by other weights itself
            agreement.raise_if_alone(result)
            return None
        return result

    def in_sequence(self, parts: Sequence[tuple[int, Any]], put_back: Sequence[bool]) -> list[StepResult] | Exception:
        """Run the step on parts of a batch, each with its seed, one after the other; the error where one fails.

        Where a part is to be `put_back`, buffers around blocks and attributes of the module are as before after it.
        """
        with self._trial(logs=False) as gates:
            logs, results = LogRecorder(self.module), []
            for (seed, rows), back in zip(parts, put_back, strict=True):
                with ExitStack() as stack:
                    if back:
                        stack.enter_context(isolated(self.module))
                        stack.enter_context(isolated_buffers(self.module, open_buffers(self.module, self.units)))
                    stack.enter_context(logs.recording(Record(), own_metrics=True))
                    result = self._run(gates, rows, seed, True)
                if isinstance(result, Exception):
                    return result
                assert result is not None  # it had a loss on these rows before
                results.append(result)
        return results

    def with_counts(self, parts: Sequence[tuple[int, Any]], names: Collection[str]) -> list[StepResult] | Exception:
        """The same with all put back behind each part, but for the attributes `names` of the module."""
        results, counts = list[StepResult](), dict[str, Any]()
        for seed, rows in parts:
            with self._trial() as gates:
                vars(self.module).update(counts)
                result = self._run(gates, rows, seed, True)
                counts = {name: vars(self.module)[name] for name in names if name in vars(self.module)}
            if isinstance(result, Exception):
                return result
            assert result is not None
            results.append(result)
        return results

    def changes(self, seed: int, rows: Any) -> Changes:
        """Changes that the step makes to the attributes of the module."""
        with self._trial() as gates, isolated(self.module) as changes:
            result = self._run(gates, rows, seed, False)
        if isinstance(result, Exception):
            raise result
        return changes

    @contextmanager
    def later(self, rows: Any) -> Iterator[None]:
        """Let runs inside be those of a second step, on these rows."""
        with replaced_attributes(self, args=following(self.args, rows)), second_step(self.module):
            yield

    @contextmanager
    def _trial(self, **logs: bool) -> Iterator[Gates]:
        with UndoStack() as undo, trial(self.module, gradients=True, **logs) as self.logs:
            yield Gates(self.module, self.units, (), undo)

    def _run(
        self, gates: Gates, rows: Any, seed: int, marked: bool, extreme: float | None = None, *, fresh: bool = False
    ) -> StepResult | Exception | None:
        """The result on some rows, or the error; None without a loss. Python draws the same numbers unless `fresh`."""
        parameters, silence = trained_in(self.module, self.block), SilenceRandom(extreme)
        held = (*self.module.parameters(), *self.module.buffers())
        operations = NoteOperations(rows, partial(called, gates), held)
        around, args = self.on_full_batch if rows is self.args[0] else nullcontext, (rows, *self.args[1:])
        with training_only(self.module, parameters):
            watch = StateWatch(self.module, self.units)
            try:
                with around(), Interceptor(silence, operations), rank_local():
                    seeds = self.seed + seed, self.seed + seed * fresh
                    seen, output = run_step(self.module, gates, self.step, args, self.context, seeds, marked)
                plain = seen.plain()
                moved = seen.drawn or seen.drawn_inside or drawn_since_restart()
                silence.lengths |= {0} if plain or (moved and not silence.lengths) else set()
                result = step_result(
                    loss_of(output), parameters, marks=seen.marks, calls=tuple(seen.calls), given=tuple(seen.given),
                    drawn=frozenset(silence.lengths), plain=plain,
                    operations=operations.noted, logged=logged_numbers(self.logs),
                )  # fmt: skip
            except Lightning3DError:
                raise
            except Exception as error:
                return error
            return None if result is None else result._replace(written=watch.written(), arrays=watch.arrays)

    def refuse_random_order(self) -> None:
        """Raise where the step draws which blocks run. Rare draws are made by the least and the largest numbers."""
        uncut = self.observed()
        results: list[Any] = [*self.results]
        for extreme in (0.0, 1.0) if uncut.drawn else ():
            with self._trial() as gates:
                results.append(self._run(gates, self.args[0], 0, False, extreme))
        for seed in range(1, 7) if any(isinstance(each, StepResult) and each.plain for each in results) else ():
            with self._trial() as gates:
                results.append(self._run(gates, self.args[0], seed, False, fresh=True))
        other = next((each for each in results if isinstance(each, StepResult) and each.calls != uncut.calls), None)
        if uncut.drawn and other is not None:
            raise UnsupportedError(
                f"{self.step} draws at random which blocks to run: {len(uncut.calls)} calls of blocks with one seed,"
                f" {len(other.calls)} with another, in another order. The stages of a pipeline must know what comes"
                f" next. Draw inside of the block (return its input to skip it), or use {NO_PIPELINE}."
            )
