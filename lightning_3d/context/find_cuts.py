"""`plan_context`: find the stream of each block, and by trial which of its arguments are cut with it; then the ends.

The stream is the argument that the block returns in the same shape. Its dimension of positions is the one whose size is
not the width. Other arguments with a dimension of that size are cut or whole (rotary tables, masks, positions): the
first choice that gives what the whole block gives is taken. A block that mixes positions by other means than attention
agrees with none: its heads are divided where that is proven (`_with_heads`), else it stays whole.
"""

import gc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.context.cut_plan import ENOUGH, LEAST, BlockCut, ContextPlan, listed, parts_of
from lightning_3d.context.eager_private import cache_state, other_attention
from lightning_3d.context.prove_cut import CutProver
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.host_memory import quick_collections, return_freed_memory
from lightning_3d.module.torch_private import is_compiled
from lightning_3d.pipeline.gates import hooked_inside, users_hooks
from lightning_3d.tensor.block_calls import Recording
from lightning_3d.tensor.blocks import find_blocks, structure
from lightning_3d.tensor.late_head import is_plain_linear
from lightning_3d.tensor.plan_module import SHARED, blocks_sharing, plan_unit, reads_same
from lightning_3d.tensor.proof import Refused, is_large, outcome
from lightning_3d.tensor.sample import POSITIONS, Sample, is_activation, shortened
from lightning_3d.tensor.scratch import SEED, proofs_of, scratch_copy
from lightning_3d.tensor.sequence import sequence_candidates
from lightning_3d.tensor.sizes import watch_reads
from lightning_3d.tensor.tensor_plan import Attribute, SequencePlan, UnitPlan

Stream = tuple[int, int, int]
"""The dimension of positions, the length and the width of hidden states."""
MOST = 48
"""Most choices of arguments that are tried for a block."""
NO_STREAM = "no block gets hidden states of a sequence (three dimensions, the width last) by a call, block(x)"


@dataclass
class _Kind:
    """A studied block, and the facts that another block must share to be cut like it."""

    read: Mapping[Attribute, Any]
    signature: str
    cut: BlockCut | None
    reason: str


def plan_context(module: nn.Module, size: int, calls: Recording | None, *, alone: bool = True) -> ContextPlan:
    """Find a proven cut of each block of `module` over `size` context ranks. Raise where no block can be cut.

    The module does not change. No process group is needed, and the global random state stays. Where tensor ranks or
    owners of experts divide blocks too, and not context ranks `alone`, heads are not divided again.
    """
    names = find_blocks(module)
    if calls is None:
        why = "training_step could not run on one batch before training, or optimizes manually" if names else NO_STREAM
        raise UnsupportedError(_nothing(module, size, why))
    blocks: dict[str, BlockCut] = {}
    whole: dict[str, str] = {}
    elements: dict[str, int] = {}
    kinds: dict[tuple[object, ...], list[_Kind]] = {}
    compiled = {inner for each in module.modules() if is_compiled(each) for inner in each.modules()}
    for name in names:
        trained = [call for call in calls.samples.get(name, ()) if call.training]
        states = {cache_state(value) for call in trained for value in (*call.args, *call.kwargs.values())}
        if {False, True} <= states:
            raise UnsupportedError(
                f"training_step of {type(module).__name__} fills a cache and goes on with it ({name}). Under context"
                " ranks blocks get no empty cache in training, so a later call would not see the positions before it."
                " Pass the whole sequence in one call, or use context_parallel_size=1."
            )
    large = any(is_large(module.get_submodule(name)) for name in names)
    collections = quick_collections() if large else nullcontext()
    with proofs_of(module), collections:
        for name in names:
            sample = next((call for call in calls.samples.get(name, ()) if call.training), None)
            hidden = [] if sample is None else [t for t in sample.tensors() if t.dim() == 3 and is_activation(t)]
            if sample is None and calls.samples.get(name):
                whole[name] = "training_step calls it in eval mode, in which from_pretrained leaves it: call train()"
            if sample is None or not hidden:
                continue  # it gets no hidden states of a sequence
            elements[name] = sample.elements
            block = module.get_submodule(name)
            if name in calls.opened:
                whole[name] = calls.opened[name]
            elif compiled.intersection(block.modules()):
                whole[name] = "it is compiled, or a module around it is"
            elif name in calls.hooked or hooked_inside(module, [name]):
                whole[name] = "a forward hook inside it would get a part of the sequence"
            else:
                kind = _study(block, sample, size, kinds.setdefault(structure(block), []), alone)
                if kind.cut is not None:
                    blocks[name] = kind.cut
                else:
                    whole[name] = kind.reason
            if large:
                gc.collect()  # copies of the block are in cycles
                return_freed_memory()
    for name in blocks_sharing(module, {name: cut.heads for name, cut in blocks.items() if cut.heads is not None}):
        del blocks[name]
        whole[name] = SHARED
    if not blocks:
        raise UnsupportedError(_nothing(module, size, listed(whole) or NO_STREAM))
    return _with_ends(module, ContextPlan(size, blocks, whole, elements), calls)


def _nothing(module: nn.Module, size: int, why: str) -> str:
    return (
        f"context_parallel_size={size} divides nothing of {type(module).__name__}: {why}. Every context rank would"
        " compute the same. Use context_parallel_size=1: data ranks take the devices, and zero_stage=3 or"
        ' recompute="full" save memory. Blocks that make positions or masks from the length of their input may get them'
        " as arguments instead, made once for the whole sequence: they can be divided then."
    )


def _study(block: nn.Module, sample: Sample, size: int, same: list[_Kind], alone: bool) -> _Kind:
    signature = sample.signature()
    for kind in same:
        if kind.signature == signature and reads_same(block, kind.read):
            return kind
    try:
        original = scratch_copy(block, SEED, opened=False)
    except Exception as error:
        return _Kind({}, signature, None, f"a copy of it cannot be run alone ({type(error).__name__}: {error})")
    read: Mapping[Attribute, Any] = {}
    cut, reason = None, "it does not run alone"
    for call in _calls(sample, size):
        try:
            watched = scratch_copy(block, SEED, opened=False).train()
            with watch_reads(watched) as found:
                outcome(watched, call, {})
            read, prover = dict(found), CutProver(original, call, size)
        except Exception as error:  # a block with tables of the recorded length does not run on a shorter one
            reason = f"a copy of it cannot be run alone ({type(error).__name__}: {error})"
            continue
        cut, reason = _find(block, call, prover, size, alone)
        dry = any(tensor.is_meta for tensor in sample.tensors())  # a dry run has no values
        if cut is not None and call.signature() != signature and not dry:  # what reaches far shows in a long one alone
            cut, reason = _prove_again(original, sample, cut, size)
        break
    if cut is not None:
        cut = replace(cut, form=sample.form, reads=tuple(read))
    same.append(_Kind(read, signature, cut, reason))
    return same[-1]


def _prove_again(original: nn.Module, sample: Sample, cut: BlockCut, size: int) -> tuple[BlockCut | None, str]:
    """`cut`, proven by the call as it was recorded too: other lengths, and the values of its masks."""
    try:
        CutProver(original, sample, size).prove(cut)
    except Exception as error:
        return None, f"positions meet in it in another way than in attention, as far as they reach ({_why(error)})"
    return cut, ""


def _why(error: Exception) -> str:
    """The reason for which a cut is not proven. A wrong one makes the block's code fail in any way."""
    failed = f"it does not run on a part ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return str(error) if isinstance(error, Refused) else failed


def _find(block: nn.Module, call: Sample, prover: CutProver, size: int, alone: bool) -> tuple[BlockCut | None, str]:
    """The first cut that is proven, else the reason why the likeliest one is not."""
    others = other_attention(block)
    reasons: list[str] = []
    if kernels := sorted({kind for kind in others.values() if kind != "eager"}):
        # their masks are in other arguments, and a proof on the CPU runs torch's function in their place
        return None, f'its attention is {", ".join(kernels)}: load the model with attn_implementation="sdpa"'
    results = prover.whole.outputs
    ways = [(eager, _candidates(call, results, size)) for eager in ((), *([tuple(others)] if others else []))]
    ways += [((), _with_heads(block, call, results, size))] if alone else []
    for eager, cut in ((eager, cut) for eager, cuts in ways for cut in itertools.islice(cuts, MOST)):
        try:
            return prover.prove(replace(cut, eager=eager)), ""
        except Exception as error:
            reasons.append(_why(error))
    if not reasons:
        return None, f"its sequence is too short to prove a cut (fewer than {ENOUGH * size} positions), or not returned"
    return None, f"positions meet in it in another way than in attention ({reasons[0]})"


def _calls(sample: Sample, size: int) -> Iterator[Sample]:
    """The recorded call with few positions, and as it was, both with random numbers."""
    stream = next(tensor for tensor in sample.tensors() if tensor.dim() == 3 and is_activation(tensor))
    taken = {length for tensor in sample.tensors() for length in tensor.shape if length != stream.shape[1]}
    taken |= {2, stream.shape[-1]}  # rows of the proof
    for length in range(ENOUGH * size + 1, stream.shape[1]):
        own = parts_of(1, length, size)
        if length % size and taken.isdisjoint((length, *(own.local_size(rank) for rank in range(size)))):
            yield shortened(sample, [(2, length)])[0].random(torch.Generator().manual_seed(SEED))
            break
    yield sample.random(torch.Generator().manual_seed(SEED))


def _candidates(call: Sample, results: Sequence[Tensor], size: int) -> Iterator[BlockCut]:
    """Cuts that may be right, the likeliest first."""
    tensors = call.tensors()
    shapes = [result.shape for result in results]
    streams = [i for i, t in enumerate(tensors) if t.dim() == 3 and is_activation(t) and t.shape in shapes]
    for stream, dim in itertools.product(streams, (1, 0)):
        shape = tensors[stream].shape
        length = shape[dim]
        if length < max(ENOUGH, LEAST) * size or (dim == 0 and length == shape[1]):
            continue
        options = {i: _options(t.shape, length) for i, t in enumerate(tensors) if i != stream}
        found = {i: dim if s == shape else s.index(length) for i, s in enumerate(shapes) if length in s}
        rows = 1 if shape[1 - dim] == 1 else None
        for chosen in itertools.product(*options.values()):
            arguments = {index: at for index, at in zip(options, chosen, strict=True) if at is not None}
            yield BlockCut(stream=stream, dim=dim, arguments=arguments, results=found, rows=rows)


def _options(shape: torch.Size, length: int) -> list[int | None]:
    """The dimensions along which an argument may be cut, None for whole. A mask of pairs is likelier whole."""
    places: list[int | None] = [dim for dim, size in enumerate(shape) if size == length]
    return [None, places[0]] if len(places) > 1 else [*places, None]


def _with_heads(block: nn.Module, call: Sample, results: Sequence[Tensor], size: int) -> Iterator[BlockCut]:
    """Cuts of a block that mixes positions by linear attention, a state space or a product with a mask.

    The module that mixes within a head or a channel gets all positions and a share of its heads, from slices of its
    weights. A plan for tensor ranks tells the slices: each module alone that it divides, then all of them.
    """
    plan, _ = plan_unit(block, [call], size, {}, {}, False, False)
    if plan is None:
        return
    inputs = [tensor.shape for tensor in call.tensors()]
    for whole in sequence_candidates(plan, call.tensors(), results, [], size):
        found = whole.sequence
        assert found is not None
        if inputs[found.stream][found.dim] < ENOUGH * size:
            continue  # the dimension of rows
        rows = 1 if inputs[found.stream][1 - found.dim] == 1 else None
        cut = BlockCut(stream=found.stream, dim=found.dim, results=dict.fromkeys(found.results, found.dim), rows=rows)
        for name in found.entries:
            part = replace(plan.renamed(name, name), inputs=plan.inputs, folded=plan.folded)
            yield replace(cut, heads=_of_whole(part, replace(found, entries=(name,))))
        yield replace(cut, heads=_of_whole(plan, found))


def _of_whole(plan: UnitPlan, sequence: SequencePlan) -> UnitPlan:
    """`plan` for ranks that have whole weights. The cut has the random calls, and the form of proven calls."""
    slices = {**plan.slices, **plan.splits}
    return replace(plan, splits={}, slices=slices, dropouts=(), dropout_modules=(), forms=(), sequence=sequence)


def _with_ends(module: nn.Module, plan: ContextPlan, calls: Recording) -> ContextPlan:
    """`plan` with the modules behind blocks that are proven to compute token by token.

    A norm, a dropout or a head of several layers gets the part of the sequence that the last block leaves. Plain
    linears and torch's own norms need no trial. A module that mixes positions, or takes more than the hidden states,
    gets them all.
    """
    streams: dict[Stream, None] = {}
    for name, cut in plan.blocks.items():
        call = next(call for call in calls.samples[name] if call.training)
        shape = call.tensors()[cut.stream].shape
        streams[cut.dim, min(shape[cut.dim], POSITIONS), shape[-1]] = None
    ends: dict[str, BlockCut] = {}
    gathered: dict[str, str] = {}
    refused: dict[tuple[object, ...], str] = {}
    blocks = find_blocks(module)
    with proofs_of(module):
        for name, child in module.named_modules():
            if not _is_outside(name, blocks, plan, ends) or _is_known(child) or users_hooks(module, [name]):
                continue
            kind = structure(child)
            found = refused[kind] if kind in refused else _find_end(child, streams, plan.size)
            if isinstance(found, BlockCut):
                ends[name] = found
                continue
            refused[kind] = found
            if found and not any(name.startswith(f"{outer}.") for outer in gathered):
                gathered[name] = found
    whole = {name: why for name, why in plan.whole.items() if name not in ends}
    return replace(plan, ends=ends, whole=whole, gathered={k: why for k, why in gathered.items() if k not in whole})


def _is_outside(name: str, blocks: Sequence[str], plan: ContextPlan, ends: Mapping[str, BlockCut]) -> bool:
    """True for a module that holds no block, and is in none and in no end. A block that is not cut may be an end."""
    if not name or name in blocks:
        return name in plan.whole and bool(name)
    holds = any(block.startswith(f"{name}.") for block in blocks)
    return not holds and not any(not outer or name.startswith(f"{outer}.") for outer in (*blocks, *ends))


def _is_known(module: nn.Module) -> bool:
    """True for a module that needs no trial, or is no end."""
    return isinstance(module, nn.Embedding) or is_plain_linear(module) or any(map(is_compiled, module.modules()))


def _find_end(module: nn.Module, streams: Iterable[Stream], size: int) -> BlockCut | str:
    """The cut of a module that gets hidden states alone, or the reason why it has none. No reason: it gets others."""
    why = ""
    for stream in streams:
        try:
            return _proven_end(module, stream, size)
        except Refused as error:
            why = str(error)
        except Exception:  # any: most modules are not called with hidden states, and fail in their own way
            continue
    return why


def _proven_end(module: nn.Module, stream: Stream, size: int) -> BlockCut:
    dim, length, width = stream
    cut = BlockCut(stream=0, dim=dim, results={0: dim})
    generator = torch.Generator().manual_seed(SEED)
    original = scratch_copy(module, SEED, opened=False)
    for rows, count in ((2, ENOUGH * size + 1), (1, length)):  # what reaches far shows in a long sequence alone
        shape = (rows, count, width) if dim else (count, rows, width)
        call = Sample((torch.randn(shape, generator=generator).requires_grad_(),), {})
        cut = replace(CutProver(original, call, size).prove(replace(cut, attention=None)), form=call.form)
    if cut.attention:
        raise Refused("its tokens meet in attention")
    return replace(cut, follows=True)
