"""Plain LightningModules that tests train under every layout. None of them knows about this package."""

import math

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    """A fixed list of batches: the samples of every data rank, cut the same way at any number of ranks.

    Global batch b holds samples [b * size, (b + 1) * size); data rank r of n takes its r-th part.
    """

    def __init__(self, tensors, size, rank=0, ranks=1):
        self.tensors, self.size, self.rank, self.ranks = tensors, size, rank, ranks

    def __len__(self):
        return math.ceil(len(self.tensors[0]) / self.size)

    def __getitem__(self, index):
        whole = [tensor[index * self.size : (index + 1) * self.size] for tensor in self.tensors]
        return tuple(tensor.tensor_split(self.ranks)[self.rank] for tensor in whole)


class Base(LightningModule):
    """Logs the loss; the optimizer and the batches are set by the test."""

    batch_size = 12
    samples = 60
    optimizer = "adamw"
    shuffled = False
    """Samples in another order: a control for tests that allow rounding errors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def tensors(self):
        raise NotImplementedError

    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def _loader(self):
        wanted = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        order = torch.arange(self.samples - 1, -1, -1) if self.shuffled else slice(None)
        tensors = [tensor[order] for tensor in self.tensors()]
        batches = Batches(tensors, self.batch_size, wanted["rank"], wanted["num_replicas"])
        return DataLoader(batches, batch_size=None, shuffle=False)

    def train_dataloader(self):
        return self._loader()

    def val_dataloader(self):
        return self._loader()

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.optimizer == "plain_sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        # a small epsilon would turn rounding errors of tiny gradients into steps of full size
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class MLP(Base):
    """A plain stack, with a scalar parameter and one that is never used."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)

    def tensors(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 8, generator=generator)
        return x, x.sum(1, keepdim=True).sin()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x) * self.scale, y)


class Encoder(Base):
    """`nn.TransformerEncoder` with a frozen position table."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.positions = nn.Parameter(torch.randn(1, 6, 16), requires_grad=False)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def tensors(self):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(self.samples, 6, 16, generator=generator)
        return x, x.mean((1, 2)).mul(20).long().remainder(5)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x + self.positions).mean(1)), y)


class Block(nn.Module):
    """A nanoGPT-style block: fused attention, sizes hard-coded in views."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_embd, self.n_head = width, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        b, t, _ = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, self.n_embd // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, self.n_embd))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(Base):
    """Tied embeddings, blocks in a ModuleList, `forward` called from the step."""

    vocabulary = 29
    tied = True

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(self.vocabulary, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16, 4) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, self.vocabulary, bias=False)
        if self.tied:
            self.head.weight = self.embed.weight

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return (torch.randint(0, self.vocabulary, (self.samples, 9), generator=generator),)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class UntiedGPT(GPT):
    tied = False


class ConvNet(Base):
    """BatchNorm and a Sequential of unlike layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Linear(72, 10),
        )  # fmt: skip

    def tensors(self):
        generator = torch.Generator().manual_seed(4)
        return (
            torch.randn(self.samples, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (self.samples,), generator=generator),
        )

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Llama(Base):
    """A Hugging Face model inside, built from a tiny config."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def tensors(self):
        generator = torch.Generator().manual_seed(5)
        return (torch.randint(0, 37, (self.samples, 8), generator=generator),)

    def loss(self, batch):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss


MODULES = {kind.__name__: kind for kind in (MLP, Encoder, GPT, UntiedGPT, ConvNet, Llama)}
