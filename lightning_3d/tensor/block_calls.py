"""Recording of one batch: the arguments of each block's calls, on which a plan is proven."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import WritesError
from lightning_3d.module.torch_private import forward_hooks, forward_pre_hooks, in_transform, own_parameters, uncompiled
from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks.agreement import raise_if_alone
from lightning_3d.sandbox.first_batch import STEPS, FirstBatch, step_arguments
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule, assigns_data, is_users
from lightning_3d.sandbox.trees import leaves, loss_of
from lightning_3d.sandbox.trial import kept_outside, trial, undone_effects
from lightning_3d.sandbox.writes import IN_SHARDS, NoteReads, check_places, fits, owners_of, step_writes
from lightning_3d.tensor.blocks import find_blocks
from lightning_3d.tensor.sample import Sample, form_of, recorded

# Heads of a module: linears as wide as an embedding has rows, whose results no other product takes.
#
# The width alone says little: a fused matrix of queries, keys and values may be as wide by chance, and feeds a product.


class NoteHeads(Rule):
    """Follow the results of such linears of `module`, to find those that no other product takes."""

    def __init__(self, module: nn.Module) -> None:
        rows = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
        self.names: dict[nn.Module, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, nn.Linear) and child.out_features in rows:
                self.names.setdefault(child, []).append(name)
        self.handles = [child.register_forward_hook(self._ran) for child in self.names]
        self.called, self.taken = set[nn.Module](), set[nn.Module]()
        self.origins: Any = WeakTensorKeyDictionary()
        """The linears from which a tensor was computed."""

    @property
    def found(self) -> frozenset[str]:
        return frozenset(name for head in self.called - self.taken for name in self.names[head])

    def _ran(self, head: nn.Module, _: Any, result: Any) -> None:
        self.called.add(head)
        self.origins.update({tensor: frozenset((head,)) for tensor in _floating(result)})

    def after(self, call: Call, result: Any) -> None:
        if not self.called:
            return
        operands = list(_floating((call.args, call.kwargs)))
        origins = frozenset[nn.Module]().union(*(self.origins.get(tensor, ()) for tensor in operands))
        if any(isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in operands):
            self.taken |= origins
        elif origins:
            changed = operands[:1] if call.name == "__setitem__" else []
            self.origins.update(dict.fromkeys((*_floating(result), *changed), origins))


def _floating(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


FORMS = 4
"""Most forms of calls that are recorded for a block."""


@dataclass(frozen=True)
class Recording:
    """Record of one run of a module."""

    samples: Mapping[str, tuple[Sample, ...]]
    """The first call of each form of each block, by name."""
    elsewhere: frozenset[str]
    """Parameters of embeddings and linears that were used outside their own module's forward."""
    opened: Mapping[str, str]
    """Blocks that ranks do not divide, for the way in which they were called -> why."""
    hooked: frozenset[str]
    """Blocks in which the step had registered hooks of its own (adapters that get values of the whole batch)."""
    heads: frozenset[str]
    """Linears as wide as an embedding has rows, whose results no other product took."""


class CallRecorder:
    """Records the calls of `module`'s blocks. One recorder may record several runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.complete = False
        """True once a run was recorded to its end."""
        self._calls: dict[str, dict[Any, Sample]] = {}
        self._elsewhere: dict[str, None] = {}
        self._opened: dict[str, str] = {}
        self._hooked: set[str] = set()
        self._heads: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        module, units = self.module, find_blocks(self.module)
        users, opened, heads = _Users(module), _OpenedBlocks(module, units), NoteHeads(module)
        reads, known = NoteReads(users.names, users.elsewhere), {name: id(x) for name, x in module.named_parameters()}
        notes = [
            module.get_submodule(name).register_forward_pre_hook(_recorder(self._calls, name), with_kwargs=True)
            for name in units
        ]
        try:
            with uncompiled(module), Interceptor(reads, heads, opened):
                yield
            check_places(module, known)
            self.complete = True
        finally:
            for handle in (*users.handles, *opened.handles, *heads.handles, *notes):
                handle.remove()
            self._elsewhere |= reads.found
            self._opened |= opened.found
            self._hooked |= opened.hooked
            self._heads |= heads.found

    def result(self) -> Recording:
        """The record of the runs up to now."""
        samples = {name: tuple(forms.values()) for name, forms in self._calls.items()}
        found = frozenset(self._elsewhere), dict(self._opened), frozenset(self._hooked), frozenset(self._heads)
        return Recording(samples, *found)


def record_calls(
    module: nn.Module,
    run: Callable[[], Any],
    recorder: CallRecorder | None = None,
    *,
    evaluates: bool = True,
    gradients: bool = False,
) -> Recording:
    """Record the calls of `module`'s blocks during `run()`, which passes one batch through it.

    It runs in the current mode and in eval mode. Its effects are undone.
    """
    recorder = recorder or CallRecorder(module)
    modes = [(vars(child), "training", child.training) for child in module.modules()]
    with torch.set_grad_enabled(gradients), undone_effects(module), replaced_entries(modes):
        if not recorder.complete:
            with recorder.recording():
                run()
        if module.training and evaluates:
            module.eval()
            with suppress(Exception), recorder.recording():  # only for more forms: other calls compute unsplit
                run()
    return recorder.result()


@cache
def _is_on_each(name: str) -> bool:
    """Return True for a function (`mul_`, `__imul__`) that changes each element by itself."""
    plain = f"{name[3:-2]}_" if name.startswith("__i") else name
    operation = getattr(torch.ops.aten, plain, None)
    overloads = [] if operation is None else [getattr(operation, each) for each in operation.overloads()]
    # torch 2.13 does not tag the four
    return plain in ("copy_", "fill_", "masked_fill_", "zero_") or any(torch.Tag.pointwise in x.tags for x in overloads)


class _OpenedBlocks(Rule):
    """Notes blocks of which a module is called while the block itself is not, blocks that a transform calls, and those
    whose weights the step changes otherwise than element by element: a part of shards is a copy, and the backward
    would compute with what is assigned to their `.data`.
    """

    def __init__(self, module: nn.Module, units: list[str]) -> None:
        self.found: dict[str, str] = {}
        self.hooked: set[str] = set()
        self.handles: list[Any] = []
        self._running: list[str] = []
        self._held: list[list[tuple[Any, list[int]]]] = []
        """Of each running block: the dicts and lists among its arguments, and the ids of their entries."""
        homes: dict[nn.Module, list[str]] = {}
        self.named, self.homes = module.named_parameters, dict[Tensor, str]()
        for name in units:
            unit = module.get_submodule(name)
            begin = partial(self._begin, name, unit, _hooks(unit))
            self.handles.append(unit.register_forward_pre_hook(begin, with_kwargs=True))
            self.handles.append(unit.register_forward_hook(self._end, always_call=True))
            self.homes |= dict.fromkeys(unit.parameters(), name)
            for inner in unit.modules():
                if inner is not unit and own_parameters(inner):
                    homes.setdefault(inner, []).append(name)
        for inner, names in homes.items():
            self.handles.append(inner.register_forward_pre_hook(lambda *_, names=names: self._called(names)))

    def _begin(self, name: str, block: nn.Module, own: set[int], unit: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, MutableMapping | list))
        self._held.append([(each, _ids(each)) for each in given])
        if _hooks(unit) - own:
            self.hooked.add(name)
        if unit is not block:
            self.found[name] = "a copy of it is called, which has its hooks and weights of its own"
        if in_transform():
            self.found[name] = "it is called in a transform of torch.func, which cannot follow messages"

    def _end(self, *_: Any) -> None:
        name = self._running.pop()
        if any(_ids(each) != before for each, before in self._held.pop()):
            self.found[name] = "it writes into a dict or a list that it is given, and other code reads that"

    def before(self, call: Call) -> Call:
        for tensor, _ in call.targets:
            for name, weight in owners_of(self.named, [tensor]):
                whole, assigned = tensor.numel() == weight.numel(), assigns_data(call.func)
                if assigned and not fits(*call.args):
                    raise step_writes(name, IN_SHARDS)
                on_each = not tensor.requires_grad if assigned else whole and _is_on_each(call.name)
                if weight in self.homes and not on_each:
                    self.found[self.homes[weight]] = "the step changes a weight, and not element by element"
        return call

    def _called(self, names: list[str]) -> None:
        if not set(names).intersection(self._running):
            self.found.update(dict.fromkeys(names, "modules inside it are called from outside"))


def _ids(container: Any) -> list[int]:
    return [*map(id, container if isinstance(container, list) else container.values())]


def _hooks(unit: nn.Module) -> set[int]:
    """Ids of the hooks of users and of libraries that get the arguments, or results inside, of modules of `unit`."""
    before = [hook for inner in unit.modules() for hook in forward_pre_hooks(inner).values()]
    after = [hook for inner in unit.modules() if inner is not unit for hook in forward_hooks(inner).values()]
    return {id(hook) for hook in (*before, *after) if is_users(hook)}


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
            for own, parameter in own_parameters(owner).items():
                if parameter is not None:
                    self.names.setdefault(parameter, []).append(f"{name}.{own}" if name else own)
                    self.owners.setdefault(parameter, []).append(owner)
            self.handles.append(owner.register_forward_pre_hook(lambda m, *_: self.running.append(m)))
            self.handles.append(owner.register_forward_hook(self._leave, always_call=True))

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def elsewhere(self, parameter: nn.Parameter, func: Any) -> bool:
        """Return True if `func` reads `parameter` outside the forward of its owner.

        The forward of an embedding of a class of its own may only look up. In a transform no rank may send.
        """
        owner = next((item for item in self.owners[parameter] if item in self.running[-1:]), None)
        return owner is None or in_transform() or (isinstance(owner, nn.Embedding) and func is not F.embedding)


def _recorder(calls: dict[str, dict[Any, Sample]], name: str) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forms, form = calls.setdefault(name, {}), form_of((args, kwargs))
        if form not in forms and len(forms) < FORMS:
            forms[form] = recorded(args, kwargs, module.training)

    return record


def records(module: LightningModule) -> bool:
    """Return True where `record_one_batch` runs a step."""
    return module.automatic_optimization and bool(find_blocks(module))


def record_one_batch(
    first_batch: FirstBatch,
    module: LightningModule,
    to_device: Callable[[Any], Any],
    recorder: CallRecorder | None = None,
) -> Recording | None:
    """Run the coming step on its first batch, without gradients where it can, and record the calls of the blocks.

    Nothing is changed or logged. None where there is no block to split, or the step cannot run before training.
    """
    if not records(module):
        return None
    trainer = first_batch.trainer
    assert trainer.state.fn is not None
    step, fits, problem = getattr(module, STEPS[trainer.state.fn]), trainer.state.fn == TrainerFn.FITTING, ""
    kept = loss_of if fits else lambda _: None  # predictions may be anything
    for gradients in (False, True) if fits else (False,):  # some steps differentiate by themselves (meta-learning)
        losses, first = list[Tensor | None](), recorder is None or not recorder.complete
        try:
            read = first_batch()  # outside of the trial: it would put a stream on the module back too
            with trial(module, gradients=gradients):
                batch = to_device(read)
                run = lambda: losses.append(kept(step(*step_arguments(step, batch))))  # noqa: B023, E731
                recording = record_calls(
                    module, run, recorder, evaluates=trainer.enable_validation, gradients=gradients
                )
            if fits and first:
                with trial(module, gradients=gradients):  # uncompiled: compiled code may draw other numbers
                    batch = to_device(first_batch())
                    check_same(losses, run)
            return recording
        except WritesError:
            raise
        except Exception as error:
            raise_if_alone(error)
            problem = problem or f"{type(error).__name__}: {error}"
    rank_zero_warn(
        f"{STEPS[trainer.state.fn]} could not run on one batch before training ({problem}). The arguments of the blocks"
        " are guessed from their sizes instead; blocks that take more than one tensor stay unsplit."
    )
    return None


def check_same(losses: Sequence[Tensor | None], run: Callable[[], None]) -> None:
    """Raise where another run of a step, which adds to `losses`, has another loss than the first on that batch."""
    run()
    first, again = losses[0], losses[-1]
    if first is None or again is None or not first.is_floating_point():
        return
    # kernels of a device may add in another order in each run
    least = min(100 * torch.finfo(first.dtype).eps, 1e-2) if first.is_cpu else 1e-2
    if not torch.allclose(first, again, rtol=least, atol=least, equal_nan=True):
        raise kept_outside(f"training_step has the loss {float(first):.6g}, and {float(again):.6g}")
