"""Proofs run scratch copies of a block: on the CPU, in fp32 (fp64 stays fp64), with random parameters.

Fresh parameters are often zero (biases, the second matrix of an adapter, the last layer of a residual branch). Where a
weight is zero, every split of its neighbours computes the same, so the copies have random ones.

Attention of Hugging Face that needs a GPU is replaced by torch's own in a proof. Each head is computed from its own
queries, keys and values by both, so that a division of heads which is right with one is right with the other. A tensor
that such a function may divide by heads too (attention sinks) is refused.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.launch.lightning_private import runs_of
from lightning_3d.module.torch_private import own_parameters
from lightning_3d.module.undo import UndoStack, replaced_entries
from lightning_3d.ranks.random_streams import restored_streams
from lightning_3d.sandbox.fingerprint import is_absent
from lightning_3d.sandbox.interceptor import Call, Rule
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.sandbox.trees import copies_of_computed
from lightning_3d.sandbox.trial import restored_globals
from lightning_3d.sandbox.without_values import WithoutValues
from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.sample import working_dtype

GAIN = 0.5
"""Size of a product's results, for inputs of size 1. With 1 a residual stream of 18 layers grows so much that it hides
an error of the last one."""
TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
SEED = 20_240_229
_KERNELS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_OF_TOKENS = ("position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments with a number for each token, which no head divides."""


def scratch_copy(module: nn.Module, seed: int, *, opened: bool = True) -> nn.Module:
    """A copy of `module`, which may be on meta, with random parameters. Where it is `opened`, an `OpenAttention`
    replaces torch's attention. Otherwise all code is its author's.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}
    terms = _terms(module)
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(
            _random(name, parameter, terms[name], generator), requires_grad=parameter.is_floating_point()
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _buffer(buffer)
    memo |= copies_of_computed(module)
    for child in module.modules():
        # A LightningModule references its trainer, and so everything else. The copy of a forward needs neither.
        memo |= {id(held): object() for held in runs_of(child)}
    twin = copy.deepcopy(module, memo)
    return _open(twin) if opened else twin


def opened_copy(scratch: nn.Module) -> nn.Module:
    """A copy of `scratch` with the memory of its parameters, in which an `OpenAttention` replaces torch's attention."""
    return _open(shard_copy(scratch, lambda _, value: value))


def _open(scratch: nn.Module) -> nn.Module:
    use_open_attention(scratch, UndoStack())
    return scratch


def shard_copy(scratch: nn.Module, local: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of `scratch` with `local(name, value)` for its parameters. Unchanged values are not copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(local(name, parameter.detach()), requires_grad=parameter.requires_grad)
        for name, parameter in scratch.named_parameters()
    }
    return copy.deepcopy(scratch, memo | copies_of_computed(scratch))


def names_of(module: nn.Module) -> Mapping[int, str]:
    """The first name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _terms(module: nn.Module) -> dict[str, int]:
    """The number of products in a sum, for each parameter: of a matrix its columns, of a kernel all but its outputs."""
    found = {
        name: parameter.shape[1:].numel() if parameter.dim() > 3 else parameter.shape[-1] if parameter.dim() else 1
        for name, parameter in module.named_parameters()
    }
    for name, child in module.named_modules():
        weight = own_parameters(child).get("weight") if isinstance(child, (nn.Conv1d, *TRANSPOSED)) else None
        if weight is not None:
            channels = weight.shape[0] // child.groups if isinstance(child, TRANSPOSED) else weight.shape[1]
            found[f"{name}.weight" if name else "weight"] = channels * weight.shape[2:].numel()
        if not type(child).__module__.startswith("torch.nn."):  # whose sums are known
            found |= {f"{name}.{at}".strip("."): 1 for at, own in own_parameters(child).items() if _is_of_size_1(own)}
    return found


def _is_of_size_1(parameter: Tensor | None) -> bool:
    """True for numbers that code divides itself (e3nn). Smaller ones hide an activation: SiLU is linear near 0."""
    if parameter is None or is_absent(parameter) or isinstance(parameter, WithoutValues):  # to read it builds it
        return False
    if parameter.dim() < 2 or not parameter.is_floating_point():
        return False
    return bool(parameter.detach()[:16].float().square().mean() > 0.25)


def _random(name: str, parameter: Tensor, terms: int, generator: torch.Generator) -> Tensor:
    """Random values of a parameter whose results are sums of `terms` products."""
    if not parameter.is_floating_point():
        return parameter.detach().to("cpu", copy=True)
    values = torch.randn(parameter.shape, generator=generator).to(working_dtype(parameter.dtype))
    if parameter.dim() > 1:
        return values * (GAIN / max(1, terms) ** 0.5)
    return values.mul_(0.1) if "bias" in name.rsplit(".", 1)[-1] else values.mul_(0.3).add_(1.0)


def _buffer(buffer: Tensor) -> Tensor:
    dtype = working_dtype(buffer.dtype)
    if buffer.is_meta:
        return torch.ones(buffer.shape, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)


@contextmanager
def proofs_of(module: nn.Module) -> Iterator[None]:
    """Let code inside run blocks of `module` on the CPU, without effects on random streams, classes and files."""
    eager = torch.compiler.set_stance("force_eager")  # hooks must run
    with restored_streams(), restored_globals(module.modules()), eager, _attention_on_host():
        torch.manual_seed(SEED)
        yield


def _attention_on_host() -> AbstractContextManager[None]:
    """Let modules inside, which ask for flash attention, run on the CPU."""
    functions: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    names = [name for name in _KERNELS if functions is not None and name in functions]
    return replaced_entries((functions, name, _Kernel(functions["sdpa"])) for name in names)


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
