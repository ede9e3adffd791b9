"""Modules large enough that what they hold, send and compute can be measured, each with its batches."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.zoo.registry import member

STEPS = 12


class Sized(LightningModule):
    """Makes one batch of `rows` samples and repeats it."""

    rows = 8

    def batch(self) -> Tensor | tuple[Tensor, ...]:
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader:
        return DataLoader([self.batch()] * STEPS, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


@member(
    "tensor",
    "pipeline",
    "zero",
    because="Large enough that memory, messages and seconds can be measured; learned positions, tied head.",
)
class GPT(Sized):
    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 512, context: int = 64, heads: int = 8):
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def batch(self) -> Tensor:
        return torch.randint(0, self.vocabulary, (self.rows, self.context + 1), generator=torch.Generator())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss


@member("zero", because="An embedding and a head of their own, each so large that ZeRO 3 has it only while it is used.")
class Words(GPT):
    rows = 2

    def __init__(self):
        super().__init__(width=64, layers=4, vocabulary=16640, context=32)
        self.head = nn.Linear(64, self.vocabulary, bias=False)


class Residual(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@member("tensor", "pipeline", "zero", because="Much to send for little to compute.")
class ResidualMLP(Sized):
    rows = 64

    def __init__(self, width: int = 512, layers: int = 8):
        super().__init__()
        self.width = width
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(layers)])

    def batch(self) -> tuple[Tensor, ...]:
        return torch.linspace(-1, 1, self.rows * 32).view(self.rows, 32), torch.arange(self.rows) % 10

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.last(self.blocks(self.first(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss


class Sequences(Sized):
    """Takes tokens. `build` makes its parts."""

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 512, context: int = 64):
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        self.build(width, layers)

    def build(self, width: int, layers: int) -> None:
        raise NotImplementedError

    def batch(self) -> Tensor:
        return torch.randint(0, self.vocabulary, (self.rows, self.context), generator=torch.Generator())


class Labelled(Sequences):
    """A model of Hugging Face that computes its own loss from tokens."""

    model: nn.Module

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss


@member(
    "tensor", "pipeline", "zero", because="Hugging Face's own, with fewer key-value heads, large enough to be measured."
)
class Llama(Labelled):
    def build(self, width: int, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary, hidden_size=width, intermediate_size=704 * width // 256,
                num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
                max_position_embeddings=self.context, use_cache=False,
            )
        )  # fmt: skip


@member("planned", because="Hugging Face's own encoder, whose head has layers of its own and a tied decoder.")
class BERT(Labelled):
    def build(self, width: int, layers: int) -> None:
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=self.vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                num_attention_heads=8, max_position_embeddings=self.context, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip


@member("planned", because="torch's own encoder, whose attention is one module and whose layers save their sums.")
class Encoder(Sequences):
    def build(self, width: int, layers: int) -> None:
        self.tokens = nn.Embedding(self.vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, self.vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.encoder(self.tokens(batch)))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss


@member("planned", because="Hugging Face's own for images: parameters of one row, positions that no embedding has.")
class ViT(Sized):
    rows = 16
    """Two in each microbatch: of one, torch keeps the gradient of `cls_token` as a view of that of the positions."""

    def __init__(self, width: int = 256, layers: int = 4, size: int = 32, patch: int = 4):
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.size = size
        self.model = ViTForImageClassification(
            ViTConfig(
                hidden_size=width, num_hidden_layers=layers, num_attention_heads=8, intermediate_size=4 * width,
                image_size=size, patch_size=patch, num_labels=10, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def batch(self) -> tuple[Tensor, ...]:
        pixels = torch.linspace(-1, 1, self.rows * 3 * self.size**2)
        return pixels.view(self.rows, 3, self.size, self.size), torch.arange(self.rows) % 10

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.model(pixel_values=batch[0], labels=batch[1]).loss
        self.log("loss", loss)
        return loss
