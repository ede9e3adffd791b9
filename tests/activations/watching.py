"""Peaks of memory in a training step, by torch's profiler: its own record of what the allocator gives and takes."""

import time

from lightning.pytorch import Callback, Trainer, seed_everything
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import Strategy3D
from tests.parity import QUIET, build, make_trainer


class Peaks(Callback):
    """For each batch the most bytes that were allocated at one time, over those at its start."""

    def __init__(self):
        self.peaks = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.profiler.__exit__(None, None, None)
        events = [e for e in self.profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        self.peaks.append(peak)


def peaks(name, world, strategy, batches=3):
    """The peaks of the first batches on this rank, and what the strategy says of its blocks."""
    seed_everything(7, verbose=False)
    watched = Peaks()
    chosen = Strategy3D(quiet=True, **strategy)
    flags = {"devices": world, "strategy": chosen, "limit_train_batches": batches, "max_epochs": 1}
    found = []

    class Note(Callback):
        def on_train_end(self, trainer, module):
            recomputed = chosen._parallel.recomputed
            found.append([block.on for block in recomputed.blocks.values()] if recomputed else [])

    Trainer(**{**QUIET, **flags, "limit_val_batches": 0, "callbacks": [watched, Note()]}).fit(build(name))
    return watched.peaks, found[0]


class Kept(Callback):
    """Bytes that the first forward leaves for its backward."""

    found = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_before_backward(self, trainer, module, loss):
        if trainer.fit_loop.batch_idx == 0:
            self.profiler.__exit__(None, None, None)
            events = self.profiler.profiler.kineto_results.events()
            self.found = sum(event.nbytes() for event in events if event.name() == "[memory]")


def kept(name, world, strategy):
    """Bytes that the first forward leaves for its backward, on this rank."""
    seed_everything(7, verbose=False)
    watched = Kept()
    flags = {**QUIET, "limit_train_batches": 1, "max_epochs": 1, "limit_val_batches": 0, "callbacks": [watched]}
    Trainer(**flags, devices=world, strategy=Strategy3D(quiet=True, **strategy)).fit(build(name))
    return watched.found


class Seconds(Callback):
    """Seconds of each batch, from its start to its optimizer's step."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.begin = time.perf_counter()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.found.append(time.perf_counter() - self.begin)


def fastest_step(name, world, strategy):
    """Seconds of the fastest step on this rank, after those that measure."""
    seed_everything(7, verbose=False)
    clock = Seconds()
    make_trainer(world, strategy, quiet=True, max_epochs=3, limit_val_batches=0, callbacks=[clock]).fit(build(name))
    return min(clock.found[2:])


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = {"products": 0, "dropouts": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        for kind, words in (("products", ("mm.",)), ("dropouts", ("bernoulli", "native_dropout."))):
            self.found[kind] += any(word in name for word in words)
        return func(*args, **(kwargs or {}))


def counts(name, world, strategy):
    """Operations and collectives in the forward and backward of the second batch on this rank."""
    seed_everything(7, verbose=False)
    mode = _Counting()

    class Count(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 1:
                self.before = self.calls(trainer)
                mode.__enter__()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.fit_loop.batch_idx == 1:
                mode.__exit__(None, None, None)
                mode.found["sent"] = self.calls(trainer) - self.before

        def calls(self, trainer):
            return sum(row.calls for row in trainer.strategy.data_axis.ledger.rows())

    make_trainer(
        world, strategy, quiet=True, limit_train_batches=2, max_epochs=1, limit_val_batches=0, callbacks=[Count()]
    ).fit(build(name))
    return mode.found
