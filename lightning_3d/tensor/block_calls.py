"""The calls of each block of a module: the shapes that a proof runs on."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_3d.errors import WritesError
from lightning_3d.ranks import random_streams
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.reads import NoteReads
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.trial import optimizers_on_demand, state_restored
from lightning_3d.sandbox.writes import RefuseDataAssignment, writes_undone
from lightning_3d.tensor.blocks import find_units
from lightning_3d.tensor.fallback import form_of
from lightning_3d.tensor.guards import ShardsCalled
from lightning_3d.tensor.heads import NoteHeads
from lightning_3d.tensor.sample import Sample, recorded

_IN_SHARDS = "which has no effect on parameters in shards"
FORMS = 4
"""Forms of calls of one block that are looked at."""


@dataclass(frozen=True)
class Recording:
    """The results of one recorded run of a module."""

    samples: Mapping[str, tuple[Sample, ...]]
    """The first call of each form of each block, by name."""
    elsewhere: frozenset[str]
    """Parameters of embeddings and linears that were read outside their own module's forward."""
    in_parts: frozenset[str]
    """Blocks of which a part was called by itself."""
    heads: frozenset[str]
    """Linears as wide as an embedding has rows, whose results no other product took."""


def record_calls(module: nn.Module, run: Callable[[], Any]) -> Recording:
    """Watch `module` while `run()` runs: one batch through it, say. It runs as the module is and in eval mode.

    Runs without gradients and puts random state and buffers back, so that training starts as if it had not happened.
    """
    calls: dict[str, dict[Any, Sample]] = {}
    modes = [(child, child.training) for child in module.modules()]
    held = [(child, dict(child._buffers)) for child in module.modules()]
    values = {id(buffer): buffer.detach().clone() for buffer in module.buffers() if not buffer.is_meta}
    units = find_units(module)
    users, parts, heads = _Users(module), ShardsCalled(module, units), NoteHeads(module)
    reads = NoteReads(users.names, users.elsewhere)
    interceptor = Interceptor(RefuseDataAssignment(module.named_parameters, _IN_SHARDS), reads, heads)
    handles = [
        *users.handles,
        *parts.handles,
        *heads.handles,
        *(
            module.get_submodule(name).register_forward_pre_hook(_recorder(calls, name), with_kwargs=True)
            for name in units
        ),
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            with interceptor:
                run()
            with suppress(Exception), interceptor:  # only for more forms of calls: others compute unsplit
                if module.training:
                    module.eval()
                    run()
    finally:
        for handle in handles:
            handle.remove()
        for child, training in modes:
            child.training = training
        for child, buffers in held:  # one that is filled when it is first needed may have another shape by now
            child._buffers.clear()
            child._buffers.update(buffers)
        for buffer in module.buffers():
            if id(buffer) in values:
                buffer.copy_(values[id(buffer)])
    samples = {name: tuple(forms.values()) for name, forms in calls.items()}
    return Recording(samples, frozenset(reads.found), frozenset(parts.found), heads.found)


class _Users:
    """The embeddings and linears of a module, by the parameters that they use, and which of them runs."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[nn.Parameter, list[str]] = {}
        self.owners: dict[nn.Parameter, list[nn.Module]] = {}
        self.running: list[nn.Module] = []
        self.handles: list[Any] = []
        for name, owner in module.named_modules():
            if not isinstance(owner, nn.Embedding | nn.Linear):
                continue
            for own, parameter in owner._parameters.items():
                if parameter is not None:
                    self.names.setdefault(parameter, []).append(f"{name}.{own}" if name else own)
                    self.owners.setdefault(parameter, []).append(owner)
            self.handles.append(owner.register_forward_pre_hook(lambda m, *_: self.running.append(m)))
            self.handles.append(owner.register_forward_hook(self._leave, always_call=True))

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def elsewhere(self, parameter: nn.Parameter, func: Any) -> bool:
        """Return True if `func` reads `parameter` outside the forward of its owner.

        The forward of an embedding of a class of its own may only look up.
        """
        owner = next((item for item in self.owners[parameter] if item in self.running[-1:]), None)
        return owner is None or (isinstance(owner, nn.Embedding) and func is not F.embedding)


def _recorder(calls: dict[str, dict[Any, Sample]], name: str) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forms, form = calls.setdefault(name, {}), form_of((args, kwargs))
        if form not in forms and len(forms) < FORMS:
            forms[form] = recorded(args, kwargs, module.training)

    return record


def record_one_batch(trainer: Trainer, module: LightningModule, to_device: Callable[[Any], Any]) -> Recording | None:
    """Run the step that is about to run on its first batch, without gradients, and watch the blocks.

    Random streams, weights, buffers and plain attributes are as before afterwards and nothing is logged. None where
    there is no block to split, the batch would be lost to training or the step cannot be run by itself; then inputs are
    made up.
    """
    if not find_units(module) or not module.automatic_optimization:
        return None
    assert trainer.state.fn is not None
    step = getattr(module, STEPS[trainer.state.fn])
    try:
        with (
            random_streams.restored_streams(),
            state_restored(module),
            optimizers_on_demand(module),
            writes_undone(module),
            LogRecorder(module).recording(Record()),
        ):
            batch = to_device(first_batch(loaders_of(trainer)))
            return record_calls(module, lambda: step(*step_arguments(step, batch)))
    except WritesError:
        raise
    except Exception as error:
        warnings.warn(
            f"{STEPS[trainer.state.fn]} could not be run on one batch ahead of training"
            f" ({type(error).__name__}: {error}). What the blocks are called with is guessed from their sizes instead;"
            " blocks that take more than one tensor stay whole.",
            stacklevel=2,
        )
        return None
