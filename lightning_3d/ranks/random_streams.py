"""Which ranks draw the same random numbers.

Outside of steps (samplers, augmentation in the main process) the ranks of one data rank share a stream, since they
must see the same samples. Inside a step (dropout) every data rank has a stream of its own; tensor ranks and pipeline
stages share it (`tensor/dropout.py` and `restart` below say what they make of it). With one data rank it is the
stream that the user seeded, so that a step starts from what one device would have drawn. Several must not draw from
that one, or samplers that each of them runs would deal out different orders from then on; nor do the steps of a
pipeline, which draw otherwise than one device in any case, so that what comes between them does not change.

Random numbers under a pipeline.

Every stage runs the same code around the blocks, but each block on one stage only, so a shared stream would drift
apart. Instead the stream restarts from a number derived from (step, microbatch, calls so far) before and after every
call of a unit: noise that a step draws is the same on every stage, dropout masks do not depend on how many stages
there are, and a step that is run twice draws the same numbers.
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from lightning_3d.layout import Coordinate, Layout
from lightning_3d.ranks import talk


class StepRandom:
    """A random stream for the steps of one rank, apart from the main one."""

    def __init__(self, layout: Layout, coordinate: Coordinate, device: torch.device) -> None:
        self.device = device
        self.apart = layout.data_parallel_size > 1 or layout.pipeline_parallel_size > 1
        self.states: list[torch.Tensor] = []
        if self.apart:
            self.states = self._fresh((torch.initial_seed() + (coordinate.data + 1) * 1_000_003) % 2**63)

    def _fresh(self, seed: int) -> list[torch.Tensor]:
        before = self._read()
        torch.manual_seed(seed)
        fresh = self._read()
        self._write(before)
        return fresh

    def _read(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _write(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Draw from this rank's own stream."""
        if not self.apart:
            yield
            return
        outside = self._read()
        self._write(self.states)
        try:
            yield
        finally:
            self.states = self._read()
            self._write(outside)


Streams = dict[str, Any]
"""The states of the main random streams, as values that every checkpoint format holds."""


def main_streams(generator: torch.Generator | None = None) -> Streams:
    """Where torch's, Python's and numpy's main streams are, and `generator`."""
    import numpy

    legacy: Any = numpy.random.get_state()
    numbers = (legacy[0], legacy[1].tolist(), *legacy[2:])  # a single file holds no arrays of numpy
    streams = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numbers}
    return streams if generator is None else {**streams, "generator": generator.get_state()}


def set_main_streams(streams: Streams, generator: torch.Generator | None = None) -> None:
    """Go on from where `main_streams` was."""
    import numpy

    torch.set_rng_state(streams["torch"])
    random.setstate(streams["python"])
    numpy.random.set_state(streams["numpy"])
    if generator is not None and "generator" in streams:
        generator.set_state(streams["generator"])


Seeded = tuple[int, torch.Tensor, torch.Tensor | None, Any, Any]
"""torch's seed and state, CUDA's, Python's and numpy's."""


def share_random_state(group: dist.ProcessGroup) -> None:
    """Give every rank of `group` the random state (torch's, Python's, numpy's) of its first rank."""
    if dist.get_world_size(group) == 1:
        return
    _set_state(talk.from_first(_state, group))


def share_seeded_state() -> None:
    """Where the user seeded, go on with rank 0's random state on every rank. Collective over the world.

    Lightning's own strategies start again from the seed here, so that what was drawn for the module is drawn once more
    for its samples; one device goes on.
    """
    state = talk.from_first(lambda: _state() if "PL_GLOBAL_SEED" in os.environ else None)
    if state is not None:
        _set_state(state)


def _state() -> Seeded:
    import numpy

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.initial_seed(), torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state()


def _set_state(state: Seeded) -> None:
    import numpy

    seed, torch_state, cuda, python_state, numpy_state = state
    torch.default_generator.manual_seed(seed)
    torch.set_rng_state(torch_state)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)


_MASK = (1 << 63) - 1


def draw() -> int:
    """A number for this step, from torch's default stream (which every rank of a pipeline keeps in step)."""
    return int(torch.randint(_MASK, (), dtype=torch.int64).item())


def restart(*numbers: int) -> None:
    """Restart torch's streams (CPU and the current accelerator) from `numbers`."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed = ((seed ^ number) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 29
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def restart_python(*numbers: int) -> None:
    """Restart the streams of `random` and numpy, which augmentations inside a step use."""
    seed = hash(numbers) & 0xFFFFFFFF
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def restored_streams() -> Iterator[None]:
    """Put every stream back to where it was."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
