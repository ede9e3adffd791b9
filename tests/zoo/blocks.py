"""Small modules of many kinds, written as their users write them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import member


@member("tensor", because="The smallest pair of products that can be split.")
class MLP(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        return self.net(x)


class FusedAttention(nn.Module):
    """As nanoGPT writes it."""

    def __init__(self, width=16, heads=4, dropout=0.0):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        rate = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    def __init__(self, attention, width=16, hidden=64):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@member("tensor", because="Fused queries, keys and values in sections of one matrix.")
def nano_gpt(width=16, heads=4, layers=2, dropout=0.0):
    return Stack(*(Block(FusedAttention(width, heads, dropout), width) for _ in range(layers)))


@member("tensor", because="Fewer key heads than query heads, rotary positions, a gated MLP.")
def llama(heads=4, key_heads=2, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, max_position_embeddings=32, use_cache=False, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@member("tensor", because="Attention as timm writes it, alone.")
class PackedAttention(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


@member("tensor", because="Attention as timm packs it: sections, then heads.")
def packed(width=16, heads=4):
    return Stack(*(Block(PackedAttention(width, heads), width) for _ in range(2)))


@member("tensor", because="torch's own encoder, whose fast path reads weights by name.")
def encoder(width=16, heads=4, norm_first=False, dropout=0.0):
    layer = nn.TransformerEncoderLayer(width, heads, 64, dropout, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@member("tensor", because="nanoGPT with its tied embedding, an uneven vocabulary and a loss of its own.")
class GPT(nn.Module):
    def __init__(self, vocabulary=51, width=16, heads=4, layers=2, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(FusedAttention(width, heads, dropout), width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


@member("tensor", because="Conv1D: matrices that are stored transposed.")
def gpt2(**more):
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=51, n_embd=32, n_layer=2, n_head=4, n_positions=32, **drop, **more))


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@member("tensor", because="A classifier with separate products for queries, keys and values.")
def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=32, **TINY, **NO_DROPOUT))


@member("tensor", because="Images: a convolution before the blocks.")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **TINY, **NO_DROPOUT))


@member("tensor", because="A table of position biases that the first block shares with all others.")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
