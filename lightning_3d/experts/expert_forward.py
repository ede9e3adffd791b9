"""The forwards of experts modules on a rank that owns some experts, and `apply_experts`, which puts them there.

A mixture that its author wrote with a list of experts and a loop runs twice. The first time each expert notes its rows
and returns zeros. Then rows travel to their owners, who compute all rows of an expert at once, and back. The second
time each expert returns its result. So any code may choose the rows: it sees the tokens of this rank, as with DDP.
`own_shards` has the parameters that compute: this rank's experts, or those of all ranks.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.kept_results import kept_once
from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.expert_exchange import InGraph, TokenRoute, exchange, to_owners, to_tokens
from lightning_3d.experts.expert_plan import DividedExperts, ExpertPlan
from lightning_3d.layout import EXPERT_AXIS
from lightning_3d.module.anatomy import place_of
from lightning_3d.module.expert_modules import RoutedCall, of_expert
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.undo import UndoStack, replaced_attributes
from lightning_3d.sandbox.snapshot import Copies
from lightning_3d.sandbox.trees import leaves, map_leaves, tensors_in
from lightning_3d.sandbox.trial import undone_effects
from lightning_3d.tensor.apply import AppliedTensor, replace_by_shards
from lightning_3d.tensor.autograd_collectives import local_shard, pair
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.overlap import autocast_dtype
from lightning_3d.zero import OwnExperts


class Calls:
    """The calls of a mixture's experts in one forward: noted, and answered in the second run."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self.rows: dict[int, list[Tensor]] = defaultdict(list)
        self.results: dict[int, deque[Tensor]] = {}

    def of(self, number: int, rows: Tensor, result: torch.dtype) -> Tensor:
        """The result of expert `number` for `rows`, zeros in the first run."""
        if self.results:
            answers = self.results[number]
            if not answers or answers[0].numel() != rows.numel():
                raise self.differs(number)
            return answers.popleft().view(rows.shape)
        if rows.shape[-1:] != (self.width,) or torch.promote_types(rows.dtype, self.dtype) != self.dtype:
            raise UnsupportedError(
                f"expert {number} is called with {tuple(rows.shape)} numbers of {rows.dtype}. Tokens travel to their"
                f" owners as rows of {self.width} numbers of {self.dtype}. Use expert_parallel_size=1."
            )
        self.rows[number].append(rows.to(self.dtype))
        return torch.zeros_like(rows, dtype=result)

    def differs(self, number: int) -> UnsupportedError:
        return UnsupportedError(
            f"expert {number} is called with other rows when the forward of its mixture runs again. The first run"
            " finds the rows that travel to the owners of experts. Use expert_parallel_size=1."
        )


class ListedExpert(ForwardLayer, rank=Layer.EXPERTS):
    """An expert in a list: it notes its rows, or returns what its owner has computed."""

    def __init__(self, module: nn.Module, number: int, mixture: "ListedForward") -> None:
        super().__init__(module)
        self.number, self.mixture = number, mixture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mixture.computes:
            return self.next(*args, **kwargs)
        if self.mixture.calls is None or len(args) != 1 or kwargs:
            raise UnsupportedError(
                f"expert {self.number} is called outside of {type(self.mixture.module).__name__}.forward, or with other"
                " arguments than one tensor. Data ranks share experts that get rows there. Use expert_parallel_size=1."
            )
        return self.mixture.calls.of(self.number, compute_late(args[0]), autocast_dtype(args[0]))


class ListedForward(ForwardLayer, rank=Layer.EXPERTS):
    """The forward of a mixture whose experts are called one by one."""

    def __init__(self, module: nn.Module, experts: DividedExperts, axis: Axis) -> None:
        super().__init__(module)
        self.experts, self.axis = experts, axis
        children = list(module.get_submodule(experts.listed).children())
        self.layers = [ListedExpert(child, number, self) for number, child in enumerate(children)]
        self.calls: Calls | None = None
        """Of the forward that runs now."""
        self.computes = False
        """True while this rank computes its experts."""
        self.loads: Tensor | int = 0
        """Rows that each expert of this rank got."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = compute_late(args), compute_late(kwargs)
        first = tensors_in((args, kwargs))[0]
        calls = Calls(self.experts.width, first.dtype)
        # the second run draws the same numbers again, and makes the same changes
        undone = undone_effects(self.module, (f"{self.experts.listed}.",), Copies(largest=math.inf))
        with replaced_attributes(self, calls=calls), undone:
            self.next(*args, **kwargs)
        calls.results, back = self._exchanged(calls, first)
        with replaced_attributes(self, calls=calls):
            result = self.next(*args, **kwargs)
        for number, answers in calls.results.items():
            if answers:
                raise calls.differs(number)
        anchored = False

        def anchor(leaf: Any) -> Any:
            nonlocal anchored
            if anchored or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            anchored = True
            return InGraph.apply(leaf, False, back)

        return map_leaves(anchor, result)

    def _exchanged(self, calls: Calls, like: Tensor) -> tuple[dict[int, deque[Tensor]], Tensor]:
        """The results of all calls, and the tensor that they are parts of."""
        count, axis = self.experts.count, self.axis
        width, own = self.experts.width, count // axis.size
        rows = [calls.rows.get(number, []) for number in range(count)]
        lengths = [[each.numel() // width for each in some] for some in rows]
        # an expert that is called without rows is in the graph too, on one device, so a call counts beside its rows
        sent = torch.tensor([2 * sum(some) + bool(some) for some in lengths], device=like.device)
        everyone = _sizes_of_all(axis, sent).tolist()
        numbers = [sum(some) for some in lengths]
        sends = [sum(numbers[start : start + own]) for start in range(0, count, own)]
        first = axis.rank * own
        arrived = [[each // 2 for each in some[first : first + own]] for some in everyone]
        receives = [sum(some) for some in arrived]
        if self.module.training:
            self.loads = self.loads + torch.tensor(arrived).sum(0)
        # one more part, so that every rank has the exchange in its graph
        edge = torch.empty(0, width, dtype=like.dtype, device=like.device).requires_grad_(torch.is_grad_enabled())
        flat = torch.cat([*(each.reshape(-1, width) for some in rows for each in some), edge])
        here = _Swapped.apply(flat, axis, sends, receives)
        called = [number for number in range(count) if any(some[number] for some in everyone)]
        back = _Swapped.apply(self._computed(here, arrived, called), axis, receives, sends)
        parts = iter(back.split([length for some in lengths for length in some]))
        return {number: deque(next(parts) for _ in some) for number, some in enumerate(lengths)}, back

    def _computed(self, here: Tensor, arrived: Sequence[Sequence[int]], called: Sequence[int]) -> Tensor:
        """The results of rows that are sorted by rank and then by expert. `called` are the experts with a gradient."""
        of_ranks = here.split([*map(sum, arrived)])
        pieces = [list(part.split(list(some))) for part, some in zip(of_ranks, arrived, strict=True)]
        own = len(arrived[0])
        mine = range(self.axis.rank * own, (self.axis.rank + 1) * own)
        names = {number: of_expert(self.experts.parameters, self.experts.count, number) for number in called}
        foreign = [name for number in called if number not in mine for name in names[number]]
        owned = own_shards(self.module, [name for number in called for name in names[number]], self.axis)
        with replaced_attributes(self, computes=True), owned as shards:
            for number in [number for number in called if number in mine]:
                expert = number - mine.start
                result = self.layers[number].module(torch.cat([some[expert] for some in pieces]))
                for some, part in zip(pieces, result.split([each[expert] for each in arrived]), strict=True):
                    some[expert] = part
        dtype = autocast_dtype(here)
        rows = torch.cat([here[:0].to(dtype), *(part.to(dtype) for some in pieces for part in some)])
        # owners of other experts step those too that have no rows here, and every rank has the same states
        return InGraph.apply(rows, True, *(shards[name] for name in foreign))


class _Swapped(torch.autograd.Function):
    """`exchange`; the gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, sends, receives
        return exchange([rows], axis, sends, receives)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchange([grad], ctx.axis, ctx.receives, ctx.sends)[0], None, None, None


@kept_once
def _sizes_of_all(axis: Axis, sent: Tensor) -> Tensor:
    """Rows that each rank sends to each expert, a line for each rank."""
    return axis.group.all_rows(sent)


class ExpertForward(ForwardLayer, rank=Layer.EXPERTS):
    """Sends tokens to the owners of their experts, computes those of this rank, and takes the results back."""

    def __init__(self, module: nn.Module, experts: DividedExperts, axis: Axis) -> None:
        super().__init__(module)
        self.experts, self.axis, self.call = experts, axis, RoutedCall(module)
        self.loads: Tensor | int = 0
        """Rows that each expert of this rank got."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes, others = self.call.taken(args, kwargs)
        hidden, index, weights = compute_late(tuple(routes))
        self.call.check(hidden, index, weights, "Use expert_parallel_size=1.")
        if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(others)):
            raise UnsupportedError(
                f"{type(self.module).__name__} is called with a tensor among {', '.join(others)}, beside hidden"
                " states, experts and weights. It would not travel with the tokens. Use expert_parallel_size=1."
            )
        route = TokenRoute.of(index, self.experts.count, self.axis)
        if self.module.training:
            self.loads = self.loads + route.loads
        rows, factors = to_owners(hidden.reshape(-1, hidden.shape[-1]), weights, route)
        own = dict.fromkeys(self.experts.numbers, self.experts.count // self.axis.size)
        with own_shards(self.module, self.experts.parameters, self.axis, numbers=own):
            result = self.call.run(self.next, [rows, route.experts[:, None], factors], others)
        return to_tokens(InGraph.apply(result, False, rows, factors), route).view(hidden.shape)


class GatheredForward(ForwardLayer, rank=Layer.EXPERTS):
    """The forward of code that multiplies all experts at once: with the experts of all ranks, gathered for the call."""

    def __init__(self, module: nn.Module, experts: DividedExperts, axis: Axis) -> None:
        super().__init__(module)
        self.experts, self.axis = experts, axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_shards(self.module, self.experts.parameters, self.axis, gathered=True):
            return self.next(*args, **kwargs)


@dataclass
class AppliedExperts(AppliedTensor):
    """A module of which each rank owns some experts."""

    own: OwnExperts
    mixtures: dict[str, "ExpertForward | ListedForward"]
    """Those whose tokens travel, by name."""

    def take_loads(self) -> dict[str, tuple[int, int]]:
        """Rows of the fullest expert and of all here, in training since the last call, read once for all mixtures."""
        found = {name: each.loads for name, each in self.mixtures.items() if isinstance(each.loads, Tensor)}
        for each in self.mixtures.values():
            each.loads = 0
        if not found:
            return {}
        kind = self.mesh.device_type  # those of a list are on the host
        read = torch.stack([torch.stack([each.max(), each.sum()]).to(kind) for each in found.values()]).tolist()
        return {name: (fullest, rows) for name, (fullest, rows) in zip(found, read, strict=True)}


def make_layers(module: nn.Module, experts: DividedExperts, axis: Axis) -> list[ForwardLayer]:
    """The layer for the forward of `module`, and those of the experts of a list."""
    if not experts.listed:
        return [(GatheredForward if experts.gathered else ExpertForward)(module, experts, axis)]
    mixture = ListedForward(module, experts, axis)
    return [mixture, *mixture.layers]


def apply_experts(
    module: nn.Module, plan: ExpertPlan, mesh: DeviceMesh, undo: UndoStack, ledger: Ledger | None = None
) -> AppliedExperts:
    """Replace the experts of `module` by those of this rank, and let tokens travel. `undo` is collective.

    Weights are equal on every rank. Parameters on meta, of other pipeline stages, stay unchanged.
    """
    axis = Axis(Group(mesh.get_group(), EXPERT_AXIS, ledger))
    here = {name: module.get_submodule(name) for name in plan.modules}
    here = {name: part for name, part in here.items() if not any(p.is_meta for p in part.parameters())}
    applied = AppliedExperts(module, plan.splits, mesh, {}, OwnExperts(), {})
    replace_by_shards(applied, undo)
    for name, part in here.items():
        experts = plan.modules[name]
        for layer in make_layers(part, experts, axis):
            add_layer(layer, undo)
            if isinstance(layer, ExpertForward | ListedForward):
                applied.mixtures[name] = layer
        if experts.copied:
            applied.own.alone += [part.get_parameter(own) for own in experts.parameters]
        else:
            applied.own.modules.append(part)
    return applied


@contextmanager
def own_shards(
    module: nn.Module,
    names: Sequence[str],
    axis: Axis,
    *,
    gathered: bool = False,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[dict[str, Tensor]]:
    """Let `module` compute with this rank's shards of the parameters `names` inside, or with those of all ranks.

    Attributes have the values of `numbers` meanwhile. Gradients are those of the tokens of all ranks, so an N-th of
    them is this rank's part of a mean over ranks.
    """
    shards: dict[str, Tensor] = {}
    for name in names:
        shard = local_shard(module.get_parameter(name))
        shards[name] = _Averaged.apply(shard, axis.size)
    if gathered:
        shards = dict(zip(names, _Gathered.apply(axis, names, *shards.values()), strict=True))
    with UndoStack() as undo:
        for name, number in numbers.items():
            undo.set(module, name, number)
        for name, shard in shards.items():
            undo.set(*place_of(module, name), shard)
        yield shards


_Averaged = pair("Averaged", lambda shard, ranks: shard.view_as(shard), lambda grad, ranks: grad / ranks)


class _Gathered(torch.autograd.Function):
    """The experts of all ranks, from `shards` with as many rows on each. Gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, names: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.names = axis, names
        ctx.set_materialize_grads(False)
        rows = [axis.all_rows(shard, shard.numel()).view(-1, *shard.shape[1:]) for shard in shards]
        # frozen ones beside others: their gradients would be computed, and summed over the ranks
        ctx.mark_non_differentiable(
            *(whole for whole, shard in zip(rows, shards, strict=True) if not shard.requires_grad)
        )
        return tuple(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        asked = ctx.needs_input_grad[2:]
        if unused := [name for name, grad, some in zip(ctx.names, grads, asked, strict=True) if some and grad is None]:
            raise UnsupportedError(
                f"the mixture with {unused[0]} computed without it, so ranks cannot sum the gradients of their experts:"
                " one that has none would not answer. Use expert_parallel_size=1."
            )
        size = ctx.axis.size
        return None, None, *(None if grad is None else ctx.axis.reduce_scatter([*grad.chunk(size)]) for grad in grads)
