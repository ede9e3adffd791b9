"""Three ways to step parameters of which ranks have shards: on shards, on one full tensor at a time, on all of them."""

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_3d.module.undo import Change, replaced_entries
from lightning_3d.optim.stand_ins import HostCopies, LocalShards, StandIns

# Adam on shards in host memory by torch's own fused kernel.
#
# Without `fused` and `foreach`, torch runs Adam on a CPU one operation after the other, in a dozen passes over memory.
# Half of 20M parameters took 22 ms, and 7 ms with the fused kernel. With offloaded states this is most of a step. Half
# types stay as they are: the plain code rounds after each operation, the fused kernel once.

FUSED = (optim.Adam, optim.AdamW)
"""Of exactly these types. SGD's kernel cannot take a parameter that gets its first gradient later than others."""
_KERNEL_TAKES = {(dtype, torch.strided, True) for dtype in (torch.float32, torch.float64)}


def fusable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True if the fused kernel may step `group`, whose parameters are plain tensors now.

    Those without a gradient are not stepped: under a pipeline, those of other stages.
    """
    if type(optimizer) not in FUSED or group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["differentiable"] or group["capturable"] or isinstance(group["lr"], Tensor):
        return False
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    if not {(tensor.dtype, tensor.layout, tensor.is_cpu) for tensor in tensors} <= _KERNEL_TAKES:
        return False
    states = (optimizer.state.get(parameter) for parameter in parameters)
    steps = [state["step"] for state in states if state]
    return all(isinstance(step, Tensor) and step.dtype == torch.float32 and step.is_cpu for step in steps)


Closure = Callable[[], Any] | None


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Have `optimizer.step(...)` call `step(optimizer, ...)`; returns what undoes it."""
    step.__dict__.update(getattr(optimizer.step, "__dict__", {}))  # schedulers mark the step they have wrapped
    return Change(optimizer, "step", MethodType(step, optimizer)).revert


def step_on_shards(optimizer: Optimizer, host: bool = False, keep: bool = True) -> Callable[[], None]:
    """Have `optimizer.step` work on this rank's shards as plain tensors; returns what undoes it.

    With `host`, on copies in host memory. With `keep`, the next step uses the same plain states.
    """
    original, shards = optimizer.step, HostCopies(optimizer) if host else LocalShards(optimizer, keep)

    def step(self: Optimizer, closure: Closure = None, **kwargs: Any) -> Any:
        with ExitStack() as entered:

            def enter() -> None:
                entered.enter_context(shards)
                groups = [group for group in self.param_groups if fusable(self, group)]
                entered.enter_context(replaced_entries((group, "fused", True) for group in groups))

            def on_parameters() -> Any:  # computes gradients, and drops the last ones, on the parameters themselves
                assert closure is not None
                entered.close()
                loss = closure()
                enter()
                return loss

            if closure is not None:
                return original(closure=on_parameters, **kwargs)
            enter()
            return original(**kwargs)

    return replace_step(optimizer, step)


def step_one_at_a_time(optimizer: Optimizer, full: StandIns) -> Callable[[], None]:
    """Have `optimizer.step` work on one full parameter after the other; returns what undoes it.

    One parameter at a time is gathered with its gradient and state, stepped, and sharded again. Each sees the values of
    its group as they were before the step; those that the last one leaves are kept.
    """
    original = optimizer.step

    def step(self: Optimizer, closure: Closure = None, **kwargs: Any) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        if closure is not None:
            kwargs["closure"] = lambda: loss
        groups = self.param_groups
        try:
            for group in groups:
                stepped: dict[str, Any] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        stepped = {**group, "params": [parameter]}
                        self.param_groups = [stepped]
                        with full:
                            original(**kwargs)
                group.update({name: value for name, value in stepped.items() if name != "params"})
        finally:
            self.param_groups = groups
        return loss

    return replace_step(optimizer, step)


def step_all_gathered(optimizer: Optimizer, full: StandIns, mean: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Have `optimizer.step` work on all parameters, gathered, and the loss of all ranks; returns what undoes it.

    With a loss of its own each rank would stop a search at another point. Every rank has all parameters and gradients
    at the same time, and for LBFGS as many vectors of all of them as `history_size` says, twice.
    """
    original = optimizer.step

    def step(self: Optimizer, closure: Closure = None, **kwargs: Any) -> Any:
        def on_shards() -> Any:
            assert closure is not None
            full.write_values()
            full.list_parameters()
            loss = torch.enable_grad()(closure)()
            full.list_stand_ins()
            full.read_gradients()
            return mean(loss.detach().clone()) if isinstance(loss, Tensor) else loss

        with full:
            return original(**kwargs) if closure is None else original(closure=on_shards, **kwargs)

    return replace_step(optimizer, step)
