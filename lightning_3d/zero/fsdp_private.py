"""FSDP2's private state: its parameter groups, hooks, streams and collectives. `fsdp_unit_private` has what units need.

FSDP2 offers none of this in public: gather now, end a backward, accumulate without it, leave classes as they are.

Read in torch 2.11, 2.13, 2.14 and 2.15 (`torch/distributed/fsdp/_fully_shard/`). `tests/zero/test_fsdp_state.py` fails
when something used here changes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.tensor import DTensor

from lightning_3d.module.torch_private import PLAIN_DATA
from lightning_3d.module.undo import replaced_entries
from lightning_3d.zero.rows import all_rows, my_rows

_ACCUMULATES_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""True up to torch 2.14. Since then a gradient stays at the gathered parameter, in the dtype of its `grad_dtype`."""


def same_classes(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Apply `fully_shard` without the change of class that goes with it.

    The class is changed only for the convenience of FSDPModule's setters. It would show in the user's own
    `type(self)`, cannot be done to a generic class, and forbids `copy.deepcopy`.
    """
    return replaced_entries((cls_to_fsdp_cls, kind, kind) for kind in {type(module) for module in modules})


def state_of(module: nn.Module) -> Any:
    """Return FSDP's state of `module`, or None where it was not applied."""
    return fully_shard.state(module) if module in _module_state_mapping else None  # type: ignore[attr-defined]


def param_groups(root: nn.Module) -> list[Any]:
    """Return every FSDP parameter group below `root`, the root's first. Walks all modules: not for each step."""
    return [group for module in root.modules() for group in groups_at(module)]


def _states(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if (state := state_of(module)) is not None:
            yield state


def make_root(module: nn.Module) -> None:
    """Declare `module` the root now, and take its forward hooks off.

    A `training_step` calls the LightningModule's own `forward` any number of times. So the strategy opens and closes
    the root's part of a step itself (`open_step`, `start_backward`), whatever the user's code calls.
    """
    state = state_of(module)
    state._lazy_init()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for each in _states(module):
        # a copy of a module shares the state, as it shares the process groups inside
        each.__deepcopy__ = lambda memo, each=each: each


def accumulate_only(root: nn.Module, groups: Iterable[Any], on: bool) -> None:
    """Have backwards accumulate full gradients and keep the gathered parameters, or not."""
    for group in groups:
        group.reduce_grads = not on
        group.reshard_after_backward = not on
    state_of(root)._state_ctx.is_last_backward = not on


def discard_pending(groups: Iterable[Any]) -> None:
    """Discard the full gradients that backwards without a reduction have left."""
    for param in (param for group in groups for param in group.fsdp_params):
        if _ACCUMULATES_APART:
            param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):  # which comes with the first gather
            param._unsharded_param.grad = None


def follow_shards(groups: Sequence[Any]) -> None:
    """Have gathered parameters get gradients where their shards do; FSDP2 does so when it gathers."""
    for full, shard in gathered(groups):
        full.requires_grad_(shard.requires_grad)


def lead_shards(groups: Sequence[Any]) -> None:
    """Have shards get gradients where gathered parameters do, which the user's step may have frozen or thawed."""
    for full, shard in gathered(groups):
        shard.requires_grad_(full.requires_grad)


def reshard(groups: Sequence[Any]) -> None:
    lead_shards(groups)
    for group in groups:
        if group._all_gather_result is not None:  # else the next gather takes this one, with values of before
            group.wait_for_unshard()
        group.reshard()


def gathered(groups: Sequence[Any], before: bool = False) -> list[tuple[Any, Any]]:
    """Return each gathered parameter with its shard; if `before`, also those that were gathered once."""
    params = [param for group in groups if before or group.is_unsharded for param in group.fsdp_params]
    return [(param._unsharded_param, param.sharded_param) for param in params if hasattr(param, "_unsharded_param")]


def open_step(root: nn.Module) -> None:
    """Order the streams and claim the iteration, as the root's pre-forward hook would once per forward."""
    state = state_of(root)
    state._state_ctx.iter_forward_root = None
    state._root_pre_forward(root, (None,), {})  # on a device torch moves the arguments there, and refuses to move none


def prefetch_in(order: Sequence[nn.Module]) -> None:
    """Have the forward of each module begin with the gather of the next one. In backward FSDP2 does so by itself."""
    for module, following in pairwise(order):
        state_of(module)._states_to_forward_prefetch = [state_of(following)]


def close_step(root: nn.Module, groups: Iterable[Any]) -> None:
    """End an iteration that has no backward."""
    context = state_of(root)._state_ctx
    context.iter_forward_root = None
    state_of(root)._comm_ctx.post_forward_order.clear()
    for group in groups:
        group._post_forward_indices.clear()


def start_backward(root: nn.Module, grad: Any = None) -> Any:
    """Gather the root's parameters and queue the end of backward, as the hook on the root's outputs would."""
    return state_of(root)._pre_backward(grad)


def queue_end_of_backward(root: nn.Module) -> None:
    """Have the running backward end with the reduction of everything that has a gradient."""
    state_of(root)._register_root_post_backward_final_callback()


def reduce_now(root: nn.Module, groups: Iterable[Any]) -> None:
    """Reduce every gradient that backwards have accumulated so far, outside of a backward."""
    for group in groups:
        group.post_backward()
    state_of(root)._root_post_backward_final_callback()


def full_parameter(param: Any) -> nn.Parameter:
    """Return the gathered parameter; its memory is freed while it is sharded."""
    return param._unsharded_param


def accumulates_separately(param: Any) -> bool:
    """Return True if gradients are reduced in another dtype than they are computed in, and accumulate in that."""
    apart = _ACCUMULATES_APART and param.reduce_dtype is not None
    return apart and param.reduce_dtype != param._unsharded_param.dtype


def _accumulate(param: Any) -> None:
    """Add the gradient of the last backward to the accumulated one, in the dtype of reduction."""
    if not _ACCUMULATES_APART:
        full = param._unsharded_param
        if full.grad is not None and full.grad.dtype != param.reduce_dtype:
            grad, full.grad = full.grad, None
            full.grad_dtype = param.reduce_dtype
            full.grad = grad.to(param.reduce_dtype)
    elif param.unsharded_accumulated_grad is None:
        param.to_accumulated_grad_if_needed()
    else:
        param.accumulate_unsharded_grad_if_needed()


@torch.no_grad()
def stand_in(param: Any) -> torch.Tensor:
    """Return a tensor like the full parameter, in the dtype of reduction, with the accumulated gradient as `.grad`."""
    _accumulate(param)
    full = param._unsharded_param
    result = torch.empty_like(full, dtype=param.reduce_dtype).requires_grad_(full.requires_grad)
    result.grad = param.unsharded_accumulated_grad
    return result


def gather(group: Any, wait: bool = True) -> None:
    """Gather the parameters of one group; without `wait` only start to."""
    if group.is_unsharded:
        first = group.fsdp_params[0]
        if registered(first) is first.sharded_param:  # in a hook
            register_gathered(group)
        return
    # else FSDP2 gathers no embedding whose backward has begun
    needed, group.unshard_in_backward = group.unshard_in_backward, True
    group.unshard(async_op=not wait)
    group.unshard_in_backward = needed
    if wait:
        group.wait_for_unshard()


def register_gathered(group: Any) -> None:
    """Register the gathered parameters of `group` in the places of their shards."""
    for param in group.fsdp_params:
        if any(module._parameters.get(name) is param.sharded_param for module, name in places(param)):
            param.to_unsharded()


def remove(root: nn.Module) -> None:
    """Remove every trace of `fully_shard` but the sharded parameters themselves, which the caller replaces."""
    for module in list(root.modules()):
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(name, None)
        if state_of(module) is not None:
            _remove_at(module)


def _remove_at(module: Any) -> None:
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


def groups_at(module: nn.Module) -> list[Any]:
    """Return the parameter groups sharded at this very module (torch 2.13 has a list, torch 2.11 one or none)."""
    state: Any = _get_module_fsdp_state(module)
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def install(
    group: Any,
    all_gather: AllGather,
    reduce_scatter: ReduceScatter,
    all_reduce: Callable[[Tensor], None] | None,
    in_background: bool,
) -> None:
    """Set the collectives of one group. The public setters are methods of a class that modules need not have.

    `all_reduce` takes the output of a reduce-scatter, over the copies of this shard. Gathers `in_background` go on.
    """
    assert hasattr(group, "_all_gather_comm")
    assert hasattr(group, "_reduce_scatter_comm")
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter
    group._all_reduce_hook = all_reduce
    group.unshard_async_op = in_background


def full_rows(param: Any, shard: Tensor) -> Tensor:
    """Gather the full tensor of which `shard` is this rank's, sharded like `param`. Collective."""
    return all_rows(shard.to(param.device), param._orig_size, param.mesh_info.shard_process_group)


def shard_rows(param: Any, full: Tensor) -> Tensor:
    """Return this rank's shard of `full`, sharded like `param`, as a DTensor. A view would keep the memory of all."""
    info, to = param.mesh_info, param.sharded_param.device
    rows = my_rows(full, info.shard_mesh_rank, info.shard_mesh_size)
    return param.to_sharded_dtensor(rows.to(to, copy=True, memory_format=torch.contiguous_format))


def places(param: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that have `param`, and its name in each."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def registered(param: Any) -> Any:
    """Return the tensor that its first module has in the place of `param`."""
    module, name = places(param)[0]
    return module._parameters.get(name)


def owners(group: Any) -> set[nn.Module]:
    return {module for param in group.fsdp_params for module, _ in places(param)}


def owned(param: Any, modules: set[nn.Module]) -> bool:
    """Return True if one of `modules` itself has `param`."""
    return any(owner in modules for owner, _ in places(param))


def is_plain_fp32(param: Any) -> bool:
    """Return True for an fp32 parameter that is gathered as it is."""
    return param.orig_dtype == torch.float32 and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


_OTHERS = "lightning_3d_gathered"
"""Attribute of FSDP2's parameters: the empty memory of gathered parameters in another dtype."""


def gather_in(group: Any, params: Iterable[Any], dtype: torch.dtype | None) -> None:
    """Gather `params` of `group` in `dtype` from now on, or in their own (None). What is gathered now is so again.

    FSDP2 has one dtype for each group, and a norm shares its block's. Gradients are reduced in the own dtype.
    """
    if group._all_gather_result is not None:
        group.wait_for_unshard()
    again = group.is_unsharded
    if again:  # `reshard` does nothing within a forward
        group._reshard_after_forward_event = group.device_handle.Event()
        group._reshard_after_forward_event.record()
        group._to_sharded()
    for param in params:
        others: dict[Any, Any] = vars(param).setdefault(_OTHERS, {})
        others[param.param_dtype] = param.all_gather_outputs, vars(param).pop("_unsharded_param", None)
        param.all_gather_outputs, full = others.pop(dtype, ([], None))
        if full is not None:
            param._unsharded_param = full.requires_grad_(param.sharded_param.requires_grad)
        param.param_dtype, param.reduce_dtype = dtype, None if dtype is None else param.orig_dtype
    if again:
        gather(group)


def move_gradients(group: Any, params: Iterable[Any], dtype: torch.dtype) -> None:
    """Give `params` of `group` the gradients of their copies in `dtype`, where torch 2.15 has left them."""
    for param in params:
        _, copy = vars(param)[_OTHERS].pop(dtype, ([], None))
        if copy is not None and copy.grad is not None:
            gather(group)
            param._unsharded_param.grad = copy.grad.to(param._unsharded_param.dtype)


def reduce_in_full(group: Any) -> None:
    """Have `group` reduce the gradients of parameters that are gathered in half precision together with the others."""
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        for param in group.fsdp_params:
            if param.param_dtype is not None and hasattr(param, "_unsharded_param"):
                _accumulate(param)
        original(*unused)

    group.post_backward = post_backward


def replace(param: Any, parameter: nn.Parameter) -> None:
    for module, name in places(param):
        module._parameters[name] = parameter


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def gathers_whole(group: Any, dtype: torch.dtype) -> bool:
    """Return True if each gathered parameter is one tensor that starts as its shards in rank order, of one dtype."""
    return (
        dtype != torch.uint8  # mixed dtypes travel as bytes
        and not group.is_sharded_post_forward  # among some of the ranks
        and all(
            parameter.fsdp_placement.dim == 0 and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            for parameter in group.fsdp_params
        )
    )


def destinations(group: Any, shards: Sequence[Tensor], size: int) -> list[Tensor]:
    """Allocate the memory of the gathered parameters before the gather; FSDP2 would when it copies out."""
    targets = []
    for parameter, shard in zip(group.fsdp_params, shards, strict=True):
        parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], size, shard.device)
        parameter.alloc_all_gather_outputs()
        targets.append(PLAIN_DATA.__get__(parameter.all_gather_outputs[0]))  # autograd must not see a new version
    return targets


def scatters_as_is(group: Any, dtype: torch.dtype) -> bool:
    """Return True if FSDP2 does nothing to the gradients on the way into the buffer, such as dividing (half types)."""
    return dtype in (torch.float32, torch.bfloat16) and group._reduce_scatter_process_group.size() > 1


def trainable(group: Any) -> list[int]:
    """Return the places of the group's parameters that are trained now."""
    return [place for place, parameter in enumerate(sharded_parameters(group)) if parameter.requires_grad]


def only_views_follow(group: Any, output: Tensor, our_hook: Any) -> bool:
    """Return True if FSDP2 computes nothing from the output of a reduce-scatter (see the note in fsdp_seam.py)."""
    if isinstance(group.mesh_info, DDPMeshInfo):
        return False
    if any(p.orig_dtype != output.dtype for p in group.fsdp_params if p.sharded_param.requires_grad):
        return False
    if group._all_reduce_hook not in (None, our_hook):
        return False
    return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in sharded_parameters(group))


def frees_parameters(module: nn.Module) -> bool:
    """Return True if a group at this very module is freed after its forward."""
    return any(group._reshard_after_forward for group in groups_at(module))


def added(gradients: list[Tensor | None]) -> Tensor:
    """Add all of `gradients` to the first one."""
    total, *others = [gradient for gradient in gradients if gradient is not None]
    for other in others:
        assert isinstance(total, DTensor)
        assert isinstance(other, DTensor)
        total.to_local().add_(other.to_local())
    return total
