"""What is one rank's alone and makes a resumed run draw and round as the uninterrupted one would have."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_3d.comm import Compression
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import Layout
from lightning_3d.randomness import StepRandom


def own_state(layout: Layout, step_random: StepRandom, compressions: Sequence[Compression]) -> dict[str, Any]:
    """Random streams and what compression left over, to be saved for this rank."""
    import numpy

    return {
        "layout": repr(layout),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(step_random.device) if step_random.device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "step": list(step_random.states),
        "compressions": [compression.state_dict() for compression in compressions],
    }


def same_layout(state: Mapping[str, Any], layout: Layout) -> bool:
    """Whether what was saved is of a rank in the same place. Elsewhere streams and leftovers mean nothing."""
    return bool(state.get("layout") == repr(layout))


def restore_own(state: Mapping[str, Any], step_random: StepRandom, compressions: Sequence[Compression]) -> None:
    """Take up what `own_state` gave, on a rank in the same place of the same layout."""
    import numpy

    try:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and step_random.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], step_random.device)
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        step_random.states = list(state["step"])
        for compression, saved in zip(compressions, state["compressions"], strict=True):
            compression.load_state_dict(saved)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random states of this rank cannot be taken up: {error}") from error
