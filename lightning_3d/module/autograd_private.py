"""What torch does not say in public about a running backward and about the memory of a tensor.

Read in torch 2.11 and 2.13.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils import checkpoint


def in_backward() -> bool:
    """Return True while autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the running backward end with `call`."""
    Variable._execution_engine.queue_callback(call)


def in_checkpoint() -> bool:
    """Return True while the forward of a region of `torch.utils.checkpoint` runs on this thread, or runs again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def same_version(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` without a graph, which counts the same writes, also below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def storage_key(tensor: Tensor) -> int:
    """Return a number for the memory behind `tensor`, which stays while that is freed and allocated again."""
    return tensor.untyped_storage()._cdata
