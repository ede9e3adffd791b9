"""Recording of one batch: the arguments of each block's calls, on which a plan is proven."""

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
from lightning_3d.ranks.random_streams import restored_streams
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.reads import NoteReads
from lightning_3d.sandbox.trial import trial
from lightning_3d.sandbox.writes import RefuseDataAssignment
from lightning_3d.tensor.blocks import find_units
from lightning_3d.tensor.heads import NoteHeads
from lightning_3d.tensor.sample import Sample, form_of, recorded

_IN_SHARDS = "which has no effect on parameters in shards"
FORMS = 4
"""Most forms of calls that are recorded for a block."""


@dataclass(frozen=True)
class Recording:
    """Record of one run of a module."""

    samples: Mapping[str, tuple[Sample, ...]]
    """The first call of each form of each block, by name."""
    elsewhere: frozenset[str]
    """Parameters of embeddings and linears that were used outside their own module's forward."""
    opened: frozenset[str]
    """Blocks of which a module was called while the block was not."""
    heads: frozenset[str]
    """Linears as wide as an embedding has rows, whose results no other product took."""


def record_calls(module: nn.Module, run: Callable[[], Any]) -> Recording:
    """Record the calls of `module`'s blocks during `run()`, which passes one batch through it.

    It runs in the current mode and in eval mode, without gradients. Random state and buffers are restored.
    """
    calls: dict[str, dict[Any, Sample]] = {}
    modes = [(child, child.training) for child in module.modules()]
    saved = [(child, dict(child._buffers)) for child in module.modules()]
    values = {id(buffer): buffer.detach().clone() for buffer in module.buffers() if not buffer.is_meta}
    units = find_units(module)
    users, opened, heads = _Users(module), _OpenedBlocks(module, units), NoteHeads(module)
    reads = NoteReads(users.names, users.elsewhere)
    interceptor = Interceptor(RefuseDataAssignment(module.named_parameters, _IN_SHARDS), reads, heads)
    handles = [
        *users.handles,
        *opened.handles,
        *heads.handles,
        *(
            module.get_submodule(name).register_forward_pre_hook(_recorder(calls, name), with_kwargs=True)
            for name in units
        ),
    ]
    try:
        with torch.no_grad(), restored_streams():
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
        for child, buffers in saved:  # a buffer that is filled on first use may have another shape by now
            child._buffers.clear()
            child._buffers.update(buffers)
        for buffer in module.buffers():
            if id(buffer) in values:
                buffer.copy_(values[id(buffer)])
    samples = {name: tuple(forms.values()) for name, forms in calls.items()}
    return Recording(samples, frozenset(reads.found), frozenset(opened.found), heads.found)


class _OpenedBlocks:
    """Notes blocks of which a module is called while the block itself is not."""

    def __init__(self, module: nn.Module, units: list[str]) -> None:
        self.found: set[str] = set()
        self.handles: list[Any] = []
        self._running: list[str] = []
        homes: dict[nn.Module, list[str]] = {}
        for name in units:
            unit = module.get_submodule(name)
            self.handles.append(unit.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self.handles.append(unit.register_forward_hook(self._end, always_call=True))
            for inner in unit.modules():
                if inner is not unit and inner._parameters:
                    homes.setdefault(inner, []).append(name)
        for inner, names in homes.items():
            self.handles.append(inner.register_forward_pre_hook(lambda *_, names=names: self._called(names)))

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def _called(self, names: list[str]) -> None:
        if not set(names).intersection(self._running):
            self.found.update(names)


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


def records(module: LightningModule) -> bool:
    """Return True where `record_one_batch` runs a step."""
    return module.automatic_optimization and bool(find_units(module))


def record_one_batch(trainer: Trainer, module: LightningModule, to_device: Callable[[Any], Any]) -> Recording | None:
    """Run the coming step on its first batch, without gradients, and record the calls of the blocks.

    Random streams, weights, buffers and plain attributes are restored, and nothing is logged.

    Returns:
        None where there is no block to split, or the step cannot run before training. Then inputs are made up.
    """
    if not records(module):
        return None
    assert trainer.state.fn is not None
    step = getattr(module, STEPS[trainer.state.fn])
    try:
        with trial(module, gradients=False):
            batch = to_device(first_batch(loaders_of(trainer)))
            return record_calls(module, lambda: step(*step_arguments(step, batch)))
    except WritesError:
        raise
    except Exception as error:
        warnings.warn(
            f"{STEPS[trainer.state.fn]} could not run on one batch before training ({type(error).__name__}: {error})."
            " The arguments of the blocks are guessed from their sizes instead; blocks that take more than one tensor"
            " stay unsplit.",
            stacklevel=2,
        )
        return None
