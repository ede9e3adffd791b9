"""Random streams: which ranks draw equal numbers, inside and outside a step.

Outside steps (samplers, augmentation in the main process), tensor and pipeline peers share one stream: they must work
on the same samples. Inside a step (dropout), every data rank has its own stream, which its tensor ranks and stages
share (see `tensor/dropout.py` and `restart`). With one data rank this is the stream that the user seeded, as on one
device. Several data ranks must not draw from that stream in steps: the samplers that each of them runs would order
samples differently from then on. A pipeline draws other numbers than one device anyway, so it has its own stream too.

Under a pipeline every stage runs the same code around the blocks, but each block runs on one stage, so a shared stream
would diverge. Instead the stream restarts before and after every call of a unit, from a number derived from (step,
microbatch, calls so far). Noise is then equal on all stages, and dropout masks do not depend on the number of stages. A
step that runs twice draws the same numbers.
"""

import os
import pickle
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from lightning_3d.layout import Coordinate, Layout
from lightning_3d.ranks import talk

Streams = dict[str, Any]
"""The states of random streams by name, as values that every checkpoint format can store."""


def torch_streams() -> Streams:
    """The present states of torch's streams: the CPU's, and that of the current CUDA device."""
    streams: Streams = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def main_streams(generator: torch.Generator | None = None) -> Streams:
    """The present states of torch's, Python's and numpy's main streams, and of `generator`."""
    state: Any = np.random.get_state()
    kind, numbers, *rest = state
    own = (kind, numbers.tolist(), *rest)  # a single-file checkpoint stores no arrays of numpy
    streams = {**torch_streams(), "python": random.getstate(), "numpy": own}
    return streams if generator is None else {**streams, "generator": generator.get_state()}


def plain_streams() -> Streams:
    """The present states of Python's and numpy's main streams."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def plain_print() -> int:
    """A number for the present states of Python's and numpy's main streams."""
    return zlib.crc32(pickle.dumps(plain_streams()))


def set_plain_streams(streams: Streams) -> None:
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])


def set_streams(streams: Streams, generator: torch.Generator | None = None) -> None:
    """Set the states that a function above returned, maybe in another process."""
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    if "python" in streams:
        set_plain_streams(streams)
    if generator is not None and "generator" in streams:
        generator.set_state(streams["generator"])


def equal(one: Streams, other: Streams) -> bool:
    """Return True if the streams that both name have the same states."""
    pairs = [(one[name], state) for name, state in other.items() if name in one]
    return all(mine.equal(state) if isinstance(state, torch.Tensor) else mine == state for mine, state in pairs)


@contextmanager
def restored_streams(plain: Streams | None = None) -> Iterator[None]:
    """Put streams back behind the code inside. It draws from `plain` states, if given, and torch's go on then."""
    before = plain_streams() if plain else {**torch_streams(), **plain_streams()}
    if plain:
        set_plain_streams(plain)
    try:
        yield
    finally:
        (set_plain_streams if plain else set_streams)(before)


class StepRandom:
    """The random stream for the steps of one rank, separate from the main one where that is needed."""

    def __init__(self, layout: Layout, coordinate: Coordinate) -> None:
        self.separate = layout.data_parallel_size > 1 or layout.pipelined
        self.states: Streams = {}
        if self.separate:
            with restored_streams():
                torch.manual_seed((torch.initial_seed() + (coordinate.data + 1) * 1_000_003) % 2**63)
                self.states = torch_streams()

    @contextmanager
    def step(self) -> Iterator[None]:
        if not self.separate:
            yield
            return
        outside = torch_streams()
        set_streams(self.states)
        try:
            yield
        finally:
            self.states = torch_streams()
            set_streams(outside)


def share_random_state(groups: list[dist.ProcessGroup]) -> None:
    """Give every rank of each group the random state (torch's, Python's, numpy's) of its first rank."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            _set_state(talk.from_first(_state, group))


def share_seeded_state() -> None:
    """Set rank 0's random state on every rank if the user seeded. Collective over the world.

    Lightning's own strategies restart from the seed here: the numbers drawn for the module are drawn again for its
    samples. One device does not restart, so neither do we.
    """
    state = talk.from_first(lambda: _state() if "PL_GLOBAL_SEED" in os.environ else None)
    if state is not None:
        _set_state(state)


@contextmanager
def drawn_like_first() -> Iterator[None]:
    """Draw from the streams of rank 0 inside. Collective over the world once there are processes.

    A rank whose streams are others has its own again afterwards.
    """
    mine = _state()
    first = talk.from_first(lambda: mine)
    other = talk.pickled(first) != talk.pickled(mine)
    if other:
        _set_state(first)
    yield
    if other:
        _set_state(mine)


def _state() -> tuple[int, Streams]:
    return torch.initial_seed(), main_streams()


def _set_state(state: tuple[int, Streams]) -> None:
    seed, streams = state
    torch.default_generator.manual_seed(seed)
    set_streams(streams)


_MASK = (1 << 63) - 1


def draw() -> int:
    """A number for this step, from torch's default stream, which is equal on every rank of a pipeline."""
    return int(torch.randint(_MASK, (), dtype=torch.int64).item())


def drawn_since_restart() -> bool:
    """Return True if torch's streams have moved since the last `restart`. Waits for no device."""
    fresh = torch.Generator().manual_seed(torch.default_generator.initial_seed())
    if not torch.default_generator.get_state().equal(fresh.get_state()):
        return True
    in_use = torch.cuda.is_initialized()
    return in_use and bool(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())


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
    np.random.seed(seed)


Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


_OF_ALL = (torch.default_generator, *(getattr(draw, "__self__", None) for draw in (random.random, np.random.rand)))
"""The generators of torch, Python and numpy that all code shares (`random_streams` puts them back)."""


def is_generator(value: Any) -> bool:
    """True for a generator with a state of its own."""
    if not isinstance(value, Generator) or isinstance(value, random.SystemRandom):
        return False
    shared = (*_OF_ALL, *torch.cuda.default_generators)
    return not any(value is each for each in shared)


def drawn_from(states: Mapping[Generator, Any]) -> list[Generator]:
    """Those of the generators whose states are others by now."""
    return [each for each, before in states.items() if _text(state_of(each)) != _text(before)]


@contextmanager
def restored_states(states: Mapping[Generator, Any]) -> Iterator[None]:
    """Put these states back at the end."""
    try:
        yield
    finally:
        for generator, state in states.items():
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)


def state_of(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _text(state: Any) -> bytes:
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)
