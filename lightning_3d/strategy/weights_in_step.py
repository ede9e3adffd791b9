"""Weights in the code of a step: full numbers of shards, and words for writes that would be lost."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import UnsupportedError, explain_shard_errors, explain_writes
from lightning_3d.module.torch_private import in_backward, no_subclasses, no_torch_function, tree_map, version_of
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.pipeline.observe_batch import PER_MICROBATCH
from lightning_3d.sandbox import writes
from lightning_3d.sandbox.interceptor import ASKS, Call, Interceptor, storage
from lightning_3d.strategy.one_run import Run
from lightning_3d.usercode.between_steps import HookRules
from lightning_3d.zero.changed_weights import WHY


def watch_weights(run: Run) -> None:
    """Watch what code reads of shards, and writes to weights, until the end of the run."""
    here = weakref.proxy(run)  # caches keep functions
    run.undo.set(Tensor, "data", writes.watched_data(partial(_note_data, here), partial(_check_assigned, here)))
    if not run.module.automatic_optimization:
        gathered = writes.grad_of_shards(lambda: run.data.gathered(before=True), lambda: run.step)
        run.undo.set(nn.Parameter, "grad", gathered)
    for name, method in writes.watched_arrays(partial(_is_copied, here)).items():
        run.undo.set(Tensor, name, method)
    run.undo.set(DTensor, "__torch_function__", _ShardsInStep(run))


@dataclass
class _ShardsInStep:
    """The `__torch_function__` of shards: rules for the code of a step, and torch's own, which does nothing, elsewhere.

    Blocks compute with plain tensors: a step whose code leaves shards alone pays for attributes that are read of them.
    """

    run: Run
    read: set[str] = field(default_factory=set)

    def __get__(self, shard: Any, kind: Any = None) -> Any:
        return _without_reads if in_backward() else self._follow if self.run.step else no_torch_function

    def _follow(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_subclasses():
            views = ("data", "T", "mT", "H", "mH")
            if func.__name__ == "__get__" and getattr(func.__self__, "__name__", "data") not in views:
                return func(*args, **(kwargs or {}))
            rules = HookRules(self.run.step, self.run.placed, self.read)
            call = rules.read_in_full(Call(func, args, kwargs or {}, sys._getframe(1), ()), graph=True)
            with rules.shards or nullcontext():
                result = Interceptor(*self.run.data.rules).__torch_function__(func, types, call.args, call.kwargs)
                return tree_map(lambda leaf: rules.plain(leaf, call.caller), result)


def _without_reads(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if ASKS.get(func.__name__, "hook") not in ("hook", "comparison"):
        raise UnsupportedError(
            f"A hook of the backward, or what is recomputed there, reads numbers of a weight ({func.__name__}) of which"
            " each rank has a shard, so it would get those of its part. Read them in on_after_backward or"
            " on_before_optimizer_step, or use zero_stage=0 and tensor_parallel_size=1."
        )
    return no_torch_function(func, types, args, kwargs or {})


def _note_data(run: Run, tensor: Tensor, data: Tensor) -> None:
    if run.step:
        itself = isinstance(tensor, nn.Parameter)
        of = [tensor] if itself else [each for _, each in writes.owners_of(run.module.named_parameters, [tensor])]
        run.data_read += [(each, data) for each in of]


def _is_copied(run: Run, tensor: Tensor) -> bool:
    """True for memory of weights in shards, of gathered ones in a step, and of what states give."""
    if run.parallel is None:
        return False
    weights: list[Any] = [*(run.parallel.parameters.given or ())]
    if run.step or in_backward():
        weights += [full for full, _ in run.data.gathered()]
    if isinstance(tensor, DTensor):
        weights += [each for weight in run.module.parameters() for each in (weight, weight.grad)]
    memory = storage(tensor)
    return any(storage(each) == memory for each in weights if isinstance(each, Tensor))


def _check_assigned(run: Run, tensor: Tensor, value: Tensor) -> None:
    """Raise where a step assigns to a parameter of which it uses other values until its end."""
    if run.step and isinstance(value, DTensor) and not isinstance(tensor, DTensor):  # torch would end the process
        raise writes.step_writes("a gathered weight", "by the `.data` of its shard, taken before it was gathered")
    if not run.step:
        return
    _refuse_lost(run, [tensor])
    trained = run.module.automatic_optimization and tensor.requires_grad
    if run.step == "training_step" and isinstance(tensor, DTensor) and (trained or not writes.fits(tensor, value)):
        raise writes.step_writes(_names(run).get(id(tensor), "a weight"), writes.IN_SHARDS)


@contextmanager
def in_step(run: Run, step: str = "training_step") -> Iterator[None]:
    """The context of a step. Raises where it changes weights in a way that is lost, whenever it begins to."""
    loads = nullcontext() if step == "training_step" else writes.loads_refused(run.module, step, run.chosen)
    try:
        with explain_shard_errors(run.chosen, step), loads, _writes_checked(run, step):
            yield
        run.broke = False
    except BaseException:
        run.broke = True
        raise


@contextmanager
def _writes_checked(run: Run, step: str) -> Iterator[None]:
    watched = [*run.module.parameters()] if run.chosen.pipelined and step == "training_step" else []
    before = [version_of(parameter) for parameter in watched]
    now = replaced_attributes(run, step=step, data_read=[])
    with now, explain_writes(step), run.placed.parameters.giving() as given:
        yield
        for parameter, *_ in given():
            name = _names(run).get(id(parameter), "a weight")
            raise writes.step_writes(name, "by state_dict(), which gives full copies here")
        written = [each for each, data in run.data_read if not data.is_inference() and version_of(data)]
        changed = [each for each, version in zip(watched, before, strict=True) if version_of(each) != version]
        if changed:  # a look-up shortens the rows that it reads
            limited = {id(each.weight) for each in run.module.modules() if getattr(each, "max_norm", None) is not None}
            written += [each for each in changed if id(each) not in limited]
        _refuse_lost(run, written)


def _refuse_lost(run: Run, written: Sequence[Tensor]) -> None:
    layout, data, names = run.chosen, run.data, _names(run) if written else {}
    gathered = {id(full) for full, _ in data.gathered()} if written else set()
    for each in written:
        kept = layout.zero_stage == 3 or not layout.shards_data
        if id(each) in names and layout.pipelined and run.step == "training_step":
            raise writes.step_writes(names[id(each)], PER_MICROBATCH)
        if id(each) in gathered or (id(each) in names and isinstance(each, DTensor) and not kept):
            raise writes.step_writes(names[id(each)], WHY)


def _names(run: Run) -> dict[int, str]:
    """The names of parameters, by the ids of those that are registered and of the shards of gathered ones."""
    names = {id(each): name for name, each in run.module.named_parameters()}
    return names | {id(shard): names[id(full)] for full, shard in run.data.gathered() if id(full) in names}
