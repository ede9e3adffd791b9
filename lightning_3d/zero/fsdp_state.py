"""What ZeRO needs of FSDP2's private state (the seam for collectives has its own part in comm/fsdp_private.py).

Read in torch 2.11 and 2.13 (`torch/distributed/fsdp/_fully_shard/`). `tests/zero/test_fsdp_state.py` fails when what is
used here changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from lightning_3d.comm.fsdp_private import groups as groups_at


@contextmanager
def same_classes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Apply `fully_shard` without the change of class that goes with it.

    The class is changed only for the convenience of FSDPModule's setters. It would show in the user's own
    `type(self)`, cannot be done to a generic class, and forbids `copy.deepcopy`.
    """
    kinds = {type(module) for module in modules}
    before = {kind: cls_to_fsdp_cls.get(kind) for kind in kinds}
    cls_to_fsdp_cls.update({kind: kind for kind in kinds})
    try:
        yield
    finally:
        for kind, wrapped in before.items():
            if wrapped is None:
                del cls_to_fsdp_cls[kind]
            else:
                cls_to_fsdp_cls[kind] = wrapped


def state_of(module: nn.Module) -> Any:
    """FSDP's state of `module`, or None where it was not applied."""
    return fully_shard.state(module) if module in _module_state_mapping else None  # type: ignore[attr-defined]


def param_groups(root: nn.Module) -> list[Any]:
    """Every FSDP parameter group below `root`, in the order of the module tree (the root's first).

    Walks all modules: ask once, not once a step.
    """
    return [group for module in root.modules() for group in groups_at(module)]


def _states(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if (state := state_of(module)) is not None:
            yield state


def make_root(module: nn.Module) -> None:
    """Declare `module` the root now, and take its forward hooks off.

    A LightningModule's own `forward` is called zero, one or many times inside one `training_step`; the strategy opens
    and closes the root's part of a step itself (`open_step`, `start_backward`), whatever the user's code calls.
    """
    state = state_of(module)
    state._lazy_init()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for each in _states(module):
        # a copy of a module shares the state, as it shares the process groups inside
        each.__deepcopy__ = lambda memo, each=each: each


def hold(root: nn.Module, groups: Iterable[Any], held: bool) -> None:
    """While held, backwards accumulate whole gradients and keep the whole parameters (ZeRO 1)."""
    for group in groups:
        group.reduce_grads = not held
        group.reshard_after_backward = not held
    state_of(root)._state_ctx.is_last_backward = not held


def drop(groups: Iterable[Any]) -> None:
    """Forget the whole gradients that held backwards have left."""
    for param in (param for group in groups for param in group.fsdp_params):
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):  # which comes with the first gather
            param._unsharded_param.grad = None


def follow_shards(groups: Iterable[Any]) -> None:
    """What is whole gets gradients where its shard does; FSDP2 sees to it when it gathers."""
    for param in (param for group in groups if group.is_unsharded for param in group.fsdp_params):
        param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)


def lead_shards(groups: Iterable[Any]) -> None:
    """The other way: shards get gradients where what is whole does, which the user's step may have frozen or thawed."""
    for param in (param for group in groups if group.is_unsharded for param in group.fsdp_params):
        param.sharded_param.requires_grad_(param._unsharded_param.requires_grad)


def rest(groups: Sequence[Any]) -> None:
    """Shard everything that is whole."""
    lead_shards(groups)
    for group in groups:
        group.reshard()


def gathered(groups: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each parameter that is whole, and its shard."""
    params = [param for group in groups if group.is_unsharded for param in group.fsdp_params]
    return [(param._unsharded_param, param.sharded_param) for param in params]


def open_step(root: nn.Module) -> None:
    """What the root's pre-forward hook would do once per forward: order the streams, claim the iteration."""
    state = state_of(root)
    state._state_ctx.iter_forward_root = None
    state._root_pre_forward(root, (), {})


def close_step(root: nn.Module, groups: Iterable[Any]) -> None:
    """End an iteration that has no backward."""
    context = state_of(root)._state_ctx
    context.iter_forward_root = None
    state_of(root)._comm_ctx.post_forward_order.clear()
    for group in groups:
        group._post_forward_indices.clear()


def start_backward(root: nn.Module, grad: Any = None) -> Any:
    """What the hook on the root's outputs would do: gather the root's parameters, queue the end of backward."""
    return state_of(root)._pre_backward(grad)


def queue_end_of_backward(root: nn.Module) -> None:
    """Have the running backward end with the reduction of everything that has a gradient."""
    state_of(root)._register_root_post_backward_final_callback()


def reduce_now(root: nn.Module, groups: Iterable[Any]) -> None:
    """Reduce every gradient that backwards have accumulated so far, outside of a backward."""
    for group in groups:
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


def accumulates_beside(param: Any) -> bool:
    """Whether gradients are reduced in another dtype than they are computed in, and accumulate apart for that."""
    return param.reduce_dtype is not None and param.reduce_dtype != param._unsharded_param.dtype


@torch.no_grad()
def stand_in(param: Any) -> torch.Tensor:
    """A tensor like the whole parameter, in the dtype of reduction, with the gradient accumulated so far as `.grad`."""
    if param.unsharded_accumulated_grad is None:
        param.to_accumulated_grad_if_needed()
    else:
        param.accumulate_unsharded_grad_if_needed()
    whole = param._unsharded_param
    result = torch.empty_like(whole, dtype=param.reduce_dtype).requires_grad_(whole.requires_grad)
    result.grad = param.unsharded_accumulated_grad
    return result


def gather(group: Any, wait: bool = True) -> None:
    """Make the parameters of one group whole; without `wait` only start to."""
    if group.is_unsharded:
        return
    group.unshard(async_op=not wait)
    if wait:
        group.wait_for_unshard()


def forget(root: nn.Module) -> None:
    """Remove every trace of `fully_shard` but the sharded parameters themselves, which the caller replaces."""
    for module in list(root.modules()):
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(name, None)
        if state_of(module) is not None:
            _forget_one(module)


def _forget_one(module: Any) -> None:
    state = state_of(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in groups_at(module):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for param in group.fsdp_params:
            param._post_load_hook_handle.remove()
    _module_state_mapping.pop(module, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        module.__dict__.pop(key, None)
