"""FSDP2's private state of one unit: its memory, and the times at which it is read, freed and reduced.

Read in the versions of torch that fsdp_private.py names.
"""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import in_transform, is_memory_shared, outside_transforms
from lightning_3d.module.undo import UndoStack, replaced_entries
from lightning_3d.offload.disk_tensors import without_base
from lightning_3d.sandbox.trees import SIMPLE, leaves, map_leaves, rebuild
from lightning_3d.zero.fsdp_private import places, register_gathered, registered, replace

_LOOKS = 3
"""Forwards after which a unit that returned none of its arguments is not looked at any more."""


def in_forward(group: Any) -> bool:
    """Return True in the forward of the group's module."""
    return bool(group._training_state == TrainingState.FORWARD)


def not_in_backward(group: Any) -> None:
    """Have no backward gather `group`: gradients of a look-up do not depend on the weight."""
    group.unshard_in_backward = False


def is_freed_kept(groups: Iterable[Any]) -> bool:
    """Return True where code has a freed parameter, or tensors of its memory beside FSDP2's buffer and the parameter.

    So has a graph that is kept without a backward. Costs a microsecond for each parameter.
    """
    for param in (param for group in groups for param in group.fsdp_params if param.all_gather_outputs):
        memory = param.all_gather_outputs[0].untyped_storage()
        if not memory.nbytes() and (is_memory_shared(memory, 2) or sys.getrefcount(param._unsharded_param) > 2):
            return True
    return False


def keep_gathered(group: Any) -> None:
    """Have `group` stay gathered from a gather to the end of backward, as the root's is."""
    group.post_forward_mesh_info, group.unshard_in_backward = None, True


def free_in_backward(group: Any, on: bool) -> None:
    """Have a backward free `group` after it has reduced its gradients, or not."""
    group.reshard_after_backward = on


def reduce_in_backward(group: Any, may: Callable[[], bool], noted: Callable[[], None]) -> None:
    """Have a call reduce gradients when backward has passed it if `may()`; else the end of backward does."""
    original = group._register_post_backward_hook

    def register(args: Any, kwargs: Any) -> Any:
        if not may():
            return args, kwargs
        found = original(args, kwargs)
        if found[0] is not args:  # an input needs a gradient
            noted()
        return found

    group._register_post_backward_hook = register


def keep_in_transforms(group: Any) -> None:
    """Keep `group` gathered to the end of backward from a call in a transform of `torch.func` on, and reduce it there.

    FSDP2 sees no backward of tangents, and its own function has no derivative in forward mode. It gathers outside of
    the transform, which would wrap its buffers.
    """
    original = group._register_post_backward_hook

    def register(args: Any, kwargs: Any) -> Any:
        if not in_transform():
            return original(args, kwargs)
        keep_gathered(group)
        return args, kwargs

    group._register_post_backward_hook = register
    unshard, wait = group.unshard, group.wait_for_unshard

    def starts(async_op: bool = False) -> None:
        with outside_transforms():
            unshard(async_op)

    def ends() -> None:
        with outside_transforms():
            wait()

    group.unshard, group.wait_for_unshard = starts, ends


def note_second_order(group: Any, noted: Callable[[], None]) -> None:
    """Call `noted` before a backward with a graph of its own (`create_graph`) reaches `group`."""
    original = group.pre_backward

    def pre_backward(*prefetch: Any) -> None:
        if torch.is_grad_enabled():
            noted()
        original(*prefetch)

    group.pre_backward = pre_backward


def hook_outputs(state: Any) -> None:
    """Have a backward gather the unit when it reaches its outputs, which may be views.

    FSDP2 warns of views, which a linear layer returns for three dimensions: an in-place operation on one (a ReLU) drops
    its hook, and backward would read freed memory. The hook of the tensor that it is a view of stays. That tensor gets
    none if it is a leaf: a parameter would keep one of each step, and torch refuses one where no gradient is needed.
    """
    original = state._register_pre_backward_hook

    def register(output: Any) -> Any:
        if in_transform():
            return original(output)
        for leaf in leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                for each in (leaf,) if leaf._base is None or leaf._base.is_leaf else (leaf, leaf._base):
                    each.register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = register


def reduce_late(group: Any) -> None:
    """Have the end of the running backward reduce the group's gradients, also those after an earlier reduction."""
    if group._training_state == TrainingState.POST_BACKWARD:
        group._training_state = TrainingState.IDLE


def shard_memory(param: Any) -> tuple[Tensor, Tensor]:
    """Return the memory of a shard, with the rows that pad it, and the shard in it, from now on no views."""
    param._sharded_param_data = without_base(param._sharded_param_data)
    param.sharded_param._local_tensor = without_base(param.sharded_param._local_tensor)
    return param._sharded_param_data, param.sharded_param._local_tensor


def around_gather(group: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call `before(group)` before its shards are read for a gather, and `after(group)` once they are not needed."""
    unshard, wait = group.unshard, group.wait_for_unshard
    alone = group._all_gather_process_group.size() == 1  # FSDP2 copies it, and only while it waits

    def starts(async_op: bool = False) -> None:
        if not alone and group._all_gather_result is None and not group.is_unsharded:
            before(group)
        unshard(async_op)

    def ends() -> None:
        if alone and group._all_gather_result is not None:
            before(group)
        wait()
        after(group)

    group.unshard, group.wait_for_unshard = starts, ends


def complete(group: Any, active: Callable[[], bool], note: Callable[[Any, Sequence[Any]], None]) -> None:
    """Have `group` reduce zeros for the parameters that have no gradient, while `active`, and `note` these."""
    original = group.post_backward
    trained: set[Any] = set()
    """Parameters that were trainable earlier in a window. Another rank may have gradients of those that froze since."""

    def post_backward(*unused: Any) -> None:
        if not group.reduce_grads:
            trained.update(param for param in group.fsdp_params if param.sharded_param.requires_grad)
        elif active():
            missing = [param for param in group.fsdp_params if _lacks_gradient(param, trained)]
            trained.clear()
            note(group, missing)
            for param in missing:
                full = param._unsharded_param
                full.grad = torch.zeros_like(full, dtype=full.grad_dtype)  # torch 2.15 gives it the dtype of reduction
        original(*unused)

    group.post_backward = post_backward


def _lacks_gradient(param: Any, trained: Container[Any]) -> bool:
    full = getattr(param, "_unsharded_param", None)  # which comes with the first gather
    if full is None or not (full.requires_grad or param in trained):
        return False
    return full.grad is None and param.unsharded_accumulated_grad is None


def with_full_gradients(groups: Iterable[Any]) -> Iterator[Any]:
    """Yield the shards of parameters whose gathered copies have a gradient, which no backward has reduced."""
    for param in (param for group in groups for param in group.fsdp_params):
        if hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None:
            yield param.sharded_param


@contextmanager
def shards_registered(groups: Iterable[Any], *, freed: bool) -> Iterator[None]:
    """Have modules list shards inside, with the flags and gradients of what is gathered, which stays so. `freed`
    parameters may have gradients of a window too.
    """
    params = ((group, param) for group in groups if freed or group.is_unsharded for param in group.fsdp_params)
    # on another device a shard cannot have its gradient
    here = [each for each in params if each[1].device == each[1].sharded_param.device]
    before = [(*_with_gradient(param), param.sharded_param.grad) for _, param in here]
    for (group, param), (*_, grad, own) in zip(here, before, strict=True):
        if group.is_unsharded:
            shard = param.sharded_param.requires_grad_(param._unsharded_param.requires_grad)
            if registered(param) is param._unsharded_param:  # else `torch.func.functional_call` has another there
                replace(param, shard)
        param.sharded_param.grad = own if grad is None else grad
    try:
        yield
    finally:
        for (_, param), (owner, name, grad, own) in zip(here, before, strict=True):
            now = param.sharded_param.grad
            if grad is not None:
                setattr(owner, name, getattr(owner, name) if now is grad else now)
                param.sharded_param.grad = now if now is None or own is grad else own  # a hook may call another
        for group in {id(group): group for group, _ in here if group.is_unsharded}.values():
            register_gathered(group)


def _with_gradient(param: Any) -> tuple[Any, str, Tensor | None]:
    """The owner and the name of the attribute that has the gradient of `param` until it is reduced, and its value."""
    full = getattr(param, "_unsharded_param", None)  # which comes with the first gather in its dtype
    if full is None or param.unsharded_accumulated_grad is not None:
        return param, "unsharded_accumulated_grad", param.unsharded_accumulated_grad
    return full, "grad", full.grad


def gradients_stay(groups: Sequence[Any]) -> AbstractContextManager[None]:
    """Leave the gradients of backwards inside at the gathered parameters, where a trial finds them and removes them."""
    return replaced_entries((vars(group), "post_backward", lambda *_: None) for group in groups)


def stay_gathered(groups: Sequence[Any]) -> AbstractContextManager[None]:
    return replaced_entries((vars(group), "reshard_after_backward", False) for group in groups)


def watch_places(group: Any, check: Callable[[Any], None]) -> None:
    """Call `check(group)` before FSDP2 registers sharded or gathered parameters, and leave other tensors in place.

    Before a forward it registers gathered ones again where `torch.func.functional_call` has put back their shards.
    """
    wait = group.wait_for_unshard

    def watched(register: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            check(group)
            others = [
                (module._parameters, name, module._parameters.get(name))
                for param in out_of_place(group)
                for module, name in places(param)
            ]
            register()
            for owner, name, other in others:
                owner[name] = other

        return run

    def ends() -> None:
        kept = group if group.is_unsharded else None  # a new gather registers all by itself
        wait()
        if kept is not None:
            register_gathered(kept)

    group._to_sharded, group._to_unsharded = watched(group._to_sharded), watched(group._to_unsharded)
    group.wait_for_unshard = ends


def out_of_place(group: Any) -> Iterator[Any]:
    """The parameters of `group` in whose places other tensors are registered than FSDP2's own."""
    for param in group.fsdp_params:
        now, own = registered(param), vars(param)
        if now is not own["sharded_param"] and now is not own.get("_unsharded_param"):
            yield param


def keep_returned(unit: nn.Module, group: Any, undo: UndoStack) -> None:
    """Keep `group` gathered to the end of backward from a forward on of which FSDP2 cannot see the backward.

    It returns a parameter, or a view of one, as an embedding that returns all of its rows: the memory of its output
    would be freed. Or it returns an object of a class that no walk enters, so that no hook is on its tensors.
    """

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found = leaves(output)
        tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
        closed = not tensors and torch.is_grad_enabled() and any(type(leaf) not in SIMPLE for leaf in found)
        if closed or any(isinstance(each if each._base is None else each._base, nn.Parameter) for each in tensors):
            keep_gathered(group)

    undo.callback(unit.register_forward_hook(keep, prepend=True).remove)


_FREES = (
    "{unit}.forward frees the memory of a tensor that it is given, as reversible blocks do. ZeRO gives a block another"
    " tensor of the same memory. Backward would fill that one again, and the block before would compute with what"
    " happens to be in its own. Have blocks keep their inputs (memcnn: keep_input=True), or use zero_stage=0."
)


def return_arguments(unit: nn.Module, group: Any, undo: UndoStack) -> None:
    """Have `unit` return the tensors that it was given where its forward returns its arguments.

    FSDP2 gives it others, so that it sees the end of its backward. A later unit that differentiates an energy by the
    positions, both from one dict, would have positions on which that energy does not depend. A unit that returned none
    of its arguments in the first forwards is not looked at any more: that takes a walk through what goes in and out.
    A unit that frees what it is given is refused. One gets its own dicts and lists, so that it may write into them.
    """
    given: dict[int, tuple[Any, Any]] = {}
    placed: list[tuple[Any, Any, Any, Any]] = []
    left: float = _LOOKS

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(args: Any, kwargs: Any) -> Any:
            found = original(args, kwargs)
            given.clear()  # of a forward that has raised
            empty()
            if found[0] is args and found[1] is kwargs:
                return found
            if left:
                news, olds = leaves(found), leaves((args, kwargs))
                if len(news) == len(olds):  # FSDP2 may rebuild a container of another library in another form
                    given.update({id(new): (new, own) for new, own in zip(news, olds, strict=True) if new is not own})
            return tuple(_in_own(own, new, placed) for own, new in zip((args, kwargs), found, strict=True))

        return register

    def empty(*_: Any) -> None:
        for container, key, new, old in placed:
            with suppress(KeyError, IndexError):
                if container[key] is new:
                    container[key] = old
        placed.clear()

    def put_back(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal left
        tensors = (new for new, _ in given.values() if isinstance(new, Tensor))
        if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
            raise UnsupportedError(_FREES.format(unit=type(module).__name__))
        # FSDP2 has a hook of its own on an output, which begins its backward.
        own = {at: old for at, (new, old) in given.items() if len(new._backward_hooks or ()) <= 1}
        if given:
            given.clear()
            returned = map_leaves(lambda leaf: own.get(id(leaf), leaf), output)
            left = left - 1 if returned is output else float("inf")
            output = returned
        if not left:
            hook.remove()
        return output

    # FSDP2 sees the end of a unit's backward by the tensors that this function gives it.
    group._register_post_backward_hook = wrap(group._register_post_backward_hook)
    undo.callback(unit.register_forward_hook(empty).remove)
    hook = unit.register_forward_hook(put_back)
    undo.callback(hook.remove)


def _in_own(own: Any, new: Any, placed: list[tuple[Any, Any, Any, Any]]) -> Any:
    """`new`, which FSDP2 has rebuilt from `own`, in the dicts and lists of `own`. `placed` notes what they got."""
    if type(own) is not type(new) or not isinstance(own, dict | list | tuple):
        return new
    keys = list(own) if isinstance(own, dict) else range(len(own))
    inner = {key: _in_own(own[key], new[key], placed) for key in keys}
    if isinstance(own, tuple):
        return new if all(inner[at] is new[at] for at in keys) else rebuild(own, list(inner.values()))
    for key, value in inner.items():
        if value is not own[key]:
            placed.append((own, key, value, own[key]))
            own[key] = value
    return own
