"""The user's hooks between steps, each run in `HookRules`; callbacks and loops of Lightning that work on shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from lightning_3d.errors import NO_PIPELINE, LateWrites, UnsupportedError, changed_late, explain_writes, is_meta_error
from lightning_3d.launch.lightning_private import logged_values
from lightning_3d.module.torch_private import own_parameters, version_of
from lightning_3d.module.undo import Change, UndoStack, replaced_attributes
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule, is_users, storage
from lightning_3d.usercode.averages_private import AVERAGES
from lightning_3d.usercode.between_steps import HookRules, on_another_stage
from lightning_3d.usercode.remote_numbers import RemoteNumbers
from lightning_3d.zero.changed_weights import RefuseFreed
from lightning_3d.zero.data_parallel import DataParallel

_PLACES = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_eval", "model_train")
_BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
"""Hooks after a forward. What they write goes to shards, and the backward has the gathered values of the forward."""
HOOKS = (
    "on_fit_start", "on_sanity_check_start", "on_sanity_check_end",
    "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer",
    *(f"on_{kind}_{at}" for kind in ("validation", "test", "predict") for at in _PLACES),
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "on_save_checkpoint",
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "lr_scheduler_step",
    *_BEFORE_BACKWARD, "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip
_OF_GRADIENTS = (*_BEFORE_BACKWARD, "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_STEP = "optimizer_step"
"""Hook around the user's step, its backward and the optimizer's step, which are no part of it."""


def adapt_user_code(
    module: LightningModule,
    callbacks: Sequence[Callback],
    parallel: Callable[[], ParallelModule | None],
    data: Callable[[], DataParallel],
    undo: UndoStack,
    *,
    together: bool,
) -> None:
    """Let the user's hooks and callbacks and Lightning's loops work on shards: hooks run in `HookRules`.

    Weights that an evaluation or a window keeps gathered are sharded again by `data`: writes to gathered ones are lost.
    With `together` a forward is of several ranks: what rank 0 alone would run is left out.
    """
    finetune_by_identity(undo)
    loops: Any = module.trainer
    # a parameter that is first gathered under `inference_mode` cannot be trained afterwards
    for loop in (loops.validate_loop, loops.test_loop, loops.predict_loop, loops.fit_loop.epoch_loop.val_loop):
        undo.set(loop, "inference_mode", False)
    for owner in (module, *callbacks):
        for name in HOOKS:
            hook = getattr(owner, name, None)  # those of the sanity check are of callbacks only
            if hook is None:
                continue
            watched = is_users(hook) or (isinstance(owner, AVERAGES) and is_overridden(name, owner))
            if watched and not hasattr(hook, _WATCHED):  # a fit within another one watches it already
                ours = _watched(hook, f"{type(owner).__name__}.{name}", module, parallel, data)
                undo.set(owner, name, ours)
        if isinstance(owner, ModelSummary):
            undo.set(owner, "on_fit_start", _without_example(owner.on_fit_start, parallel))
    for logger in module.trainer.loggers if together else ():
        undo.set(logger, "log_graph", _without_graph(logger.log_graph))


class _ExampleRun(Exception):
    """Raised where a logger asks for an example to run."""


def _without_graph(log_graph: Callable[..., None]) -> Callable[..., None]:
    """`log_graph`, which warns in place of a run of the module: a logger runs on rank 0, and others do not answer."""

    def ask(_: LightningModule) -> None:
        raise _ExampleRun

    @wraps(log_graph)
    def run(model: LightningModule, input_array: Any = None) -> None:
        try:
            with replaced_attributes(type(model), example_input_array=property(ask)):
                log_graph(model)
        except _ExampleRun:
            rank_zero_warn(
                f"{log_graph.__qualname__} runs the module on rank 0 alone, and here ranks run it together: no graph is"
                " logged. Log it ahead of Trainer.fit: logger.log_graph(module, module.example_input_array)."
            )

    return run


def _without_example(
    summarize: Callable[..., None], parallel: Callable[[], ParallelModule | None]
) -> Callable[..., None]:
    """`summarize`, which under a pipeline does not run `example_input_array`: no stage has all blocks."""

    @wraps(summarize)
    def run(trainer: Any, module: LightningModule) -> None:
        placed = parallel()
        cut = placed is not None and placed.stages is not None
        with replaced_attributes(type(module), example_input_array=None) if cut else nullcontext():
            summarize(trainer, module)

    return run


def _write_back(name: str, changed: Iterable[tuple[nn.Parameter, Tensor, Tensor, bool]]) -> None:
    """Give shards what the hook wrote into tensors of `state_dict()`, which on one device are no copies."""
    for _, shard, value, stayed in changed:
        if stayed:
            with torch.no_grad():
                shard.copy_(value)
        elif not torch.equal(local(value), local(shard)):
            raise UnsupportedError(
                f"{name} changes a tensor of state_dict() that an earlier hook or step has kept, or also what it is of,"
                " or that of another state. On one device they are one; here each state has a full copy. Change a"
                " tensor of state_dict() called here, and nothing else of it. Or keep clones."
            )


@contextmanager
def _written_alike(name: str, state: Mapping[str, Any]) -> Iterator[None]:
    """Raise where some ranks alone change in place what they all have of a checkpoint's `state`. Collective."""
    tensors = {key: each for key, each in state.items() if isinstance(each, Tensor) and not each.is_inference()}
    before = {key: version_of(each) for key, each in tensors.items()}
    yield
    written = {key for key, each in tensors.items() if before[key] != version_of(each)}
    somewhere = set[str]().union(*talk.gather(written))
    if somewhere and talk.any_rank(not written >= somewhere & tensors.keys()):
        raise UnsupportedError(
            f"{name} changes tensors of the checkpoint in place on some ranks alone ({min(somewhere)!r}). They are the"
            " weights' own memory on one device, so weights change too, and here those of some ranks. Put changed"
            " copies into checkpoint['state_dict'], or change them on every rank."
        )


_WATCHED = "lightning_3d_watched"
"""Attribute of a hook that the rules follow."""


def _watched(
    hook: Callable[..., Any],
    name: str,
    module: LightningModule,
    parallel: Callable[[], ParallelModule | None],
    data: Callable[[], DataParallel],
) -> Callable[..., Any]:
    read: set[str] = set()
    outside = partial(_shards_outside_calls, data, name, read)
    kind = name.rpartition(".")[2]
    # averages swap weights by `.data`, which torch does not count
    averages = isinstance(getattr(hook, "__self__", None), AVERAGES)

    @wraps(hook)  # Lightning looks at what it takes
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as shards:
            shards.enter_context(outside())
            return watched(shards, *args, **kwargs)

    def watched(shards: ExitStack, *args: Any, **kwargs: Any) -> Any:
        placed, now, trainer = parallel(), data().gathered, module.trainer
        numbers = None
        if placed is not None and placed.stages is not None and not averages:
            own = name, placed.stages, placed.parameters, read
            numbers = RemoteNumbers(*own, of_gradients=kind in _OF_GRADIENTS)
        late = kind in _BEFORE_BACKWARD
        divided = [(local(each), each) for each in module.parameters() if late and isinstance(each, DTensor)]
        before = {shard: version_of(shard) for _, shard in (*now(), *divided)}
        again: Iterable[Tensor] = data().used_again() if late else ()
        if late and numbers is not None:  # the backward of a pipeline has been
            again = *module.parameters(), *before
        kept = {each: _value_of(each, numbers is not None) for each in again}
        own_rules = HookRules(name, placed, read, now, numbers, (*kept, *before))
        rules = RefuseFreed(name), _OwnBackwards(shards, outside, data, name), own_rules
        with ExitStack() as stack, explain_writes(name), Interceptor(*rules) as watch:
            if kind == _STEP:
                args = tuple(
                    watch.outside(_without(shards, outside, each)) if callable(each) else each for each in args
                )
                for optimizer in args:
                    if isinstance(optimizer, LightningOptimizer):
                        stack.callback(Change(optimizer, "step", _step_outside(watch, optimizer.step)).revert)
            for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
                without = _without(shards, outside, loop.run)
                stack.callback(Change(loop, "run", _loop_outside(watch, loop.run, without)).revert)
            if kind != _STEP:  # torch would compile the rules with a compiled augmentation, and soon give up for good
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if placed is not None and placed.stages is not None:
                stack.enter_context(register_module_parameter_registration_hook(partial(_refuse_tie, name, placed)))
            state = args[-1].get("state_dict") if kind == "on_save_checkpoint" else None
            stack.enter_context(nullcontext() if state is None else _written_alike(name, state))
            given = None if placed is None else stack.enter_context(placed.parameters.giving(state))
            result = hook(*args, **kwargs)
            _write_back(name, () if given is None else given())
        if any(was != _value_of(each, numbers is not None) for each, was in kept.items()):
            raise changed_late(name)
        stale = [
            full for full, shard in (*now(), *divided)
            if (shard in before or not late) and before.get(shard) != version_of(shard)
        ]  # fmt: skip
        if late and stale:  # where the graph has kept them, torch refuses the backward
            LateWrites.by = name
            torch.autograd.graph.increment_version(stale)
        if (averages or stale) and not late:  # a backward needs what is gathered
            data().reshard()  # what is gathered is out of date, or the hook gathered it by calling a block
        if placed is not None and placed.stages is not None:
            check_logs(name, module)
        return result

    setattr(run, _WATCHED, True)
    return run


def _refuse_tie(name: str, placed: ParallelModule, owner: nn.Module, attribute: str, parameter: Any) -> None:
    """Raise where a hook puts one weight of the stages in the place of another: one stage alone may have both."""
    weights = [own_parameters(owner).get(attribute), parameter]
    held = [None if each is None else placed.parameters.of(each) for each in weights]
    if None not in held and held[0] is not held[1]:
        there, moved = (each.names[0] for each in held if each is not None)
        raise UnsupportedError(
            f"{name} puts {moved!r} in the place of {there!r}. Stages of the pipeline were made before, and each trains"
            f" its own. Tie weights in __init__, configure_model or setup, or use {NO_PIPELINE}."
        )


def check_logs(name: str, module: nn.Module) -> None:
    """Raise where the code `name` has logged a number of another stage: Lightning reads it much later."""
    logged = logged_values(module)
    for key, metric in logged.items():
        if isinstance(metric.value, Tensor) and metric.value.is_meta:
            logged.clear()  # Lightning moves them to the host at the end, and would fail before this error is seen
            raise on_another_stage(name, f"self.log({key.rpartition('.')[2]!r}, ...)")


def _value_of(weight: Tensor, flag: bool) -> tuple[int, int, bool]:
    """What a write to `weight` changes, and with `flag` what freezing it does."""
    return version_of(weight), storage(weight), flag and weight.requires_grad


def _step_outside(watch: Interceptor, step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of an optimizer outside of `watch`, with a closure that the code inside makes around Lightning's."""

    def run(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return watch.outside(step)(closure=closure and watch.inside(closure), **kwargs)

    return run


def _loop_outside(watch: Interceptor, run: Callable[[], Any], without: Callable[[], Any]) -> Callable[[], Any]:
    """`without`, which runs a loop of Lightning from a hook, outside of `watch`. A loop in that one is already."""
    return lambda: run() if watch.left else watch.outside(without)()


def _without(
    shards: ExitStack, outside: Callable[[], AbstractContextManager[None]], closure: Callable[..., Any]
) -> Callable[..., Any]:
    """The user's `closure` with what is gathered for it registered again in the modules, in place of `shards`."""

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        shards.close()
        try:
            return closure(*args, **kwargs)
        finally:
            shards.enter_context(outside())

    return run


@contextmanager
def configuring(data: DataParallel) -> Iterator[None]:
    """Let `configure_optimizers` call the module: it lists shards, and what the call has gathered is freed."""
    name = "configure_optimizers"
    try:
        with _shards_outside_calls(lambda: data, name, set()):
            yield
    except RuntimeError as error:
        if is_meta_error(error):
            raise on_another_stage(name, error) from error
        raise
    data.reshard()


@contextmanager
def _shards_outside_calls(data: Callable[[], DataParallel], name: str, called: set[str]) -> Iterator[None]:
    """Have modules list shards in the hook `name`, but not while one is called.

    What it gathers stays so, with the values of then. A call after a write has to gather again. Every rank must call a
    module of shards: the first time each kind of module is `called`, ranks wait for each other.
    """
    registered, depth = ExitStack(), 0
    written: dict[Tensor, int] = {}
    """How often each shard was written when it was gathered."""

    def enter(module: nn.Module, *_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            registered.close()
            if any(written[shard] != version_of(shard) for _, shard in data().gathered()):
                if name.rpartition(".")[2] in _BEFORE_BACKWARD:
                    raise changed_late(name)
                data().reshard()
            divided = (each.device_mesh for each in module.parameters() if isinstance(each, DTensor))
            if (mesh := next(divided, None)) is not None:
                talk.meet_once(f"{type(module).__name__} in {name}", mesh.mesh.flatten().tolist(), called)

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            begin()

    def begin() -> None:
        written.clear()
        written.update((shard, version_of(shard)) for _, shard in data().gathered())
        registered.enter_context(data().shards_registered())

    calls = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    with registered, calls[0], calls[1]:
        begin()
        yield


@dataclass
class _OwnBackwards(Rule):
    """Backwards that a hook calls have gradients at gathered weights. Torch could not tell the weights from shards."""

    shards: ExitStack
    outside: Callable[[], AbstractContextManager[None]]
    data: Callable[[], DataParallel]
    name: str

    def before(self, call: Call) -> Call:
        if call.func is Tensor.backward:
            return call._replace(func=_without(self.shards, self.outside, call.func))
        if call.func is torch.autograd.grad and self._uses_weights(call):
            raise UnsupportedError(
                f"{self.name} differentiates by a weight (torch.autograd.grad, {call.place}). Blocks compute with"
                " gathered weights, so the gradient by a shard would be none. Call backward() and read the .grad of the"
                " weight. Or use zero_stage=0."
            )
        return call

    def _uses_weights(self, call: Call) -> bool:
        divided = {id(each) for pair in self.data().gathered(before=True) for each in pair}
        return any(id(each) in divided for each in call.tensors())


def finetune_by_identity(undo: UndoStack) -> None:
    """Let `BaseFinetuning` find parameters by identity. `undo` reverts it.

    It compares their values. Parameters of another stage have none, and for shards that takes a collective. Its
    `filter_on_optimizer` was read in Lightning 2.6.
    """
    original = BaseFinetuning.__dict__["filter_on_optimizer"]

    def new_ones(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = list(params)
        new = [parameter for parameter in found if id(parameter) not in known]
        if len(new) < len(found):  # one parameter that an optimizer has gives Lightning's own warning
            one = nn.Parameter(torch.zeros(()))
            original.__func__(torch.optim.SGD([one]), [one])
        return new

    undo.set(BaseFinetuning, "filter_on_optimizer", staticmethod(new_ones))
