"""LightningModules without batches of their own; `build` makes one of them and its batches."""

import random
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.blocks import Block, FusedAttention
from tests.zoo.registry import member

NOISE = random.Random(3)
"""As a file of helpers has one."""


class Steps(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


@member("pipeline", because="nanoGPT's shape with layers in a ModuleDict, dropout on demand.")
class GPT(Steps):
    def __init__(
        self, layers: int = 4, tied: bool = True, dropout: float = 0.0, width: int = 16, vocab: int = 31
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(32, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(FusedAttention(width, 2, dropout), width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@member(
    "pipeline",
    because="Linears straight on the LightningModule, activations in between, a dictionary as batch and as result.",
)
class MLP(Steps):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = torch.tanh(self.second(x)) + x
        x = x.mul(0.5).add_(1.0)
        return self.head(F.gelu(self.third(x)))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss)
        return {"loss": loss, "logits": logits, "names": batch["names"]}


@member("pipeline", because="The tutorial's language model, with a padding mask and an addition in place.")
class Encoder(Steps):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(1, 10, 16) * 0.1)
        self.linear = nn.Linear(16, 31)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens) * 4.0
        x += self.position
        x = self.encoder(x, src_key_padding_mask=tokens == 0)
        return F.cross_entropy(self.linear(x).flatten(0, 1), targets.flatten())


@member(
    "pipeline",
    because="A Sequential of unlike layers, one of them in place, then a classifier; batch norm where asked.",
)
class ConvNet(Steps):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        second: nn.Module = nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8)
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), second, nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(batch[0])), batch[1])


@member("pipeline", because="Blocks are pairs in a nested `nn.ModuleList`, and the residual is added outside of them.")
class Residual(Steps):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.project = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)])
            for _ in range(depth)
        )
        self.out = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.project(batch["x"])
        for mix, feed in self.layers:
            x = mix(x) + x
            x = feed(x) + x
        return F.cross_entropy(self.out(x), batch["y"])


@member("pipeline", because="Skips from early blocks to late ones, and the embedding used in the loss.")
class UNet(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = first = self.stem(batch["x"])
        skips = []
        for block in self.down:
            x = torch.tanh(block(x))
            skips.append(x)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, skips.pop()], dim=-1)))
        return F.cross_entropy(self.out(x), batch["y"]) + 0.1 * first.square().mean()


@member("pipeline", because="Draws noise in the step: every stage must draw the same.")
class Denoiser(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch["x"])
        return F.mse_loss(self.net(batch["x"] + noise), noise)


class HF(Steps):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss


def vectors(rows: int = 8, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, generator=generator),
        "y": torch.randint(3, (rows,), generator=generator),
        "names": [f"row {index}" for index in range(rows)],
        "nothing": None,
    }


def tokens(rows: int = 8, seed: int = 0, length: int = 10) -> Tensor:
    return torch.randint(1, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


def gpt_batch(rows: int = 8, length: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(31, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def build(name: str, steps: int = 4, rows: int = 8) -> tuple[Any, list[Any]]:
    """A seeded module and its batches, by name."""
    torch.manual_seed(1)
    seeds = range(steps)
    if name in ("MLP", "Residual", "UNet", "Denoiser"):
        return globals()[name](), [vectors(rows, seed) for seed in seeds]
    if name == "Encoder":
        return Encoder(), [(tokens(rows, seed), tokens(rows, seed + 100)) for seed in seeds]
    if name in ("ConvNet", "BatchNorm"):
        generator = torch.Generator().manual_seed(5)
        images = [torch.randn(rows, 3, 8, 8, generator=generator) for _ in seeds]
        return ConvNet(norm=name == "BatchNorm"), [(image, torch.arange(rows) % 4) for image in images]
    model, batches = build_hf(name, rows, list(seeds))
    return HF(model), batches


def build_hf(name: str, rows: int, seeds: list[int]) -> tuple[nn.Module, list[Any]]:
    import transformers as hf

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 24}
    if name != "ViT":
        small["vocab_size"] = 31
    lengths = torch.ones(rows, 10, dtype=torch.long)
    lengths[:, 7:] = 0
    texts = [
        {"input_ids": tokens(rows, seed), "labels": tokens(rows, seed), "attention_mask": lengths} for seed in seeds
    ]
    classes = torch.arange(rows) % 3
    if name == "Llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, max_position_embeddings=32)), texts
    if name == "GPT2":
        config = hf.GPT2Config(
            vocab_size=31, n_embd=16, n_head=2, n_layer=4, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
        return hf.GPT2LMHeadModel(config), texts
    if name == "BERT":
        config = hf.BertConfig(**small, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)
        return hf.BertForSequenceClassification(config), [text | {"labels": classes} for text in texts]
    if name == "ViT":
        config = hf.ViTConfig(
            **small, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        generator = torch.Generator().manual_seed(5)
        return hf.ViTForImageClassification(config), [
            {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator), "labels": classes} for _ in seeds
        ]
    assert name == "T5"
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0)
    return hf.T5ForConditionalGeneration(config), texts


HF_MODELS = {
    "Llama": "A model that computes its own loss, with rotary positions made once for all blocks.",
    "GPT2": "A tied head, and positions that the model makes from the shape of its input.",
    "BERT": "A classifier with a padding mask that every block reads.",
    "ViT": "Images; the loss is computed by name of the problem.",
    "T5": "An encoder and a decoder, which reads the encoder in each block and returns a cache.",
}
for name, because in HF_MODELS.items():
    member("pipeline", because=because, name=name)(HF)
