"""The numbers that a step of an optimizer depends on, found by stepping a copy of it on small parameters.

Known answers are in a table. Any other optimizer is tried: on full parameters, on their halves, and on one at a time.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.optim.sharded_steps import step_one_at_a_time
from lightning_3d.optim.stand_ins import StandIns
from lightning_3d.ranks.random_streams import restored_streams
from lightning_3d.sandbox.trees import leaves


class Reach(Enum):
    """The tensors that the step of an element depends on, beyond its own gradient and states."""

    ELEMENT = "none: shards can be stepped"
    TENSOR = "its parameter: full tensors are stepped one at a time"
    ALL = "all parameters: they are gathered together"


ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
KNOWN: dict[type[Optimizer], Reach] = {
    **dict.fromkeys(ELEMENTWISE, Reach.ELEMENT),
    **{getattr(optim, name): Reach.TENSOR for name in ("Adafactor", "Muon") if hasattr(optim, name)},
    optim.LBFGS: Reach.ALL,
}
"""Of exactly these types: a subclass may compute norms. Muon came with torch 2.9."""


def reach_of(optimizer: Optimizer, pipelined: bool) -> Reach:
    """Return the reach of `optimizer`; ALL, with a warning, where it cannot be tried.

    Raises `UnsupportedError` where a pipeline rank, which has the gradients of its stages only, cannot step it.
    """
    kind = type(optimizer)
    if kind in KNOWN:
        return KNOWN[kind]
    for option, value in (pair for group in optimizer.param_groups for pair in group.items()):
        if option != "param_names" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            raise UnsupportedError(
                f"{kind.__name__} has names of parameters in its option {option!r}, so its step of one may read others."
                " Small parameters, on which it is tried, do not have these names. Ranks have shards of them. Use"
                " another optimizer, or zero_stage=0 with data ranks alone."
            )
    calls = 1
    try:
        reach, mixed = tried(optimizer), pipelined and needs_all_parameters(optimizer)
        calls = step_small(optimizer, steps=1).calls
    except Exception as error:  # of any kind: it is the user's code, on parameters that it was not built with
        if pipelined:
            with suppress(Exception):
                calls = step_small(optimizer, steps=1, wraps=True).calls
            check_evaluations(optimizer, calls)
        rank_zero_warn(
            f"{kind.__name__} could not be tried on small parameters ({type(error).__name__}: {error}), so that its"
            " steps gather all parameters that are sharded. This takes time and memory. Under a pipeline it is wrong"
            " where a step computes a number from all parameters (a norm of all gradients): a rank has only those of"
            " its stages. Keep references to parameters and other optimizers out of it, or use zero_stage=0."
        )
        return Reach.ALL
    if mixed:
        raise UnsupportedError(
            f"{kind.__name__} steps a parameter differently when it steps others too: by a number that it computes from"
            " all of them (a norm of all gradients), or with random numbers that it draws for one after another. A"
            " pipeline rank has only its stages' parameters. Use another optimizer (gradients are clipped by the norm"
            f" of all with gradient_clip_val), or {NO_PIPELINE}."
        )
    check_evaluations(optimizer, calls if pipelined else 1)
    try:
        if pipelined:
            step_small(optimizer, steps=1, absent=True)
    except Exception as error:  # as above
        raise UnsupportedError(
            f"{kind.__name__} fails where a parameter has no gradient ({type(error).__name__}: {error}). A pipeline"
            " rank has none for the parameters of other stages. Let it skip parameters whose grad is None, as torch's"
            f" optimizers do, or use {NO_PIPELINE}."
        ) from error
    return reach


def check_evaluations(optimizer: Optimizer, calls: int) -> None:
    """Raise where a step of a pipeline rank evaluates the loss again. Not each optimizer can be tried ahead."""
    if calls > 1:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the loss several times per step. Between the evaluations it reads"
            f" gradients, of which a pipeline rank has only its stages'. Use another optimizer, or {NO_PIPELINE}."
        )


def tried(optimizer: Optimizer) -> Reach:
    """Return the reach of `optimizer` as its copies show it; raises where a copy cannot step other parameters."""
    trial = step_small(optimizer)
    full = trial.values
    if _same(full, step_small(optimizer, steps=0).values):
        raise ValueError("its steps change nothing")
    made = {key for state in trial.twin.state.values() if isinstance(state, dict) for key in state}
    own = {key for group in optimizer.param_groups for p in group["params"] for key in optimizer.state.get(p, ())}
    if own - made:
        raise ValueError(f"its __init__ makes states that a copy does not have: {', '.join(sorted(own - made))}")
    dims = max(parameter.dim() for group in optimizer.param_groups for parameter in group["params"])
    halves = [partial(_half, dim=dim, index=index) for dim in range(dims) for index in (0, 1)]
    cuts = ((map(cut, full), step_small(optimizer, cut)) for cut in halves)
    numbers = trial.numbers()
    # a list of one has the shape of a shard of one element, which one rank alone may have
    if not any(isinstance(each, list) for each in numbers) and all(
        _same(parts, half.values) and half.numbers() == numbers for parts, half in cuts
    ):
        return Reach.ELEMENT

    def one_at_a_time(twin: Optimizer) -> None:
        step_one_at_a_time(twin, StandIns(twin, lambda _, tensor: tensor, lambda _, tensor: tensor))

    single = step_small(optimizer, prepare=one_at_a_time)
    return Reach.TENSOR if _same(full, single.values) and single.numbers() == numbers else Reach.ALL


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return True if a copy of `optimizer` steps a small parameter differently when it steps others too.

    Also where it draws random numbers: which parameters get which then depends on all of them.
    """
    full, single = step_small(optimizer), step_small(optimizer, most=1)
    firsts = [group["params"][0].detach() for group in full.twin.param_groups if group["params"]]
    return not (_same(firsts, single.values) and full.numbers(most=1) == single.numbers())


def _half(tensor: Tensor, dim: int, index: int) -> Tensor:
    return tensor.chunk(2, dim)[index].clone() if tensor.dim() > dim else tensor.clone()


def _same(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


_STEPS = 12
"""A number that a step computes from all parameters may be used from a later step on, some in every tenth only."""


class Trial(NamedTuple):
    """A copy of an optimizer that has stepped small parameters."""

    twin: Optimizer
    calls: int
    """Evaluations of the loss."""

    @property
    def values(self) -> list[Tensor]:
        return [parameter.detach() for group in self.twin.param_groups for parameter in group["params"]]

    def numbers(self, most: int | None = None) -> list[Any]:
        """Numbers that it keeps beside a state for each element: norms, counts, rates. A later step may use them."""
        groups, state = self.twin.param_groups, self.twin.state
        of = [(p, value) for group in groups for p in group["params"][:most] for value in state.get(p, {}).values()]
        kept = [value for p, value in of if not (isinstance(value, Tensor) and value.shape == p.shape)]
        kept += [value for group in groups for value in group.values()]
        return [torch.as_tensor(value).tolist() for value in kept if type(value) in (Tensor, int, float)]


def step_small(
    optimizer: Optimizer,
    cut: Callable[[Tensor], Tensor] = Tensor.clone,
    *,
    most: int | None = None,
    steps: int = _STEPS,
    absent: bool = False,
    wraps: bool = False,
    prepare: Callable[[Optimizer], object] = lambda twin: None,
) -> Trial:
    """Step a copy of `optimizer` on small parameters, with the same numbers in each call.

    Args:
        optimizer: each of its groups has small parameters with as many dimensions as its own, two at least.
        cut: of each small parameter and gradient.
        most: small parameters of a group, all if not given.
        steps: how many; each computes gradients once or more.
        absent: of the last group, one parameter alone has a gradient.
        wraps: copy optimizers that it wraps too (SAM), which may not be all that it keeps of real parameters.
    """
    devices = [p.device for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    generator, calls = torch.Generator().manual_seed(0), 0
    with restored_streams(), torch.enable_grad():
        torch.manual_seed(0)

        def draw() -> Iterator[list[Tensor]]:
            lasting = torch.Generator().manual_seed(1)  # D-Adaptation grows a rate by gradients that agree
            for group in optimizer.param_groups:
                shapes, randn = _shapes(group["params"]), torch.randn
                drawn = [randn(each, generator=generator) + randn(each, generator=lasting) for each in shapes]
                yield [cut(tensor.to(device, group["params"][0].dtype)) for tensor in drawn][:most]

        parameters = [[nn.Parameter(tensor) for tensor in tensors] for tensors in draw()]
        twin = _twin(optimizer, parameters, wraps=wraps)
        prepare(twin)

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            for group, gradients in zip(parameters, draw(), strict=True):
                for parameter, gradient in zip(group, gradients, strict=True):
                    parameter.grad = gradient
            for parameter in parameters[-1][:-1] if absent else ():
                parameter.grad = None
            return torch.ones((), device=device)

        for _ in range(steps):
            twin.step(closure)  # type: ignore[arg-type]  # it may return a tensor
    return Trial(twin, calls)


def _shapes(parameters: list[nn.Parameter]) -> list[tuple[int, ...]]:
    dims = sorted({parameter.dim() for parameter in parameters}, reverse=True)
    shapes = [(8 if dim < 3 else 4,) * dim for dim in dims]
    return shapes * 2 if len(shapes) == 1 else shapes


def _twin(optimizer: Optimizer, parameters: list[list[nn.Parameter]], *, wraps: bool = False) -> Optimizer:
    """Return a copy without state, whose groups have `parameters`. Rates are those after a warm-up."""
    twin = object.__new__(type(optimizer))
    groups = []
    for group, small in zip(optimizer.param_groups, parameters, strict=True):
        options = {name: _isolated(name, value) for name, value in group.items() if name != "params"}
        if "initial_lr" in options:
            options["lr"] = options["initial_lr"]
        groups.append({**options, "params": small})
    counts = {key: deepcopy(value) for key, value in optimizer.state.items() if isinstance(key, str)}  # SPAM's
    instead = {"state": defaultdict[Any, Any](dict, counts), "param_groups": groups}
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("step", *instead)}
    hooks = {name: OrderedDict[int, Any]() for name in own if name.endswith("_hooks")}
    inner = {name: value for name, value in own.items() if wraps and isinstance(value, Optimizer)}
    others = {name: _isolated(name, value) for name, value in own.items() if not (name in hooks or name in inner)}
    twin.__dict__.update({**others, **hooks, **instead})
    for name, wrapped in inner.items():
        setattr(twin, name, _twin(wrapped, parameters))
        getattr(twin, name).param_groups = groups
    return twin


def _isolated(name: str, value: Any) -> Any:
    """Return a copy of what an optimizer keeps, so that a step of the copy does not change the optimizer."""
    for leaf in leaves(value):
        if isinstance(leaf, nn.Parameter | nn.Module | Optimizer) or (isinstance(leaf, Tensor) and leaf.numel() > 1000):
            raise ValueError(f"its attribute {name} has a {type(leaf).__name__}, which belongs to the real parameters")
    return deepcopy(value) if isinstance(value, dict | list | Tensor) else value


def states_per_parameter_byte(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the average bytes of states for each byte of a trained parameter; None where a copy cannot step.

    States that are smaller than their parameter (step counts, a row of means) are left out.
    """
    states, trained = 0.0, 0
    for optimizer in optimizers:
        sizes = [sum(p.numel() for p in group["params"] if p.requires_grad) for group in optimizer.param_groups]
        try:
            twin = step_small(optimizer, steps=1).twin if any(sizes) else optimizer
        except Exception:  # an optimizer of the user's own may count on its own parameters
            return None
        for group, size in zip(twin.param_groups, sizes, strict=True):
            states += size * bytes_per_byte(twin, group["params"]) if size else 0
        trained += sum(sizes)
    return states / trained if trained else 0.0


def bytes_per_byte(optimizer: Optimizer, parameters: Sequence[Tensor]) -> float:
    kept = [(p, value) for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    states = sum(value.nbytes for p, value in kept if value.numel() >= p.numel())
    return states / sum(p.nbytes for p in parameters)
