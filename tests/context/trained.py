"""Modules on sequences and their batches, and the comparison of context ranks with one device."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity import assert_same_fit, fit_with
from tests.workers import run

STEPS, LENGTH, WIDTH, TOKENS = 20, 17, 16, 51


class Training(LightningModule):
    """Trains `model` by `loss_of(model, batch)`."""

    def __init__(self, model: nn.Module, loss_of: Any) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def token_batches(length: int = LENGTH, rows: int = 2) -> list[Any]:
    """Token numbers, and labels of which some are -100: more in the first half."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(STEPS):
        long = length - step % 3  # a part is longer than another in some batches
        ids = torch.randint(3, TOKENS, (rows, long), generator=generator)
        labels = ids.masked_fill(torch.rand(rows, long, generator=generator) < torch.linspace(0.6, 0.0, long), -100)
        found.append({"ids": ids, "labels": labels})
    return found


def vector_batches(length: int = LENGTH, rows: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(rows, length, WIDTH, generator=generator),
            "y": torch.randint(5, (rows,), generator=generator),
        }
        for _ in range(STEPS)
    ]


# ---- blocks of language models --------------------------------------------------------------------------------------


class Retention(nn.Module):
    """Sums of earlier values that decay, at a rate for each head."""

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.decay, self.drop = heads, nn.Parameter(torch.linspace(1.0, 3.0, heads)), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        weights = self.decay.sigmoid().view(-1, 1, 1).pow((at[:, None] - at).clamp(min=0)).tril()
        return self.out((self.drop(q @ k.mT / 4 * weights) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A causal block as nanoGPT's, and what `kind` adds to it."""

    def __init__(self, kind: str, heads: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.heads, self.dropout = kind, heads, dropout
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(dropout)
        if kind == "convolution":
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        if kind == "recurrence":
            self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "retention":
            self.mix = Retention(heads, dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.first(x)
        if self.kind == "convolution":
            h = self.mix(h.transpose(1, 2))[..., :length].transpose(1, 2)
        if self.kind == "recurrence":
            h = self.mix(h)[0]
        if self.kind == "retention":
            h = self.mix(h)
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(h).split(WIDTH, dim=2))
        if self.kind == "alibi":  # a bias from the length that the block sees
            at = torch.arange(length)
            slopes = torch.arange(1, self.heads + 1).view(-1, 1, 1) * -0.1
            bias = slopes * (at[None] - at[:, None]).abs() + torch.full((length, length), float("-inf")).triu(1)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        elif self.kind == "products":
            scores = (q @ k.transpose(-2, -1) / 2).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            mixed = scores.softmax(-1) @ v
        else:
            rate = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Nano(nn.Module):
    """Tied embedding, learned positions, and blocks of these kinds."""

    def __init__(self, kinds: tuple[str, ...], heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, heads, dropout) for kind in kinds)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model: nn.Module, batch: Any) -> Tensor:
    """The loss as its author writes it: shifted by hand."""
    logits, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, TOKENS), labels.reshape(-1))


def nano(*kinds: str, heads: int = 4, dropout: float = 0.0) -> Any:
    return Training(Nano(kinds or ("plain",) * 4, heads, dropout), next_token), token_batches()


build_nano = nano
build_alibi = partial(nano, "plain", "alibi", "plain")
build_convolution = partial(nano, "plain", "convolution", "plain")
build_recurrence = partial(nano, "recurrence", "plain")
build_products = partial(nano, "plain", "products")
build_retention = partial(nano, "retention", "plain", "retention")


def build_few_heads() -> Any:
    """One head, which ranks do not divide: keys and values are gathered."""
    return nano("plain", "plain", heads=1)


def build_retention_dropout() -> Any:
    return nano("retention", "retention", dropout=0.3)


def build_dropout() -> Any:
    return nano("plain", "plain", dropout=0.3)


def build_smooth() -> Any:
    """Classes before positions, weights of classes, and smooth labels."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        weight = torch.linspace(0.5, 2.0, TOKENS)
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], weight, label_smoothing=0.1)

    return Training(Nano(("plain",) * 2), loss_of), token_batches()


def build_penalty() -> Any:
    """A term of the loss that needs all logits on each rank."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + logits.logsumexp(-1).square().mean()

    return Training(Nano(("plain",) * 2), loss_of), token_batches()


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def _labelled(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["ids"], labels=batch["labels"]).loss


def _padded(model: nn.Module, batch: Any) -> Tensor:
    mask = torch.ones_like(batch["ids"])
    mask[1, 11:] = 0
    return model(input_ids=batch["ids"], attention_mask=mask, labels=batch["labels"].masked_fill(mask == 0, -100)).loss


def _llama(attention: str = "sdpa", keys: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=TOKENS, num_key_value_heads=keys, attn_implementation=attention, **sizes)
    )


def build_llama(loss_of: Any = _labelled, **options: Any) -> Any:
    return Training(_llama(**options), loss_of), token_batches()


build_one_key = partial(build_llama, keys=1)  # key heads that ranks do not divide, and no mask
build_padded = partial(build_llama, _padded, keys=1)
build_eager = partial(build_llama, _padded, attention="eager")


def build_slopes() -> Any:
    """A bias of each key that grows with its position, at another rate for each head."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        rows, length = batch["ids"].shape
        bias = torch.arange(length) * 0.5 ** torch.arange(1, 5).view(-1, 1, 1)
        bias = bias.expand(rows, -1, -1, -1)
        return model(input_ids=batch["ids"], attention_mask=bias, labels=batch["labels"]).loss

    return build_llama(loss_of, keys=4)


def build_checkpointed() -> Any:
    module, batches = build_llama()
    module.model.gradient_checkpointing_enable()
    return module, batches


def build_gpt2() -> Any:
    from tests.zoo.blocks import gpt2

    return Training(gpt2(), _labelled), token_batches()


def build_bert() -> Any:
    from tests.zoo.blocks import bert

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        mask = torch.ones_like(batch["ids"])
        mask[1, 11:] = 0
        return model(input_ids=batch["ids"].clamp(max=49), attention_mask=mask, labels=batch["ids"][:, 0] % 2).loss

    return Training(bert(), loss_of), token_batches()


def build_masked_words() -> Any:
    """A head of several layers."""
    from transformers import BertForMaskedLM

    from tests.zoo.blocks import bert

    batches = [{key: tensor.clamp(max=49) for key, tensor in batch.items()} for batch in token_batches()]
    return Training(BertForMaskedLM(bert().config), _labelled), batches


def build_vit() -> Any:
    from tests.zoo.blocks import vit

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"], labels=batch["y"]).loss

    generator = torch.Generator().manual_seed(5)
    images = torch.randn(STEPS, 2, 3, 16, 16, generator=generator)
    return Training(vit(), loss_of), [{"x": x, "y": torch.tensor([0, 1])} for x in images]


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def small(name: str, loss_of: Any = _labelled, config: str = "Config", **sizes: Any) -> Any:
    """A language model of transformers."""
    import transformers

    made = getattr(transformers, name + config)(**SMALL, vocab_size=TOKENS, **sizes)
    return Training(getattr(transformers, f"{name}ForCausalLM")(made), loss_of), token_batches()


HEADS = {"num_key_value_heads": 2, "head_dim": 8}
build_mistral = partial(small, "Mistral", num_key_value_heads=2, sliding_window=5)  # a window shorter than a part
build_qwen3 = partial(small, "Qwen3", _padded, **HEADS)
build_neox = partial(small, "GPTNeoX", _padded, max_position_embeddings=64)


def build_gemma3() -> Any:
    """Layers with a window and layers without one."""
    kinds = ["sliding_attention", "full_attention"]
    return small("Gemma3", config="TextConfig", sliding_window=5, layer_types=kinds, **HEADS)


def build_qwen3_5(heads: int = 4) -> Any:
    """Gated delta nets and attention in turns."""
    nets = {f"linear_{which}_head_dim": 8 for which in ("key", "value")}
    nets |= {f"linear_num_{which}_heads": heads for which in ("key", "value")}
    kinds = ["linear_attention", "full_attention"]
    return small("Qwen3_5", _padded, "TextConfig", layer_types=kinds, **HEADS, **nets)


def build_mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=TOKENS, hidden_size=24, num_hidden_layers=2, state_size=4)
    return Training(MambaForCausalLM(config), _labelled), token_batches()


def build_t5() -> Any:
    """A bias of relative positions that the first layer makes for all, and cross attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=TOKENS, decoder_start_token_id=0, **sizes)
    return Training(T5ForConditionalGeneration(config), _labelled), token_batches()


def build_whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {
        f"{side}_{what}": size
        for side in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    config = WhisperConfig(
        vocab_size=TOKENS, num_mel_bins=8, d_model=32, max_source_positions=12, max_target_positions=32, dropout=0.0,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sides,
    )  # fmt: skip

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        sound = torch.sin(torch.arange(24 * 8).view(1, 8, 24) * 0.1 + batch["ids"][:, :1, None])
        return model(input_features=sound, labels=batch["labels"]).loss

    return Training(WhisperForConditionalGeneration(config), loss_of), token_batches()


def build_packed() -> Any:
    """Two documents in each sequence: positions begin again, and transformers masks pairs of them."""

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        rows, length = batch["ids"].shape
        positions = torch.cat([torch.arange(7), torch.arange(length - 7)])[None].expand(rows, -1)
        return model(input_ids=batch["ids"], position_ids=positions, labels=batch["labels"]).loss

    return Training(_llama(), loss_of), token_batches()


def build_frozen() -> Any:
    module, batches = build_llama()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name)
    return module, batches


def build_shared() -> Any:
    """A block that runs twice."""
    module, batches = build_nano()
    module.model.blocks[2] = module.model.blocks[0]
    return module, batches


# ---- torch's own layers ---------------------------------------------------------------------------------------------


def build_encoder() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 3), "head": nn.Linear(WIDTH, 5)})

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        padding = torch.zeros(batch["x"].shape[:2], dtype=torch.bool)
        padding[1, 13:] = True
        mixed = model["encoder"](batch["x"], src_key_padding_mask=padding)
        return F.cross_entropy(model["head"](mixed.mean(1)), batch["y"])

    return Training(model, loss_of), vector_batches()


def build_decoder() -> Any:
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
    model = nn.ModuleDict(
        {"decoder": nn.TransformerDecoder(layer, 2), "memory": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 5)}
    )

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        x, memory = batch["x"], model["memory"](batch["x"][:, :7])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        mixed = model["decoder"](x, memory, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(model["head"](mixed.mean(1)), batch["y"])

    return Training(model, loss_of), vector_batches()


# ---- comparison -----------------------------------------------------------------------------------------------------

_alone: dict[str, dict[str, Any]] = {}


def assert_same_as_one_device(
    build: Any, strategy: dict[str, Any], world: int = 2, *, tolerance: float = 1e-5, **options: Any
) -> None:
    """Train on `world` ranks and on one device, and compare losses, logs and weights."""
    key = repr((build, sorted(options.items())))
    if key not in _alone:
        (_alone[key],) = run(fit_with, build, None, options, world=1)
    for got in run(fit_with, build, strategy, options, world=world, timeout=180):
        assert_same_fit(got, _alone[key], tolerance)
