"""`with_ends`: find the modules behind blocks that compute token by token, by trial.

A norm, a dropout or a head of several layers gets the part of the sequence that the last block leaves. Plain linears
and torch's own norms need no trial. A module that mixes positions, or takes more than the hidden states, gets them all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_3d.context.cut_plan import ENOUGH, BlockCut, ContextPlan
from lightning_3d.context.prove_cut import CutProver
from lightning_3d.module.torch_private import is_compiled
from lightning_3d.pipeline.gates import users_hooks
from lightning_3d.tensor.block_calls import Recording
from lightning_3d.tensor.blocks import find_blocks, structure
from lightning_3d.tensor.host_proof import SEED, proofs_of
from lightning_3d.tensor.late_head import is_plain_linear
from lightning_3d.tensor.proof import Refused
from lightning_3d.tensor.sample import POSITIONS, Sample
from lightning_3d.tensor.scratch import scratch_copy

Stream = tuple[int, int, int]
"""The dimension of positions, the length and the width of hidden states."""


def with_ends(module: nn.Module, plan: ContextPlan, calls: Recording) -> ContextPlan:
    """`plan` with the modules outside of its blocks that are proven to compute token by token. See `plan_context`."""
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
            found = refused[kind] if kind in refused else _find(child, streams, plan.size)
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


def _find(module: nn.Module, streams: Iterable[Stream], size: int) -> BlockCut | str:
    """The cut of a module that gets hidden states alone, or the reason why it has none. No reason: it gets others."""
    why = ""
    for stream in streams:
        try:
            return _proven(module, stream, size)
        except Refused as error:
            why = str(error)
        except Exception:  # any: most modules are not called with hidden states, and fail in their own way
            continue
    return why


def _proven(module: nn.Module, stream: Stream, size: int) -> BlockCut:
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
