"""Reads the first batch of the loop that is about to run, without taking it away from the loop."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from io import IOBase
from types import FunctionType, MethodType
from typing import Any
from weakref import ProxyTypes

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_3d.errors import UnsupportedError
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.ranks import random_streams
from lightning_3d.ranks.random_streams import is_generator, restored_states, state_of
from lightning_3d.sandbox.snapshot import Copies, on_copies
from lightning_3d.sandbox.trees import copied
from lightning_3d.sandbox.trial import put_back

_LARGE, _END = 1 << 20, object()
_MANY, _HOLDERS = 100, 1000
"""Entries of a container that are looked into, and objects of a loader whose state is put back."""


@dataclass
class Loaders:
    """The loaders of the loop that is about to run."""

    combined: CombinedLoader
    source: Any
    """Of the loop: gives it the loaders (read in lightning 2.6)."""
    draws: "_Draws"
    """Of the hook that made the loaders."""
    owner: Any
    """The module or datamodule whose hook made them, None without one."""


def loaders_of(trainer: Trainer, back: ExitStack) -> Loaders:
    """The loaders of the loop that is about to run; `back` undoes what the hook changes, once the batch is read.

    They come from the loop's data source (read in lightning 2.6). A loop that does not know the number of its batches
    reads one already when it is set up.
    """
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    source = loops[trainer.state.fn]._data_source
    given = vars(source).get("dataloader")
    if given is not None and given.instance is source.instance:
        return given.loaders
    draws, owner = _Draws(), source.instance if source.is_module() else None
    if owner is not None:
        back.callback(put_back(owner))  # the loop calls the hook too, which may count its calls
    with draws.noted():
        loaders = source.dataloader()
    if not isinstance(loaders, CombinedLoader):
        loaders = CombinedLoader(loaders, "max_size_cycle" if trainer.state.fn == TrainerFn.FITTING else "sequential")
    return Loaders(loaders, source, draws, owner)


def forget_reads(trainer: Trainer) -> None:
    """Have the next run get its loaders anew: one that failed in set-up has not taken those that were read."""
    for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        vars(loop._data_source).pop("dataloader", None)


class FirstBatch:
    """The first batch of the loop that is about to run. It is read when it is first asked for, and once."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.samples: int | None = None
        """Those that the loader promises, once the batch is read."""
        self._read: list[Any] = []

    def __call__(self) -> Any:
        """The batch, for code that may write into it. Random streams are put back."""
        if not self._read:
            with random_streams.restored_streams(), ExitStack() as back:
                loaders = loaders_of(self.trainer, back)
                self._read = [_first_of(loaders, self.trainer.strategy, back)]
            self.samples = promised_samples(loaders.combined)
        return copied(self._read[0])


def _first_of(loaders: Loaders, strategy: Strategy, back: ExitStack) -> Any:
    """The first batch, from a separate iterator where there can be one. Else the loop gets what is read here.

    The loop gets these loaders too, without `back`, where their hook may have taken something from an iterator.
    A stream is read from a copy, since it may remember its position. Put back are the loaders' own generators, and what
    data, samplers and the objects inside of them count.
    """
    combined, own = loaders.combined, loaders.combined.flattened
    separate = [_read_again(each) for each in own]
    reads = [_Once(each) if copy is None else None for each, copy in zip(own, separate, strict=True)]
    goes_on = any(reads) or any(isinstance(each, Iterator) for each in _values(loaders.owner))
    if goes_on:
        back.pop_all()
    for once in reads:
        if once is not None:
            strategy.process_dataloader(once.loader)  # seeds workers, which go on in the loop
    again = [each for each, copy in zip(own, separate, strict=True) if copy is not None]
    combined.flattened = [once or copy for once, copy in zip(reads, separate, strict=True)]
    try:
        with ExitStack() as stack:
            copies = Copies(_MANY)  # a dataset may be a dict of images
            for loader in again:
                values = (value for each in (loader, *holders(_parts(loader))) for value in _values(each))
                stack.enter_context(
                    restored_states({value: state_of(value) for value in values if is_generator(value)})
                )
                for each in holders(_parts(loader)):
                    for cell, content in _cells(each):
                        stack.callback(setattr, cell, "cell_contents", content)  # a count of the function around it
                    stack.callback(vars(each).update, dict(vars(each)))
                    stack.callback(vars(each).clear)  # of what is made once: an iterator, an open file
                    stack.enter_context(on_copies(each, copies))
            batch = next(iter(combined))[0]
        return deepcopy(batch) if any(reads) else batch  # the step may write into it
    finally:
        combined.reset()
        combined.flattened = [own if once is None else once.given_back() for own, once in zip(own, reads, strict=True)]
        if goes_on:
            loaders.source.dataloader = _Given(loaders, loaders.source.instance)


def _read_again(loader: Any) -> Any:
    """A loader that reads what `loader` will, and takes nothing away from it; None where there is none.

    It has a copy of a stream. What cannot be copied (an open file, a queue) is shared with worker processes too.
    """
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, Sequence | Tensor) else None
    stream, (data, *others) = isinstance(loader.dataset, IterableDataset), _parts(loader)
    *others, makes_batch, inner = others
    within = [item for each in holders([*others, inner], data) for item in _values(each)]
    within += [item for each in holders([makes_batch], data) for item in _values(each) if not isinstance(item, IOBase)]
    held = [*([data, *_values(data)] if stream else []), *others, inner, makes_batch, *within]
    if any(isinstance(each, Iterator) and not isinstance(each, ProxyTypes) for each in held):  # a file, a generator
        return None
    if not stream:
        return loader
    # an array that is too large to be the position of a stream, and maybe too large to copy
    shared = {id(each): each for each in held[1:] if isinstance(each, Tensor | np.ndarray) and each.nbytes > _LARGE}
    reads = copy(loader)
    try:
        vars(reads)["dataset"] = deepcopy(loader.dataset, shared)  # a loader refuses another one by assignment
    except Exception:  # each kind of file, queue and connection has its own
        return None
    return reads


def _parts(loader: Any) -> list[Any]:
    """The dataset of a DataLoader, then samplers and what makes a batch of samples."""
    found = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
    owner = getattr(found[3], "__self__", found[3])  # of a method, the object that counts
    return [*found[:3], owner if _is_data(owner) else found[3], getattr(found[2], "sampler", None)]


def holders(found: list[Any], besides: Any = None) -> list[Any]:
    """Those of `found` that have a state, and objects inside of them: the dataset of a subset, its transforms."""
    those, waiting = {id(besides): besides}, [each for each in found if _has_state(each)]
    for each in waiting:  # grows
        if id(each) not in those and len(those) < _HOLDERS:
            those[id(each)] = each
            waiting += [item for item in _values(each) if _has_state(item) and _is_data(item)]
    return list(those.values())[1:]


def _is_data(item: Any) -> bool:
    """False for the run, and for a queue, a lock or a thread of Python's: others may wait for these."""
    if isinstance(item, LightningModule | LightningDataModule | Trainer | MethodType):
        return False
    from_python = type(item).__module__.partition(".")[0] in sys.stdlib_module_names
    return isinstance(item, FunctionType | partial) or not from_python


def _cells(holder: Any) -> Iterator[tuple[Any, Any]]:
    """The variables that a function has from the one around it, which may have no value yet."""
    for cell in getattr(holder, "__closure__", None) or ():
        with suppress(ValueError):
            yield cell, cell.cell_contents


def _values(holder: Any) -> list[Any]:
    """The attributes of an object and what is in these, and what a function has beside its arguments."""
    around = [content for _, content in _cells(holder)]
    if isinstance(holder, partial):
        around = [holder.func, holder.args, holder.keywords]
    found: list[Any] = []
    for value in (*getattr(holder, "__dict__", {}).values(), *around):
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
        found += entries if len(entries) <= _MANY else ()
    return found


def _has_state(each: Any) -> bool:
    return isinstance(getattr(each, "__dict__", None), dict) and not isinstance(each, Tensor)


class _Draws:
    """Numbers that code draws from the main random streams, for code that does not run again where it would have."""

    def __init__(self) -> None:
        self.before = self.after = random_streams.Streams()

    @contextmanager
    def noted(self) -> Iterator[None]:
        self.before = random_streams.main_streams()
        yield
        self.after = random_streams.main_streams()

    @property
    def drew(self) -> bool:
        return not random_streams.equal(self.before, self.after)

    def repeat(self) -> None:
        if not self.drew:
            return
        if not random_streams.equal(self.before, random_streams.main_streams()):
            raise UnsupportedError(
                "The data draws from a random stream that all code shares (torch's, Python's or numpy's). It can be"
                " read only once, and its first batch was read ahead of training. A hook has drawn since then, so one"
                " device would have another first batch. Draw from a generator of its own in the data, or draw nothing"
                " in hooks before the first batch."
            )
        random_streams.set_streams(self.after)


class _Once:
    """Reads a loader that can be read only once, and keeps what it has read."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.kind = loader, type(loader)
        self.items: list[Any] = []
        self.begun, self.read = _Draws(), _Draws()
        self.rest: Iterator[Any] | None = None
        self.swapped: type | None = None
        """The class of the loader until what was read is given."""
        self.asked = self.given = False

    def __iter__(self) -> Iterator[Any]:
        with self.begun.noted():
            self.rest = iter(self.loader)
        return self

    def __next__(self) -> Any:
        assert self.rest is not None
        with self.read.noted():
            self.items.append(next(self.rest))
        return self.items[-1]

    def given_back(self) -> Any:
        """The loader, whose next iteration begins with what was read. It is the same object, if it can be."""
        if self.rest is None:
            return self.loader
        again: dict[str, Any] = {"__module__": self.kind.__module__, "__slots__": ()}
        again["__iter__"] = lambda holder: self.again(holder)
        if hasattr(self.kind, "load_state_dict"):  # a run that resumes goes on elsewhere
            again["load_state_dict"] = lambda holder, state: self.own(holder).load_state_dict(state)
        try:
            self.swapped = type(self.kind.__name__, (self.kind,), again)
            self.loader.__class__ = self.swapped
        except Exception:  # a type of Python's own, or one that allows none below it, each by its own error
            return _StandIn(self)
        return self.loader

    def own(self, holder: Any) -> Any:
        """`holder`, the loader or what Lightning has built from it, without what was read."""
        self.given = True
        for each in (self.loader, holder):
            if type(each) is self.swapped:
                each.__class__ = self.kind
        return holder

    def again(self, holder: Any) -> Iterator[Any]:
        # Lightning begins an iteration to see that it can; each draws another order
        if self.given or (self.asked and self.begun.drew):
            return iter(self.own(holder))
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler is not getattr(self.loader, "sampler", None):
            raise UnsupportedError(
                "Lightning divides the samples of a loader over data ranks. Its own sampler or `collate_fn` has"
                " an iterator, goes on where it was, and was read ahead of training. Make the iterator in `__iter__`,"
                " count in an attribute, or divide by your own sampler with Trainer(use_distributed_sampler=False)."
            )
        self.asked = True
        self.begun.repeat()
        return self._read(holder)

    def _read(self, holder: Any) -> Iterator[Any]:
        self.own(holder)
        self.read.repeat()
        while self.items:
            yield self.items.pop(0)
        assert self.rest is not None
        while (item := next(self.rest, _END)) is not _END:  # `iter` may rewind one that is its own iterator
            yield item


class _StandIn:
    """Stands for a loader whose class cannot be another one."""

    def __init__(self, once: _Once) -> None:
        self._once = once

    def __iter__(self) -> Iterator[Any]:
        return self._once.again(self._once.loader)

    def __len__(self) -> int:
        return len(self._once.loader)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._once.loader, name)
        return found if name != "load_state_dict" else lambda state: (self._once.own(None), found(state))


@dataclass
class _Given:
    """Gives the loop the loaders that were read ahead, once; later ones come from its source again."""

    loaders: Loaders
    instance: Any
    """That the source had, by which other loaders of the same Trainer are known."""

    def __call__(self) -> Any:
        source = self.loaders.source
        del source.dataloader
        if source.instance is not self.instance:
            return source.dataloader()
        self.loaders.draws.repeat()
        return self.loaders.combined


def promised_samples(loader: Any) -> int | None:
    """Samples in a batch of `loader`; None for several loaders, or one without a batch size."""
    if isinstance(loader, CombinedLoader):
        return promised_samples(loader.flattened[0]) if len(loader.flattened) == 1 else None
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """The arguments with which Lightning would call `step`: the batch, then as many indices as it takes."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]


def following(args: tuple[Any, ...], batch: Any) -> tuple[Any, ...]:
    """The arguments of the next step, on `batch`."""
    return (batch, *(index + 1 for index in args[1:2]), *args[2:])


@contextmanager
def second_step(module: Any) -> Iterator[None]:
    """Let `global_step` be 1 more inside, and `current_epoch` too: steps choose by these."""
    trainer = trainer_of(module)
    with ExitStack() as stack:
        if trainer is not None:
            loop = trainer.fit_loop
            steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
            for count in (steps, loop.epoch_progress.current):
                stack.enter_context(replaced_attributes(count, completed=count.completed + 1))
        yield
