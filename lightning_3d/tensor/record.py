"""What each block of a module is called with: the shapes that a proof runs on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_3d.tensor.sample import Sample, recorded
from lightning_3d.tensor.units import find_units


def record_calls(module: nn.Module, run: Callable[[], Any]) -> dict[str, Sample]:
    """The first call of each block while `run()` runs (one batch through the module, say), by block name.

    Runs without gradients and puts random state and buffers back, so that training starts as if it had not happened.
    """
    calls: dict[str, Sample] = {}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    handles = [
        module.get_submodule(name).register_forward_pre_hook(_recorder(calls, name), with_kwargs=True)
        for name in find_units(module)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            run()
    finally:
        for handle in handles:
            handle.remove()
        present: Mapping[str, torch.Tensor] = dict(module.named_buffers())
        for name, value in buffers.items():
            present[name].copy_(value)
    return calls


def _recorder(calls: dict[str, Sample], name: str) -> Callable[..., None]:
    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls:
            calls[name] = recorded(args, kwargs)

    return record
