"""Random streams: which ranks draw equal numbers, inside and outside a step.

Outside steps (samplers, augmentation in the main process), tensor and pipeline peers share one stream: they must work
on the same samples. Inside a step (dropout), every data rank has its own stream, which its tensor ranks and stages
share (see `tensor/dropout.py` and `restart`). With one data rank this is the stream that the user seeded, as on one
device. Several data ranks must not draw from that stream in steps: the samplers that each of them runs would order
samples differently from then on. A pipeline draws other numbers than one device anyway, so it has its own stream too.

Under a pipeline every stage runs the same code around the blocks, but each block runs on one stage, so a shared stream
would diverge. Instead the stream restarts before and after every call of a unit, from a number derived from (step,
microbatch, calls so far). Noise is then equal on all stages, dropout masks do not depend on the number of stages, and a
step that is run twice draws the same numbers.
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
    """The random stream for the steps of one rank, separate from the main one where that is needed."""

    def __init__(self, layout: Layout, coordinate: Coordinate, device: torch.device) -> None:
        self.device = device
        self.separate = layout.data_parallel_size > 1 or layout.pipeline_parallel_size > 1
        self.states: list[torch.Tensor] = []
        if self.separate:
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
        if not self.separate:
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
"""The states of the main random streams, as values that every checkpoint format can store."""


def main_streams(generator: torch.Generator | None = None) -> Streams:
    """The present states of torch's, Python's and numpy's main streams, and of `generator`."""
    import numpy

    legacy: Any = numpy.random.get_state()
    numbers = (legacy[0], legacy[1].tolist(), *legacy[2:])  # a single-file checkpoint stores no arrays of numpy
    streams = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numbers}
    return streams if generator is None else {**streams, "generator": generator.get_state()}


def set_main_streams(streams: Streams, generator: torch.Generator | None = None) -> None:
    """Set the states that `main_streams` returned."""
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
    """Where the user seeded, set rank 0's random state on every rank. Collective over the world.

    Lightning's own strategies restart from the seed here: the numbers drawn for the module are drawn again for its
    samples. One device does not restart, so neither do we.
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
    """A number for this step, from torch's default stream, which is equal on every rank of a pipeline."""
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
    """Restart the streams of `random` and numpy: augmentations inside a step use them."""
    seed = hash(numbers) & 0xFFFFFFFF
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def restored_streams() -> Iterator[None]:
    """Restore every stream afterwards."""
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
