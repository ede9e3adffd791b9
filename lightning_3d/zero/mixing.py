"""Whether an optimizer steps each parameter by itself: a pipeline rank has the gradients of its own stages only."""

from collections import OrderedDict, defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

_STEPS = 4
"""What a step finds of all parameters may count from the next one."""


def mixes(optimizer: Optimizer) -> bool:
    """Whether a copy of `optimizer` steps a small parameter otherwise with another beside it.

    Also where it draws random numbers: which parameters get which then depends on all of them. Raises what the copy
    raises where it cannot step parameters that it was not built with.
    """
    return not torch.equal(_stepped(optimizer, 1), _stepped(optimizer, 2))


def _stepped(optimizer: Optimizer, count: int) -> Tensor:
    """The first of `count` parameters after some steps."""
    group = next(group for group in optimizer.param_groups if group["params"])
    kind = group["params"][0]
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)

        def small() -> Tensor:
            return torch.randn(8, 8, generator=generator).to(device, kind.dtype)

        parameters = [nn.Parameter(small()) for _ in range(2)][:count]
        twin = twin_of(optimizer, {**group, "params": parameters})
        for _ in range(_STEPS):
            gradients = [small() for _ in range(2)]

            def closure(gradients: list[Tensor] = gradients) -> Tensor:
                for parameter, gradient in zip(parameters, gradients, strict=False):
                    parameter.grad = gradient.clone()
                return torch.zeros(())

            twin.step(closure)  # type: ignore[arg-type]  # it may return a tensor
    return parameters[0].detach()


def twin_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """A copy with one `group` and no state."""
    twin = object.__new__(type(optimizer))
    instead = {"state": defaultdict[Any, Any](dict), "param_groups": [group]}
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", *instead)}
    hooks = {name: OrderedDict[int, Any]() for name in own if name.endswith("_hooks")}
    twin.__dict__.update({name: _apart(name, value) for name, value in own.items() if name not in hooks})
    twin.__dict__.update({**hooks, **instead})
    return twin


def _apart(name: str, value: Any) -> Any:
    """A copy of what an optimizer keeps, so that the real one is not stepped by what is done to it."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, nn.Parameter | nn.Module | Optimizer) or (isinstance(leaf, Tensor) and leaf.numel() > 1000):
            raise ValueError(f"{name} holds a {type(leaf).__name__}, which is not that of the small ones")
    return deepcopy(value) if isinstance(value, dict | list | Tensor) else value
