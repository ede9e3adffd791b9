"""Random numbers under a pipeline.

Every stage runs the same code around the blocks, but each block on one stage only, so a shared stream would drift
apart. Instead the stream restarts from a number derived from (step, microbatch, calls so far) before and after every
call of a unit: noise that a step draws is the same on every stage, dropout masks do not depend on how many stages
there are, and a step that is run twice draws the same numbers.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
def set_aside() -> Iterator[None]:
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
