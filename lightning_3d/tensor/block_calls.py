"""What each block of a module is called with: the shapes that a proof runs on."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import WritesError
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, step_arguments
from lightning_3d.sandbox.trial import trial
from lightning_3d.sandbox.writes import assigns_data
from lightning_3d.tensor.blocks import find_units
from lightning_3d.tensor.fallback import form_of
from lightning_3d.tensor.guards import ShardsCalled
from lightning_3d.tensor.heads import Ends
from lightning_3d.tensor.sample import Sample, recorded

FORMS = 4
"""Forms of calls of one block that are looked at."""


@dataclass(frozen=True)
class Recording:
    """What one run of a module showed."""

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
    watch, parts, ends = _Elsewhere(module), ShardsCalled(module, units), Ends(module)
    handles = [
        *watch.handles,
        *parts.handles,
        *ends.handles,
        *(
            module.get_submodule(name).register_forward_pre_hook(_recorder(calls, name), with_kwargs=True)
            for name in units
        ),
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(), watch, ends:
            run()
            with suppress(Exception):  # only to see more forms of calls: what was not seen computes whole
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
    return Recording(samples, frozenset(watch.found), frozenset(parts.found), ends.found)


class _Elsewhere(TorchFunctionMode):
    """Notes which weights are used by code other than their own module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.inside: list[nn.Module] = []
        self.handles: list[Any] = []
        self.users: dict[int, list[tuple[str, nn.Module]]] = {}
        self.own = set(module.parameters())
        for name, owner in module.named_modules():
            if not isinstance(owner, nn.Embedding | nn.Linear):
                continue
            for own, parameter in owner._parameters.items():
                if parameter is not None:
                    self.users.setdefault(id(parameter), []).append((f"{name}.{own}" if name else own, owner))
            self.handles.append(owner.register_forward_pre_hook(lambda m, *_: self.inside.append(m)))
            self.handles.append(owner.register_forward_hook(self._leave, always_call=True))

    def _leave(self, *_: Any) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if assigns_data(func) and isinstance(args[0], nn.Parameter) and args[0] in self.own:
            raise WritesError(
                "The step assigns to the .data of a parameter (a target network that follows?), which has no effect on"
                " parameters in shards. Do so in on_train_batch_start or on_train_batch_end."
            )
        for value in (*args, *(kwargs or {}).values()):
            users = self.users.get(id(value), []) if isinstance(value, nn.Parameter) and not _is_question(func) else []
            if users and not any(owner in self.inside[-1:] and _is_its_use(owner, func) for _, owner in users):
                self.found.update(name for name, _ in users)
        return func(*args, **(kwargs or {}))


def _is_its_use(owner: nn.Module, func: Any) -> bool:
    """Whether a module's own forward may do this to its weight: an embedding's of another class may only look up."""
    return func is F.embedding or not isinstance(owner, nn.Embedding)


def _is_question(func: Any) -> bool:
    """Whether a call only asks for a dtype, a device or a shape."""
    return getattr(func, "__name__", "") in (
        "__get__",
        "size",
        "dim",
        "numel",
        "is_floating_point",
        "__hash__",
        "__len__",
    )


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
        with trial(module, gradients=False):
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
