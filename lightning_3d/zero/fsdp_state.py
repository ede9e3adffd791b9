"""The one place that touches FSDP2's private state.

Read in torch 2.11 and 2.13 (`torch/distributed/fsdp/_fully_shard/`). `tests/zero/test_fsdp_state.py` fails when what is
used here changes.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard


def state_of(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def param_groups(root: nn.Module) -> list[Any]:
    """Every FSDP parameter group below `root`, in the order of the module tree (the root's first)."""
    return [group for state in _states(root) for group in _groups(state)]


def _states(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield state_of(module)


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def make_root(module: nn.Module) -> None:
    """Declare `module` the root now, and take its forward hooks off.

    A LightningModule's own `forward` is called zero, one or many times inside one `training_step`; the strategy opens
    and closes the root's part of a step itself (`open_step`, `start_backward`), whatever the user's code calls.
    """
    state = state_of(module)
    state._lazy_init()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def open_step(root: nn.Module) -> None:
    """What the root's pre-forward hook would do once per forward: order the streams, claim the iteration."""
    state = state_of(root)
    state._state_ctx.iter_forward_root = None
    state._root_pre_forward(root, (), {})


def close_step(root: nn.Module) -> None:
    """End an iteration that has no backward."""
    context = state_of(root)._state_ctx
    context.iter_forward_root = None
    state_of(root)._comm_ctx.post_forward_order.clear()
    for group in param_groups(root):
        group._post_forward_indices.clear()


def start_backward(root: nn.Module, grad: Any = None) -> Any:
    """What the hook on the root's outputs would do: gather the root's parameters, queue the end of backward."""
    return state_of(root)._pre_backward(grad)


def queue_end_of_backward(root: nn.Module) -> None:
    """Have the running backward end with the reduction of everything that has a gradient."""
    state_of(root)._register_root_post_backward_final_callback()


def reduce_now(root: nn.Module) -> None:
    """Reduce every gradient that backwards have accumulated so far, outside of a backward."""
    for group in param_groups(root):
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


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
        if isinstance(module, FSDPModule):
            _forget_one(module)


def _forget_one(module: Any) -> None:
    state = state_of(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in _groups(state):
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
    module.__class__ = type(module).__mro__[type(module)._orig_cls_mro_index]
