"""Random generators that a module or the user's own objects have as attributes. A trial puts back their states."""

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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
            _set_state(generator, state)


def state_of(generator: Generator) -> Any:
    """A copy of its state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _text(state: Any) -> bytes:
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)
