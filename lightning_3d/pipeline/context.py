"""Callbacks of other layers around a pipelined step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist


def _nothing() -> None:
    pass


@dataclass
class StepCallbacks:
    """Callbacks of the ZeRO and precision layers around a pipelined step.

    `tests/pipeline/test_fsdp.py` is an example with FSDP2. There blocks and the LightningModule are wrapped after
    `apply_split`, with `reshard_after_forward=False` and the absent parameters in `ignored_params`. No step is
    registered as a forward method, because a cut step never reaches the root's hook after it. Parameters must be
    sharded again whenever a training step begins, because older gradients are dropped then.
    """

    begin: Callable[[], None] = _nothing
    """Before the schedule: parameters gathered, no reduction of gradients in backward."""
    reduce: Callable[[], None] = _nothing
    """After the schedule, on the last batch of an accumulation window: gradients reduced over data ranks."""
    grad_holder: Callable[[str], Tensor] | None = None
    """The tensor whose `.grad` is the gradient of a parameter before its reduction, by name; for tied parameters."""
    peers: Sequence[dist.ProcessGroup] = ()
    """Groups of the ranks on other axes that run the same batches with this one."""
    evaluating: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around an evaluation step: parameters gathered inside, sharded again after it."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each call of a step on a microbatch (autocast)."""
