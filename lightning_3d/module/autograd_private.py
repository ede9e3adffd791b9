"""Two questions to a running backward that torch does not answer in public. Read in torch 2.11 and 2.13."""

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Return True while autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the running backward end with `call`."""
    Variable._execution_engine.queue_callback(call)
