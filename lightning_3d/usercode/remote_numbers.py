"""Numbers that hooks compute from weights and gradients of one stage, sent to the ranks of all stages.

A tensor computed from such a weight carries a mark with the rank that has it. So do the stand-ins on meta from which
the other ranks compute. A number computed from a marked tensor is exchanged at once, under the parameter's name.
"""

import zlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_3d.axes.parameters import Parameters
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import schema, tree_leaves, tree_map
from lightning_3d.pipeline.exchange import StageExchange
from lightning_3d.ranks import talk
from lightning_3d.ranks.shards import local

_MARK = "_lightning_3d_owner"
_VIEWS = ("__get__", "__getitem__", "__iter__", "unbind", "select", "view", "view_as", "reshape", "squeeze", "detach")
Owner = tuple[str, int]
"""A parameter's name, and the rank of the pipeline that has it."""


class RemoteNumbers:
    """The exchange of numbers within one call of a hook. It is collective where the hook belongs to a backward
    (`of_gradients`); else the first read of a gradient is.
    """

    def __init__(
        self, name: str, stages: StageExchange, parameters: Parameters, read: set[str], *, of_gradients: bool
    ) -> None:
        self.name, self.stages, self.parameters, self.read = name, stages, parameters, read
        self.stand_ins: dict[str, Tensor] = {}
        """Stand-ins on meta for gradients of other ranks, by the name of the parameter."""
        self.with_gradient: set[str] | None = None
        """Names of parameters that have a gradient on the rank that has them."""
        if of_gradients:
            self._find_gradients(name)

    def gradient(self, parameter: Any, place: str) -> Tensor | None:
        """The value of `parameter.grad` in a hook."""
        owner, grad = self.owner(parameter), parameter.grad
        if owner is None:
            return grad
        found = self._find_gradients(place) if self.with_gradient is None else self.with_gradient
        if parameter.is_meta and owner[0] in found:
            grad = self.stand_ins.setdefault(owner[0], torch.empty_like(parameter, requires_grad=False))
        if grad is not None:
            setattr(grad, _MARK, owner)
        return grad

    def keep(self, parameter: Any, grad: Any) -> None:
        """Keep what a hook assigns to the gradient of another rank's `parameter`: no optimizer may step it here."""
        name, _ = self.owner(parameter) or ("", 0)
        self.stand_ins[name] = grad
        if self.with_gradient is not None:
            (self.with_gradient.discard if grad is None else self.with_gradient.add)(name)

    def device(self, tensor: Tensor) -> torch.device:
        """The device of `tensor`. For a stand-in it is the rank's, where sums of its numbers are made."""
        owner = getattr(tensor, _MARK, None)
        stands_in = owner is not None and self.stand_ins.get(owner[0]) is tensor
        return self.stages.device if stands_in else tensor.device

    def owner(self, value: Any) -> Owner | None:
        """The rank that has `value`, None where all ranks have it."""
        held = self.parameters.of(value)
        if held is None or held.source is None:
            return getattr(value, _MARK, None)
        return held.names[0], held.source

    def passed_on(self, func: Any, args: Any, kwargs: Any, result: Any, place: str) -> Any:
        """The `result` of `func`: numbers as on the rank that has them, other tensors marked."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owner = next((found for found in map(self.owner, tensors) if found is not None), None)
        if owner is None:
            return result
        if args and isinstance(args[0], list | tuple) and isinstance(result, list | tuple):  # each of its own
            rows = zip(args[0], result, strict=True)
            return [self._one(func, self.owner(source), [source], each, place) for source, each in rows]
        return tree_map(lambda leaf: self._one(func, owner, tensors, leaf, place), result)

    def _one(self, func: Any, owner: Owner | None, tensors: list[Any], result: Any, place: str) -> Any:
        if owner is None or not isinstance(result, Tensor) or any(result is tensor for tensor in tensors):
            return result
        if not result.dim() and any(tensor.dim() for tensor in tensors) and not is_view(func):
            return self.shared(result, owner, func.__name__, place)
        setattr(result, _MARK, owner)
        return result

    def shared(self, value: Tensor, owner: Owner, what: str, place: str) -> Tensor:
        """The `value` of the rank that has it. Collective over the pipeline."""
        if self.stages.peers.simulated:
            return torch.zeros((), dtype=value.dtype) if value.is_meta else value
        name, source = owner
        self._meet(place)
        device = self.stages.device
        mine = torch.zeros(2, dtype=torch.float64, device=device)
        mine[0] = zlib.crc32(f"{name} {what}".encode())
        if not value.is_meta:
            mine[1] = local(value.detach()).to(device)
        table = self.stages.peers.all_rows(mine)
        if any(row[0] != mine[0] for row in table):
            raise UnsupportedError(
                f"{self.name} computes numbers from weights or gradients in another order on another stage of the"
                f" pipeline (here {what} of {name}). Each rank would get the number of another weight. Visit"
                " named_parameters() in the same order on every rank; trainer.strategy.grad_norm() is the norm of all."
            )
        return table[source][1].to(value.dtype)

    def _find_gradients(self, place: str) -> set[str]:
        self._meet(place)
        self.with_gradient = self.stages.with_gradient(self.parameters)
        return self.with_gradient

    def _meet(self, place: str) -> None:
        """Raise, at the first call from a place, where a rank runs it alone."""
        what = f"{place}, with gradients and weights of all stages,"
        talk.meet_once(what, dist.get_process_group_ranks(self.stages.group), self.read)


def is_view(func: Any) -> bool:
    """Return True if `func` gives a view (of an attribute or a place), through which writes must arrive."""
    return getattr(func, "__name__", "") in _VIEWS


@cache
def is_plain(func: Any) -> bool:
    """True where torch declares that it draws nothing and makes no view. `ShardRules` is not needed then: it costs more
    than most of what optimizers do."""
    found = _overloads_of(func)
    first = [schema(each).arguments[0].alias_info for each in found if schema(each).arguments]
    draws = any(torch.Tag.nondeterministic_seeded in each.tags for each in found)
    return bool(found) and not draws and all(alias is None or alias.is_write for alias in first)


@cache
def is_pointwise(func: Any) -> bool:
    return any(torch.Tag.pointwise in each.tags for each in _overloads_of(func))


def _overloads_of(func: Any) -> list[Any]:
    """The operations of torch that a function or a method stands for."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__") and name != "__get__"  # of an attribute, such as T, which is a view
    bases = (name.strip("_"), name.strip("_")[1:]) if special else (name,)
    packet = next((getattr(torch.ops.aten, each) for each in bases if hasattr(torch.ops.aten, each)), None)
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
