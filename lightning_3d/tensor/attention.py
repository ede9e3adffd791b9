"""A forward of `nn.MultiheadAttention` that can run on some of its heads.

torch computes it in one call. The call derives the size of a head from the width of the input, and reads the parameters
of the output projection without calling it. In eval mode the encoder layer has a fused shortcut past it. The forward
here computes the same from `num_heads`, `head_dim` and calls to modules. (Written against torch 2.13.)
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, is_plain
from lightning_3d.module.undo import Change, UndoStack
from lightning_3d.tensor.module_forward import BlockState


class OpenAttention(ForwardLayer, rank=Layer.OWN):
    """The forward of one `nn.MultiheadAttention`, except while its block computes unsplit."""

    def __init__(self, module: nn.MultiheadAttention, state: BlockState | None = None) -> None:
        super().__init__(module)
        self.state, self.total_heads = state, module.num_heads

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.state is not None and self.state.unsplit:
            return self.next(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        module, batched = self.module, query.dim() == 3
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q, k, v = (x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for x in (q, k, v))
        # torch uses the flag in place of the mask where it needs no weights and pads no keys.
        causal = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        mask = self._mask(None if causal else attn_mask, key_padding_mask, q)
        rate = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / module.head_dim**0.5
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, rate) if rate else weights
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
        mixed = mixed.transpose(1, 2).flatten(2)
        if not batched:
            mixed = mixed.squeeze(0)
        elif not module.batch_first:
            mixed = mixed.transpose(0, 1)
        out = module.out_proj(mixed)
        if weights is not None and average_attn_weights:
            weights = self._average(weights)
        if weights is not None and not batched:
            weights = weights.squeeze(0)
        return out, weights

    def _average(self, weights: Tensor) -> Tensor:
        total = getattr(self.module, "_sum_over_ranks", None)
        partial = weights.sum(dim=1) / self.total_heads
        return total(partial) if total is not None else partial

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module, bias = self.module, self.module.in_proj_bias
        if not module._qkv_same_embed_dim:
            matrices: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        elif query is key and key is value:
            q, k, v = F.linear(query, module.in_proj_weight, bias).chunk(3, dim=-1)
            return q, k, v
        else:
            matrices = module.in_proj_weight.chunk(3)
        biases: tuple[Tensor | None, ...] = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True))
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        mask = _additive(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            # One mask for each row and head of the unsplit module: a shard cannot find the masks of its heads.
            mask = mask.view(q.shape[0], -1, *mask.shape[1:])
        padding = _additive(padding, q)
        if padding is None:
            return mask
        padding = padding[:, None, None, :]
        return padding if mask is None else mask + padding


def use_open_attention(module: nn.Module, undo: UndoStack, state: BlockState | None = None) -> list[Change]:
    """Give every attention in `module` an `OpenAttention`, past torch's fused shortcuts; returns what it changes."""
    changes = []
    for child in module.modules():
        if _can_open(child):
            add_layer(OpenAttention(child, state), undo)
        if isinstance(child, nn.TransformerEncoderLayer) and child.activation_relu_or_gelu:
            changes.append(undo.set(child, "activation_relu_or_gelu", 0))  # one that the fused shortcut does not know
        if isinstance(child, nn.TransformerEncoder) and child.use_nested_tensor:
            changes.append(undo.set(child, "use_nested_tensor", False))
    return changes


def _can_open(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return True for torch's own attention, unchanged and with nothing added to the keys."""
    plain = isinstance(module, nn.MultiheadAttention) and is_plain(module, nn.MultiheadAttention)
    return plain and module.bias_k is None and not module.add_zero_attn


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        # torch's kernels read a float32 mask wrongly where the queries are float64.
        return mask.to(torch.promote_types(mask.dtype, like.dtype))
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
