"""Mixtures of experts and their batches, for comparisons with one device."""

import random
from typing import ClassVar

import torch
from torch import nn

from tests.checkpoint.trainings import TwoGroups
from tests.zoo.base import Base

TOKENS = 40
SIZES = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


class Mixture(Base):
    """A language model of transformers on random tokens, 10 steps in an epoch."""

    batch_size, samples, length = 8, 80, 7

    kind: str
    sizes: ClassVar[dict]

    def __init__(self):
        super().__init__()
        self.model = self.build()

    def build(self):
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(**SIZES | HEADS | self.sizes)
        return getattr(transformers, f"{self.kind}ForCausalLM")(config)

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return (torch.randint(3, TOKENS, (self.samples, self.length), generator=generator),)

    def loss(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class Mixtral(Mixture):
    experts = "grouped_mm"

    def build(self):
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(**SIZES, **HEADS, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = self.experts
        return MixtralForCausalLM(config)


class Eager(Mixtral):
    experts = "eager"


class Batched(Mixtral):
    experts = "batched_mm"


class Lonely(Mixtral):
    """Every token goes to the first two experts: ranks that own the others get none."""

    def build(self):
        model = super().build()
        for layer in model.model.layers:
            layer.mlp.gate.forward = lambda hidden, gate=layer.mlp.gate: _first_two(gate, hidden)
        return model


def _first_two(gate, hidden):
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.nn.functional.linear(hidden, gate.weight)
    index = torch.arange(2).expand(len(hidden), 2)
    return logits, logits.softmax(-1).gather(1, index), index


class Qwen3(Mixture):
    kind = "Qwen3Moe"
    sizes: ClassVar[dict] = {
        "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 8, "head_dim": 8, "num_experts_per_tok": 3
    }  # fmt: skip


class DeepSeek(Mixture):
    """Latent attention, a shared expert, sigmoid routers with a bias, a dense first layer."""

    kind = "DeepseekV3"
    sizes: ClassVar[dict] = {
        "intermediate_size": 24, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_group": 2, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip


class GptOss(Mixture):
    """Experts with biases, and weights with inputs first."""

    kind = "GptOss"
    sizes: ClassVar[dict] = {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


class Olmoe(Mixture):
    kind = "Olmoe"
    sizes: ClassVar[dict] = {"intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 1}


class GroupedQwen3(TwoGroups, Qwen3):
    """For checkpoints: two parameter groups and a schedule."""


class ListedBlock(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.norm, self.router, self.shared = nn.LayerNorm(width), nn.Linear(width, count), nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width), nn.Dropout(0.0)) for _ in range(count)
        )

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        scores = self.router(flat)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        out = self.shared(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return x + out.view_as(x), scores.square().mean()


class Listed(Base):
    """A mixture that its author wrote: a list, a loop that skips experts without tokens, a shared expert, two results."""

    batch_size, samples, width, count = 8, 80, 8, 4
    mixture, rounds = ListedBlock, 1

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, self.width)
        self.blocks = nn.ModuleList(self.mixture(self.width, self.count) for _ in range(2))
        self.head = nn.Linear(self.width, 3)

    def tensors(self):
        generator = torch.Generator().manual_seed(4)
        return (torch.randn(self.samples, 6, 5, generator=generator),)

    def loss(self, batch):
        x, spread = self.embed(batch[0]), 0.0
        for block in [*self.blocks] * self.rounds:
            x, more = block(x)
            spread = spread + more
        return (self.head(x) - batch[0][..., :3]).square().mean() + 0.1 * spread


class Unreached(Listed):
    """No token goes to the last two experts. They have no gradient on one device, and so no decay."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.router.bias.data += torch.tensor([50.0, 50.0, 0.0, 0.0])
            block.router.requires_grad_(False)


class SoftBlock(ListedBlock):
    def forward(self, x):
        weights = self.router(x).softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (out * weights[..., None, :]).sum(-1), weights.square().mean()


class Soft(Listed):
    """Every token goes to every expert: results are weighted."""

    mixture = SoftBlock


class Sharp(nn.Linear):
    """Multiplies its scores by a buffer, which the graph of each call needs."""

    def __init__(self, width, count):
        super().__init__(width, count)
        self.register_buffer("sharpness", torch.full((count,), 1.5))

    def forward(self, x):
        return super().forward(x) * self.sharpness


class Twice(Listed):
    """Each mixture is called twice before the backward."""

    rounds = 2

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.router = Sharp(self.width, self.count)


class Adapted(Listed):
    """Frozen experts, each with an adapter of its own."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            for expert in block.experts.requires_grad_(False):
                expert[0], expert[2] = Adapter(expert[0]), Adapter(expert[2])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


class Adapter(nn.Module):
    """A linear layer, and a product of two narrow ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adversarial(Listed):
    """Two networks with mixtures and an optimizer each, by hand. A step of one does not reach the other's weights."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.made, self.judge = (nn.ModuleList((ListedBlock(8, 4), ProductsBlock(8, 4))) for _ in range(2))
        del self.blocks, self.head

    def configure_optimizers(self):
        parts = (*self.embed.parameters(), *self.made.parameters()), (*self.judge.parameters(),)
        return [torch.optim.AdamW(part, lr=1e-3, eps=1e-4, weight_decay=0.3, foreach=True) for part in parts]

    def through(self, blocks, x):
        for block in blocks:
            x, _ = block(x)
        return x

    def training_step(self, batch, batch_idx):
        making, judging = self.optimizers()
        real = batch[0].flip(-1) @ torch.ones(5, 8)
        self.toggle_optimizer(judging)
        made = self.through(self.made, self.embed(batch[0])).detach()
        judged = self.through(self.judge, real).square().mean() + (self.through(self.judge, made) - 1).square().mean()
        self.step_of(judging, judged)
        self.toggle_optimizer(making)
        fooled = self.through(self.judge, self.through(self.made, self.embed(batch[0]))).square().mean()
        self.step_of(making, fooled)
        self.log("loss", judged + fooled, sync_dist=True)

    def step_of(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class AdversarialBackward(Adversarial):
    def manual_backward(self, loss):
        loss.backward()


class DrawingBlock(ListedBlock):
    def __init__(self, *args):
        super().__init__(*args)
        self.generator, self.numbers = torch.Generator().manual_seed(5), random.Random(3)

    def forward(self, x):
        out, spread = super().forward(x)
        factor = 1 + 0.3 * torch.randn((), generator=self.generator) + 0.1 * self.numbers.random()
        return x + (out - x) * factor, spread


class Drawing(Listed):
    """Draws a factor for the results of experts from a generator of each mixture, and one from Python's own."""

    mixture = DrawingBlock


LOSSES = []


class GlobalBlock(ListedBlock):
    losses: ClassVar[list] = []

    def forward(self, x):
        out, spread = super().forward(x)
        LOSSES.append(0.1 * spread)
        self.losses.append(out.square().mean())
        return out, spread


class Global(Listed):
    """Mixtures add to a list of their file and to one of their class. The step empties both."""

    mixture = GlobalBlock

    def loss(self, batch):
        found = super().loss(batch) + sum(LOSSES) + sum(GlobalBlock.losses)
        LOSSES.clear()
        GlobalBlock.losses.clear()
        return found


class ProductsBlock(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.up, self.down = (nn.Parameter(torch.randn(count, *size) * 0.3) for size in ((width, 12), (12, width)))
        self.bias = nn.Parameter(torch.zeros(count, 12))

    def gates(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        tokens = self.norm(x)
        scores = self.router(tokens)
        inner = torch.nn.functional.silu(torch.einsum("btw,ewi->btei", tokens, self.up) + self.bias)
        out = torch.einsum("btei,eiw,bte->btw", inner, self.down, self.gates(scores))
        return x + out, scores.square().mean()


class Products(Listed):
    """Products over all experts at once, with a soft router. The blocks own experts, router and norm."""

    mixture = ProductsBlock


class TopProductsBlock(ProductsBlock):
    def gates(self, scores):
        best, chosen = scores.topk(2, -1)
        return torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))


class TopProducts(Products):
    """The same with the two best experts of a token."""

    mixture = TopProductsBlock
