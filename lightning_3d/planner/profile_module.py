"""The `Profile` of a user's module: parameters counted, FLOPs and activations measured on fake tensors.

Kernels are counted too.
"""

import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.errors import PlannerError
from lightning_3d.module.anatomy import Anatomy, Chain
from lightning_3d.planner import parameter_places
from lightning_3d.planner.module_source import FAILURES, build_inputs, build_module, said
from lightning_3d.planner.number_bytes import number_bytes
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.states import Precision


@dataclass
class CostTrace:
    """FLOPs, kernels and saved bytes of one forward, in the chain of blocks and outside it."""

    samples: int = 1
    precision: Precision = "32"
    tokens: int = 1
    block_flops: float = 0
    last_flops: float = 0
    attention_flops: float = 0
    block_kernels: float = 0
    outside_kernels: float = 0
    whole_bytes: float = 0
    split_bytes: float = 0
    outside_bytes: float = 0
    largest_bytes: float = 0
    """Of the largest tensor saved outside the blocks: the logits, where there are some."""
    boundary_elements: float = 0
    boundary_bytes: float = 0
    width: int = 1
    """Elements of one position of what passes between blocks."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    """Storages already counted. References to them prevent their reuse."""


def profile_module(
    dotted: str, arguments: Sequence[str], *, precision: Precision, tokens: int | None, inputs: str | None
) -> Profile:
    """The profile of the class at `dotted`, run on `inputs`, its `example_input_array`, or `tokens` token ids."""
    with FakeTensorMode(), _quiet():
        module = build_module(dotted, arguments)
        if not any(True for _ in module.parameters()):
            raise PlannerError(f"{dotted} has no parameters, so there is nothing to train.")
        counted = count_module(module, name=dotted.rpartition(".")[2], precision=precision)
        trace = CostTrace(precision=precision)
        _run(module, trace, dotted, tokens=tokens, inputs=inputs)
    return measured_profile(counted, trace)


def count_module(module: nn.Module, *, name: str, precision: Precision = "32") -> Profile:
    """The profile of `module` without running it: parameters by place, and what a tensor axis could split."""
    anatomy = Anatomy.of(module)
    chain = main_chain(anatomy)
    if chain is None:
        vectors = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim < 2)
        return Profile(
            name=name,
            layers=1,
            block_parameters=anatomy.parameters,
            vector_parameters=vectors,
            tensor_splits=False,
            block_frozen=parameter_places.frozen(module),
        )
    blocks = [module.get_submodule(name) for name in chain.blocks]
    first, last = parameter_places.outside(module, chain)
    first_frozen, last_frozen = parameter_places.outside(module, chain, lambda _, p: not p.requires_grad)
    halves = {id(parameter) for parameter in parameter_places.products(module)}
    first_half, last_half = parameter_places.outside(module, chain, lambda _, p: id(p) in halves)
    words = parameter_places.vocabulary(module, chain)
    split = parameter_places.outside(module, chain, lambda _, p: id(p) in words)
    inside = anatomy.parameters - first - last
    heads = parameter_places.heads(module.get_submodule(chain.blocks[0]))
    return Profile(
        name=name,
        layers=len(chain.blocks),
        block_parameters=inside / len(chain.blocks),
        whole_parameters=parameter_places.whole(module, chain) / len(chain.blocks),
        vector_parameters=parameter_places.vectors(module, chain) / len(chain.blocks),
        half_parameters=sum(map(parameter_places.half, blocks)) / len(blocks),
        first_half=first_half,
        last_half=last_half,
        first_parameters=first,
        first_whole=first - split[0],
        last_parameters=last,
        last_whole=last - split[1],
        tied_parameters=parameter_places.tied(module, anatomy),
        block_frozen=(parameter_places.frozen(module) - first_frozen - last_frozen) / len(chain.blocks),
        first_frozen=first_frozen,
        last_frozen=last_frozen,
        backward_share=parameter_places.backward_share(module, chain, before=first > first_frozen),
        block_regions=parameter_places.regions(module.get_submodule(chain.blocks[0])),
        element_bytes=number_bytes(precision).stream,
        tensor_divides=heads,
        tensor_splits=any(parameter_places.matrices(module.get_submodule(name)) > 1 for name in chain.blocks),
    )


def measured_profile(counted: Profile, trace: CostTrace) -> Profile:
    """`counted` with what `trace` measured, per sample."""
    blocks, half = counted.layers * trace.samples, 0.5 if trace.precision.endswith("-true") else 1.0
    return Profile(
        **{
            **vars(counted),
            "block_flops": trace.block_flops / blocks,
            "attention_flops": trace.attention_flops / blocks,
            "last_flops": trace.last_flops / trace.samples,
            "block_kernels": trace.block_kernels / counted.layers,
            "outside_kernels": trace.outside_kernels,
            "whole_bytes": half * trace.whole_bytes / blocks,
            "split_bytes": half * trace.split_bytes / blocks,
            "last_bytes": half * trace.outside_bytes / trace.samples,
            "loss_bytes": 2 * half * trace.largest_bytes / trace.samples,
            "boundary_elements": trace.boundary_elements / trace.samples,
            "positions": trace.boundary_elements / trace.width / trace.samples,
            "element_bytes": int(half * trace.boundary_bytes / max(1, trace.boundary_elements))
            or counted.element_bytes,
            "tokens": trace.tokens,
            "example_samples": trace.samples,
        }
    )


def main_chain(anatomy: Anatomy) -> Chain | None:
    """The chain that a pipeline would cut: the one with most parameters, if it has more than one block."""
    chain = next(iter(anatomy.chains), None)
    return chain if chain is not None and len(chain.blocks) > 1 else None


@contextmanager
def traced(module: nn.Module, trace: CostTrace) -> Iterator[None]:
    """Record forwards of `module` in `trace`, under autocast where the precision is mixed."""
    chain = main_chain(Anatomy.of(module))
    blocks = [module.get_submodule(name) for name in chain.blocks] if chain else [module]
    owned = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    state: dict[str, Any] = {"inside": False, "before": 0, "started": 0}
    kernels = KernelCount(owned)
    counter = FlopCounterMode(display=False, custom_mapping={_CPU_ATTENTION: _attention_flops(trace)})

    def enter(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        state.update(inside=True, before=counter.get_total_flops(), started=kernels.kernels)
        hidden = next((value for value in inputs if isinstance(value, Tensor)), None)
        if hidden is not None:
            trace.boundary_elements, trace.boundary_bytes = hidden.numel(), hidden.nbytes
            trace.width = hidden.shape[-1]

    def leave(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        state["inside"] = False
        trace.block_flops += counter.get_total_flops() - state["before"]
        trace.block_kernels += kernels.kernels - state["started"]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in owned and storage not in kernels.casts and storage not in trace.seen:
            trace.seen[storage] = tensor
            _count_saved(tensor, trace, state["inside"])
        return tensor

    hooks = [block.register_forward_pre_hook(enter) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    try:
        with _autocast(trace.precision), counter, kernels, saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    trace.last_flops = counter.get_total_flops() - trace.block_flops
    trace.outside_kernels = kernels.kernels - trace.block_kernels


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention_flops(trace: CostTrace) -> Any:
    """torch's counter has no rule for attention on CPU: two products of (queries x keys x head size) each."""

    def rule(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        batch, heads, queries, size = query
        flops = int(2 * batch * heads * queries * key[2] * (size + value[3]))
        trace.attention_flops += flops
        return flops

    return rule


def _autocast(precision: Precision) -> AbstractContextManager[Any]:
    half = torch.float16 if precision.startswith("16") else torch.bfloat16
    return torch.autocast("cpu", half) if precision.endswith("-mixed") else nullcontext()


def _count_saved(tensor: Tensor, trace: CostTrace, inside: bool) -> None:
    """Count a saved tensor. One as wide as the stream between blocks is unsplit on each tensor rank."""
    size = tensor.untyped_storage().nbytes()
    if not inside:
        trace.outside_bytes += size
        if tensor.is_floating_point():
            trace.largest_bytes = max(trace.largest_bytes, size)
    elif tensor.ndim >= 2 and tensor.shape[-1] == trace.width:
        trace.whole_bytes += size
    else:
        trace.split_bytes += size


def _run(module: nn.Module, trace: CostTrace, dotted: str, *, tokens: int | None, inputs: str | None) -> None:
    step, batch = _first_call(module, dotted, tokens=tokens, inputs=inputs)
    first = next((tensor for tensor in _tensors(batch) if tensor.ndim), None)
    if first is None or first.numel() == 0:
        raise PlannerError(f"the example_input_array of {dotted} has no samples: describe a batch with --inputs.")
    trace.samples = first.shape[0]
    trace.tokens = first.shape[1] if first.ndim == 2 and not first.is_floating_point() else 1
    try:
        with traced(module, trace):
            result = step()
    except FAILURES as error:
        raise PlannerError(f"{dotted} cannot be run{_why(error, inputs)} ({said(error)}).") from error
    if result is None and getattr(module, "automatic_optimization", True):
        raise PlannerError(f"{dotted} returns no loss from its step, so there is nothing to train.")


def _why(error: BaseException, inputs: str | None) -> str:
    """The cause of `error` or its remedy, as the middle of a message."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return ": its step depends on the values of tensors, and a plan has only shapes"
    if "attached to a `Trainer`" in str(error):
        return ": a plan runs the step without a Trainer"
    return " on its inputs: describe a batch with --inputs" if inputs is None else f" on --inputs {inputs}"


def _first_call(module: nn.Module, dotted: str, *, tokens: int | None, inputs: str | None) -> tuple[Any, Any]:
    """A function that runs one step of the module, and the batch of that step."""
    if inputs is not None:
        if tokens is not None:
            raise PlannerError("--inputs says how many tokens a sample has: leave out --sequence.")
        batch = build_inputs(inputs)
        return _step(module, dotted, batch), batch
    example = getattr(module, "example_input_array", None)
    if example is not None:
        if tokens is not None:
            raise PlannerError(f"{dotted} has an example_input_array: give --inputs in place of --sequence.")
        return lambda: _forward(module, example), example
    if tokens is not None:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return lambda: module(ids), ids
    raise PlannerError(
        f"{dotted} has no example_input_array: describe one batch of its training_step with --inputs, as in"
        " --inputs 8x128:int64 or --inputs 8x3x32x32:float32,8:int64."
    )


def _step(module: nn.Module, dotted: str, batch: Any) -> Callable[[], Any]:
    """The `training_step` on `batch`, or the forward of what is no LightningModule."""
    if not isinstance(module, LightningModule):
        return lambda: _forward(module, batch)
    if not is_overridden("training_step", module):
        raise PlannerError(f"{dotted} has no training_step, which --inputs is a batch of.")
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
    return lambda: module.training_step(batch, *index)


def _forward(module: nn.Module, batch: Any) -> Any:
    """As Lightning gives an `example_input_array` to a module."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


@contextmanager
def _quiet() -> Iterator[None]:
    """`self.log` outside a Trainer warns; here that is how it is meant to be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class KernelCount(TorchDispatchMode):
    """Counts operations that compute or copy. Notes copies of `weights` in another dtype: autocast makes them."""

    def __init__(self, weights: Container[int] = ()) -> None:
        super().__init__()
        self.kernels, self.weights = 0, weights
        self.casts: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.casts[result.untyped_storage()._cdata] = result
        elif _computes(func):
            self.kernels += 1
        return result


def _computes(func: Any) -> bool:
    results = func._schema.returns
    view = bool(results) and all(one.alias_info is not None and not one.alias_info.is_write for one in results)
    return func.namespace != "prim" and func is not torch.ops.aten._unsafe_view.default and not view
