"""Blocks in a proof, which runs on the CPU, and the attention in them.

Attention of Hugging Face that needs a GPU is replaced by torch's own.
Each head is computed from its own queries, keys and values by both, so that a division of heads which is right with one
is right with the other. A tensor that such a function may divide by heads too (attention sinks) is refused.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks.random_streams import restored_states, restored_streams
from lightning_3d.sandbox.interceptor import Call, Rule
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.sandbox.trial import own_states, restored_globals

SEED = 20_240_229

_KERNELS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_OF_TOKENS = ("position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments with a number for each token, which no head divides."""


@contextmanager
def proofs_of(module: nn.Module) -> Iterator[None]:
    """Let code inside run blocks of `module` on the CPU, without effects on random streams, classes and files."""
    eager = torch.compiler.set_stance("force_eager")  # hooks must run
    states = restored_states(own_states(module.modules()))
    with restored_streams(), states, restored_globals(module.modules()), eager, _attention_on_host():
        torch.manual_seed(SEED)
        yield


@contextmanager
def _attention_on_host() -> Iterator[None]:
    """Let modules inside, which ask for flash attention, run on the CPU."""
    functions: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    names = [name for name in _KERNELS if functions is not None and name in functions]
    with replaced_entries((functions, name, _Kernel(functions["sdpa"])) for name in names):
        yield


class RefuseNoHeads(Rule):
    """Refuse attention without heads. A wrong candidate may ask for it, and torch 2.11 then ends the process."""

    def before(self, call: Call) -> Call:
        if call.func is SDPA:
            given = [*call.args, *call.kwargs.values()]
            if any(isinstance(each, Tensor) and each.numel() == 0 for each in given):
                raise ValueError("This division leaves attention without heads.")
        return call


class _Kernel:
    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
    ) -> Any:
        tensors = [name for name, each in options.items() if isinstance(each, Tensor) and name not in _OF_TOKENS]
        if tensors:
            raise NotImplementedError(
                f"its flash attention takes {tensors[0]!r}, which the CPU's does not, so that no proof can run. Set"
                ' attn_implementation="eager" for a module that tensor ranks divide'
            )
        if mask is not None and mask.dim() == 2:  # flash attention takes the padding alone
            mask = mask[:, None, None, :].bool()
        return self.attention(module, query, key, value, mask, **options)
