"""FSDP2's private state of one unit: the times at which it is freed and its gradients are reduced.

Read in torch 2.11 and 2.13, as fsdp_private.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_3d.sandbox.trees import leaves


def in_forward(group: Any) -> bool:
    """Return True in the forward of the group's module."""
    return bool(group._training_state == TrainingState.FORWARD)


def is_hooked(tensor: Tensor) -> bool:
    """Return True if an output of a unit has another hook than FSDP2's own, which begins its backward."""
    return len(tensor._backward_hooks or ()) > 1


def not_in_backward(group: Any) -> None:
    """Have no backward gather `group`: gradients of a look-up do not depend on the weight."""
    group.unshard_in_backward = False


def keep_gathered(group: Any) -> None:
    """Have `group` stay gathered from a gather to the end of backward, as the root's is."""
    group.post_forward_mesh_info, group.unshard_in_backward = None, True


def free_in_backward(group: Any, on: bool) -> None:
    """Have a backward free `group` after it has reduced its gradients, or not."""
    group.reshard_after_backward = on


def reduce_in_backward(group: Any, may: Callable[[], bool], noted: Callable[[], None]) -> None:
    """Have a call reduce the group's gradients when backward has passed it if `may()`; else the end of backward does.

    Args:
        group: of FSDP2.
        may: asked at each call.
        noted: called where a call is going to do so.
    """
    original = group._register_post_backward_hook

    def register(args: Any, kwargs: Any) -> Any:
        if not may():
            return args, kwargs
        found = original(args, kwargs)
        if found[0] is not args:  # an input needs a gradient
            noted()
        return found

    group._register_post_backward_hook = register


def hook_outputs(state: Any) -> None:
    """Have a backward prefetch when it reaches the outputs of the unit, which may be views.

    FSDP2 warns of views, which a head returns for three dimensions: an in-place operation on one drops the hook. Here
    only the prefetch would be lost.
    """

    def register(output: Any) -> Any:
        for leaf in leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = register


def reduce_late(group: Any) -> None:
    """Have the end of the running backward reduce the group's gradients, also those after an earlier reduction."""
    if group._training_state == TrainingState.POST_BACKWARD:
        group._training_state = TrainingState.IDLE


def wrap_inputs(group: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace the function that gives a unit tensors by which FSDP2 sees the end of its backward."""
    group._register_post_backward_hook = wrap(group._register_post_backward_hook)
