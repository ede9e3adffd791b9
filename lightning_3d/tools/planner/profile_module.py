"""The `Profile` of a user's module: parameters counted, FLOPs and activations measured on fake tensors.

Kernels are counted too.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import gcd
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.kept_results import is_kept
from lightning_3d.errors import PlannerError
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.expert_modules import RoutedCall, routed_experts
from lightning_3d.module.operation_count import OperationCount
from lightning_3d.module.packed_weights import is_packed, value_bytes
from lightning_3d.module.torch_private import UNKNOWN, memory_key
from lightning_3d.module.undo import UndoStack
from lightning_3d.optim.state_bytes import Precision, number_bytes
from lightning_3d.pipeline.units import units_by_place
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.sandbox.trees import leaves
from lightning_3d.sandbox.without_values import ShapesOnly
from lightning_3d.tools.planner import parameter_places
from lightning_3d.tools.planner.module_source import FAILURES, build_module, error_line, first_call
from lightning_3d.tools.planner.parameter_places import PLACES, main_chain
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.step_time import USUAL_DEPTH
from lightning_3d.zero.shard_units import looks_up, outside_units, shard_units


@dataclass
class CostTrace:
    """FLOPs, kernels and saved bytes of one forward, in the chain of blocks and outside it."""

    samples: int = 1
    precision: Precision = "32"
    frozen_bits: float | None = None
    """Of a frozen weight in a block, where the module that will run has it packed."""
    tokens: int = 1
    block_flops: float = 0
    last_flops: float = 0
    attention_flops: float = 0
    query_elements: float = 0
    """Of the queries and results of attention."""
    key_elements: float = 0
    """Of its keys and values."""
    heads: int = 0
    """Divides the heads of each attention."""
    mixers: list[bool] = field(default_factory=list)
    """Which of the blocks have no attention."""
    block_kernels: float = 0
    outside_kernels: float = 0
    whole_bytes: float = 0
    split_bytes: float = 0
    first_bytes: float = 0
    last_bytes: float = 0
    largest_bytes: float = 0
    """Of the largest tensor saved outside the blocks: the logits, where there are some."""
    kept_bytes: float = 0
    """Results of products and attention in the blocks."""
    saves_last: bool = False
    """True where a block saved something after its last product."""
    boundary_elements: float = 0
    """That enter the blocks which tensor ranks split, in all their calls."""
    boundary_bytes: float = 0
    boundary_calls: int = 0
    side_elements: float = 0
    """Of other inputs as wide as those that need a gradient: what a decoder reads of an encoder."""
    width: int = 1
    """Elements of one position of what passes between blocks."""
    head_rows: float = 0
    """That enter the last linear layer around the blocks."""
    logits: float = 0
    """Elements that it gives."""
    active: list[float] = field(default_factory=list)
    """For each call of experts with routes, the share of them that a token goes to."""
    routed_elements: float = 0
    """That enter experts which are called with routes: the numbers of a token, once for each of its experts."""
    head_bytes: float = 0
    """Of an element that enters the last linear layer around the blocks; 0 where there is none."""
    called: dict[str, bool] = field(default_factory=dict)
    """Modules around the blocks, and True where a block had run before their first call."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    """Storages already counted. References to them prevent their reuse."""


def profile_module(
    dotted: str,
    arguments: Sequence[str],
    *,
    precision: Precision,
    tokens: int | None,
    inputs: str | None,
    frozen_bits: float | None = None,
) -> Profile:
    """The profile of the class at `dotted`, run on `inputs`, its `example_input_array`, or `tokens` token ids."""
    with ShapesOnly(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `self.log` outside a Trainer warns, and here it is meant to be
        module = build_module(dotted, arguments)
        if not any(True for _ in module.parameters()):
            raise PlannerError(f"{dotted} has no parameters, so there is nothing to train.")
        trace = CostTrace(precision=precision, frozen_bits=frozen_bits)
        step, batch = first_call(module, dotted, tokens=tokens, inputs=inputs)
        mode.answers = False  # costs of a step that depends on values are not known
        _run(module, trace, dotted, step, batch, inputs)
        return measured_profile(module, trace, name=dotted.rpartition(".")[2])


def count_module(
    module: nn.Module,
    *,
    name: str,
    precision: Precision = "32",
    called: Mapping[str, bool] = MappingProxyType({}),
    frozen_bits: float | None = None,
) -> Profile:
    """The profile of `module` without running it: parameters by place, and what a tensor axis could split."""
    anatomy = Anatomy.of(module)
    chain = main_chain(module, anatomy)
    if chain is None:
        if frozen_bits:
            raise PlannerError(f"--frozen-bits counts weights in blocks, and {name} has no equal blocks. Leave it out.")
        vectors = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim < 2)
        return Profile(
            name=name,
            layers=1,
            block_parameters=anatomy.parameters,
            vector_parameters=vectors,
            tensor_splits=False,
            block_frozen=sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad),
        )
    placed, count = parameter_places.places(module, chain, called), len(chain.blocks)
    words = parameter_places.vocabulary(module, chain)

    def fewer_bits(parameter: nn.Parameter) -> bool:
        return bool(frozen_bits) and parameter.ndim > 1 and not parameter.requires_grad and "block" in placed[parameter]

    apart = outside_units(module, shard_units(module, anatomy, freed=True)).values()
    products = [*parameter_places.products(module)]
    kinds = {
        "half": {*map(id, products)},
        "packed": {id(p) for p in products if is_packed(p) or fewer_bits(p)},
        "vector": {id(parameter) for parameter in placed if parameter.ndim < 2},
        "frozen": {id(parameter) for parameter in placed if not parameter.requires_grad},
        "unsplit": parameter_places.unsplit(module, chain),
        "shared": parameter_places.shared_biases(module, chain).intersection(map(id, products)),
        "words": words,
        "apart": {id(parameter) for part in apart for parameter in part.parameters()},
        "looked up": {id(part.weight) for part in apart if looks_up(part)},
    }

    inside = tuple(f"{block}." for block in chain.blocks)
    experts = [each for each in routed_experts(module) if each.name.startswith(inside)]
    routed = [module.get_parameter(name) for each in experts for name in each.parameters]
    found = units_by_place(module, anatomy, chain, called)
    regions, inputs = parameter_places.regions(module, chain)

    def whole(unit: str) -> int:
        return sum(p.numel() for p in module.get_submodule(unit).parameters() if id(p) not in words)

    def size(parameter: nn.Parameter) -> float:
        """In numbers of the precision: a packed weight has fewer bytes than one for each value."""
        if fewer_bits(parameter):
            return parameter.numel() * float(frozen_bits or 0) / 8 / number_bytes(precision).weight
        return value_bytes(parameter) / number_bytes(precision).weight if is_packed(parameter) else parameter.numel()

    def elements(place: str, kind: str | None = None) -> float:
        here = (p for p, where in placed.items() if min(where, key=PLACES.index) == place)
        chosen = (p for p in here if kind is None or id(p) in kinds[kind])
        return sum(size(parameter) for parameter in chosen)

    rows: dict[tuple[str, int, bool], float] = defaultdict(float)
    in_half = kinds["half"] - kinds["packed"]
    for parameter, where in placed.items():
        place, height = min(where, key=PLACES.index), len(parameter) if parameter.ndim else 1
        rows[place, height, id(parameter) in in_half] += size(parameter) / (count if place == "block" else 1)
    first_frozen = elements("first", "frozen")
    return Profile(
        name=name,
        layers=count,
        block_parameters=elements("block") / count,
        whole_parameters=elements("block", "unsplit") / count,
        vector_parameters=elements("block", "vector") / count,
        expert_parameters=sum(map(size, routed)) / count,
        experts=gcd(*(each.count for each in experts)),
        expert_count=sum(each.count for each in experts) / count,
        expert_depth=USUAL_DEPTH,  # what narrow products cost more is not known of this code
        half_parameters=elements("block", "half") / count,
        half_whole=elements("block", "shared") / count,
        packed_parameters=elements("block", "packed") / count,
        first_half=elements("first", "half"),
        last_half=elements("last", "half"),
        first_parameters=elements("first"),
        first_whole=elements("first") - elements("first", "words"),
        last_parameters=elements("last"),
        last_whole=elements("last") - elements("last", "words"),
        first_freed=elements("first", "looked up"),
        last_freed=elements("last", "apart"),
        rows=tuple((place, height, size, half) for (place, height, half), size in rows.items()),
        units=tuple((place, unit.cost, whole(unit.name)) for place, unit in found),
        tied_parameters=sum(p.numel() for p, where in placed.items() if {"first", "last"} <= where),
        block_frozen=elements("block", "frozen") / count,
        first_frozen=first_frozen,
        last_frozen=elements("last", "frozen"),
        backward_share=parameter_places.backward_share(module, chain, before=elements("first") > first_frozen),
        block_regions=regions,
        region_inputs=inputs,
        element_bytes=number_bytes(precision).stream,
        tensor_divides=parameter_places.heads(module, chain),
        tensor_splits=any(parameter_places.splits(module.get_submodule(name)) for name in chain.blocks),
    )


def measured_profile(module: nn.Module, trace: CostTrace, *, name: str) -> Profile:
    """The profile of `module` with what `trace` measured, per sample."""
    counted = count_module(
        module, name=name, precision=trace.precision, called=trace.called, frozen_bits=trace.frozen_bits
    )
    blocks, half = counted.layers * trace.samples, 0.5 if trace.precision.endswith("-true") else 1.0
    stream = trace.boundary_elements / max(1, trace.boundary_calls) / trace.samples
    mixed = trace.precision.endswith("-mixed")
    return replace(
        counted,
        block_flops=trace.block_flops / blocks,
        attention_flops=trace.attention_flops / blocks,
        query_elements=trace.query_elements / blocks,
        key_elements=trace.key_elements / blocks,
        mixers=tuple(trace.mixers),
        heads=trace.heads,
        last_flops=trace.last_flops / trace.samples,
        block_kernels=trace.block_kernels / counted.layers,
        outside_kernels=trace.outside_kernels,
        whole_bytes=half * trace.whole_bytes / blocks,
        split_bytes=half * trace.split_bytes / blocks,
        kept_bytes=half * trace.kept_bytes / blocks,
        region_bytes=counted.block_regions * stream * number_bytes(trace.precision).product,
        region_inputs=counted.region_inputs if mixed else counted.block_regions,
        saves_last=trace.saves_last,
        first_bytes=half * trace.first_bytes / trace.samples,
        last_bytes=half * trace.last_bytes / trace.samples,
        loss_bytes=2 * half * trace.largest_bytes / trace.samples,
        boundary_elements=stream,
        active_share=mean(trace.active) if trace.active else 1.0,
        routed_elements=trace.routed_elements / blocks,
        side_elements=trace.side_elements / blocks,
        positions=stream / trace.width,
        joins_positions=0 < trace.head_rows / trace.samples < stream / trace.width,
        element_bytes=int(half * trace.boundary_bytes / max(1, trace.boundary_elements)) or counted.element_bytes,
        head_bytes=int(half * trace.head_bytes),
        logits=trace.logits / trace.samples,
        tokens=trace.tokens,
        example_samples=trace.samples,
    )


def _counted(trace: CostTrace) -> Callable[..., Tensor]:
    """torch's attention, counted as it is called: a CPU's kernel gets keys that heads share once for each head."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        result: Tensor = SDPA(query, key, value, *args, **options)
        trace.query_elements += query.numel() + result.numel()
        trace.key_elements += key.numel() + value.numel()
        trace.heads = gcd(trace.heads, *(each.shape[-3] if each.dim() > 3 else 1 for each in (query, key)))
        return result

    return attention


@contextmanager
def traced(module: nn.Module, trace: CostTrace) -> Iterator[None]:
    """Record forwards of `module` in `trace`, under autocast where the precision is mixed."""
    chain = main_chain(module, Anatomy.of(module))
    blocks = [module.get_submodule(name) for name in chain.blocks] if chain else [module]
    split = {block for block in blocks if parameter_places.splits(block)} or set(blocks)
    owned = {memory_key(parameter) for parameter in module.parameters()}
    state: dict[str, Any] = {"inside": False, "begun": False, "before": 0, "started": 0, "kept": 0, "saved": -1}
    state |= {"split": True, "channels": -1}
    count = OperationCount(owned, is_kept)

    outside = parameter_places.around(module, chain) if chain else {}

    def call(part: nn.Module, inputs: tuple[Any, ...]) -> None:
        trace.called.setdefault(outside[part], state["begun"])
        if isinstance(part, nn.Linear) and inputs:
            trace.head_bytes = inputs[0].element_size()
            trace.head_rows = inputs[0].numel() / part.in_features
            trace.logits = trace.head_rows * part.out_features

    def enter(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        state.update(inside=True, begun=True, before=count.flops, started=count.kernels, kept=count.kept)
        state.update(
            keys=trace.key_elements, entered=0, split=block in split, channels=parameter_places.channel_dimension(block)
        )
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        if tensors and block in split:
            hidden, *others = tensors
            trace.boundary_elements += hidden.numel()
            trace.boundary_bytes += hidden.nbytes
            trace.boundary_calls += 1
            trace.width = hidden.shape[state["channels"] if hidden.ndim > 2 else -1]
            wide = (each for each in others if each.requires_grad and each.shape[-1] == hidden.shape[-1])
            trace.side_elements += sum(each.numel() for each in wide)

    def route(experts: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        (hidden, index, _), _ = RoutedCall(experts).taken(inputs, named)
        trace.routed_elements += index.numel() * hidden.shape[-1]
        trace.active.append(index.shape[-1] / mixtures[experts])

    def leave(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        state["inside"] = False
        if block in split:
            trace.mixers.append(trace.key_elements == state["keys"])
        trace.block_flops += count.flops - state["before"]
        trace.block_kernels += count.kernels - state["started"]
        trace.kept_bytes += count.kept - state["kept"]
        trace.saves_last = state["saved"] == count.kept

    def pack(tensor: Tensor) -> Tensor:
        state["saved"] = count.kept
        storage = memory_key(tensor)
        if storage not in owned and storage not in count.casts and storage not in trace.seen:
            trace.seen[storage] = tensor
            _count_saved(tensor, trace, **state)
        return tensor

    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    hooks += [part.register_forward_pre_hook(call) for part in outside]
    mixtures = {module.get_submodule(each.name): each.count for each in routed_experts(module)}
    hooks += [experts.register_forward_pre_hook(route, with_kwargs=True) for experts in mixtures]
    half = torch.float16 if trace.precision.startswith("16") else torch.bfloat16
    with UndoStack() as undo:
        undo.replace(SDPA, _counted(trace), blocks)
        for hook in hooks:
            undo.callback(hook.remove)
        with (
            torch.autocast("cpu", half, trace.precision.endswith("-mixed")),
            count,
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            yield
    trace.attention_flops += count.attention_flops
    trace.last_flops = count.flops - trace.block_flops
    trace.outside_kernels = count.kernels - trace.block_kernels


def _count_saved(
    tensor: Tensor, trace: CostTrace, *, inside: bool, begun: bool, split: bool, channels: int, **_: Any
) -> None:
    """Count a saved tensor. One as wide as the stream between blocks is unsplit on each tensor rank."""
    size = tensor.untyped_storage().nbytes()
    if not inside:
        trace.last_bytes += size if begun else 0
        trace.first_bytes += 0 if begun else size
        if tensor.is_floating_point():
            trace.largest_bytes = max(trace.largest_bytes, size)
    elif not split or trace.width in (tensor.shape[-1:] + (tensor.shape[channels:][:1] if tensor.ndim > 2 else ())):
        trace.whole_bytes += size
    else:
        trace.split_bytes += size


def _run(
    module: nn.Module, trace: CostTrace, dotted: str, step: Callable[[], Any], batch: Any, inputs: str | None
) -> None:
    first = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None or first.numel() == 0:
        raise PlannerError(f"the example_input_array of {dotted} has no samples: describe a batch with --inputs.")
    trace.samples = first.shape[0]
    trace.tokens = first.shape[1] if first.ndim == 2 and not first.is_floating_point() else 1
    try:
        with traced(module, trace):
            result = step()
    except FAILURES as error:
        raise PlannerError(f"{dotted} cannot be run{_why(error, inputs)} ({error_line(error)}).") from error
    if result is None and getattr(module, "automatic_optimization", True):
        raise PlannerError(f"{dotted} returns no loss from its step, so there is nothing to train.")


def _why(error: BaseException, inputs: str | None) -> str:
    """The cause of `error` or its remedy, as the middle of a message."""
    if isinstance(error, UNKNOWN):
        return ": its step depends on the values of tensors, and a plan has only shapes"
    if "attached to a `Trainer`" in str(error):
        return ": a plan runs the step without a Trainer"
    return " on its inputs: describe a batch with --inputs" if inputs is None else f" on --inputs {inputs}"
