"""What we ask FSDP2 that it does not offer in public. Read in torch 2.13, guarded for 2.11; nothing else touches it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def groups(module: nn.Module) -> list[Any]:
    """The parameter groups sharded at this very module (torch 2.13 has a list, torch 2.11 one or none)."""
    state: Any = _get_module_fsdp_state(module)
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def install(group: Any, all_gather: AllGather, reduce_scatter: ReduceScatter, in_background: bool) -> None:
    """Set the collectives of one group. The public setters are methods of a class that modules need not have."""
    assert hasattr(group, "_all_gather_comm")
    assert hasattr(group, "_reduce_scatter_comm")
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter
    group.unshard_async_op = in_background


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def gathers_whole(group: Any, dtype: torch.dtype) -> bool:
    """Whether each gathered parameter is one tensor that starts as its shards in rank order, all of one dtype."""
    return (
        dtype != torch.uint8  # mixed dtypes travel as bytes
        and not group.is_sharded_post_forward  # a part of the ranks
        and all(
            parameter.fsdp_placement.dim == 0 and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            for parameter in group.fsdp_params
        )
    )


def destinations(group: Any, shards: Sequence[Tensor], size: int) -> list[Tensor]:
    """The memory of the gathered parameters; FSDP2 would take it when it copies out, we take it before the gather."""
    targets = []
    for parameter, shard in zip(group.fsdp_params, shards, strict=True):
        parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], size, shard.device)
        parameter.alloc_all_gather_outputs()
        targets.append(parameter.all_gather_outputs[0].data)  # .data: autograd must not see a new version
    return targets


def scatters_as_is(group: Any, dtype: torch.dtype) -> bool:
    """Whether FSDP2 does nothing to the gradients on the way into the buffer, such as dividing (half types)."""
    return dtype in (torch.float32, torch.bfloat16) and group._reduce_scatter_process_group.size() > 1


def padded(gradient: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`gradient` with zero rows added until `size` divides them; without a copy where none are missing."""
    rows = gradient.to(dtype).contiguous().view(gradient.shape or (1,))
    missing = -rows.shape[0] % size
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def trainable(group: Any) -> list[int]:
    """Which of the group's parameters are trained now."""
    return [place for place, parameter in enumerate(sharded_parameters(group)) if parameter.requires_grad]


def only_views_follow(group: Any, output: Tensor, our_hook: Any) -> bool:
    """Whether FSDP2 computes nothing from the output of a reduce-scatter (see the note at the top)."""
    if group._orig_dtype != output.dtype or isinstance(group.mesh_info, DDPMeshInfo):
        return False
    if group._all_reduce_hook not in (None, our_hook):
        return False
    return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in sharded_parameters(group))


def frees_parameters(module: nn.Module) -> bool:
    return any(group._reshard_after_forward for group in groups(module))


def added(gradients: list[Tensor | None]) -> Tensor:
    """All of `gradients` added to the first one."""
    total, *others = [gradient for gradient in gradients if gradient is not None]
    for other in others:
        assert isinstance(total, DTensor)
        assert isinstance(other, DTensor)
        total.to_local().add_(other.to_local())
    return total
