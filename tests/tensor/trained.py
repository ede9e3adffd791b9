"""LightningModules around the listed families, as their users write them. None of them knows about this package."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo import blocks
from tests.zoo.base import Base
from tests.zoo.families import FAMILIES
from tests.zoo.odd_blocks import Balanced, Experts, NeverChosen, StackedExperts


class Tokens(Base):
    length = 9
    tokens = 50

    def tensors(self):
        generator = torch.Generator().manual_seed(5)
        return (torch.randint(3, self.tokens, (self.samples, self.length), generator=generator),)


class Floats(Base):
    """Sequences of vectors, each with a class."""

    def tensors(self):
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(self.samples, 8, 16, generator=generator)
        return x, x.mean((1, 2)).mul(20).long().remainder(5)


class Perceptron(Floats):
    make = staticmethod(blocks.MLP)

    def __init__(self):
        super().__init__()
        self.inner = self.make()
        self.head = nn.Linear(16, 5)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.inner(batch[0]).mean(1)), batch[1])


class NanoGPT(Tokens):
    """Fused attention, tied embedding of 51 tokens."""

    def __init__(self):
        super().__init__()
        self.model = blocks.GPT()

    def loss(self, batch):
        return self.model(batch[0][:, :-1], batch[0][:, 1:])


class Packed(Perceptron):
    make = staticmethod(blocks.packed)


class TorchEncoder(Tokens):
    """torch's own encoder between an embedding and a head of as many tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(50, 16), blocks.encoder(), nn.Linear(16, 50)
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, batch):
        logits = self.head(self.encoder(self.embed(batch[0])))
        return self.criterion(logits.flatten(0, 1), batch[0].flip(1).flatten())


class Causal(Tokens):
    def __init__(self):
        super().__init__()
        self.model = self.make()

    def loss(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class Llama(Causal):
    make = staticmethod(blocks.llama)


class GPT2(Causal):
    make = staticmethod(blocks.gpt2)


class Bert(Causal):
    make = staticmethod(blocks.bert)

    def loss(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0][:, 0] % 2).loss


class T5(Causal):
    make = staticmethod(blocks.t5)


class Bart(Causal):
    """Hands its decoder an encoder state in parts, with no norm between."""

    make = staticmethod(FAMILIES["bart"].build)


class ViT(Base):
    def __init__(self):
        super().__init__()
        self.model = blocks.vit()

    def tensors(self):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.samples, 3, 16, 16, generator=generator)
        return x, x.mean((1, 2, 3)).mul(1000).long().remainder(2)

    def loss(self, batch):
        return self.model(pixel_values=batch[0], labels=batch[1]).loss


class Mixtral(Causal):
    make = staticmethod(FAMILIES["mixtral"].build)


class RouterLoss(Mixtral):
    def make(self):
        model = FAMILIES["mixtral"].build()
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.1
        return model


class Qwen3Moe(Causal):
    make = staticmethod(FAMILIES["qwen3_moe"].build)


class DeepseekV3(Causal):
    make = staticmethod(FAMILIES["deepseek_v3"].build)


class Olmoe(Causal):
    make = staticmethod(FAMILIES["olmoe"].build)


class GptOss(Causal):
    """Experts in a loop, whose code knows no number of another rank's expert."""

    def make(self):
        model = FAMILIES["gpt_oss"].build()
        model.set_experts_implementation("eager")
        return model


class Unreached(DeepseekV3):
    """No token reaches an expert whose weights decay."""

    def make(self):
        model = FAMILIES["deepseek_v3"].build()
        model.model.layers[1].mlp.gate.e_score_correction_bias[0] = -1e4
        return model


class ListedExperts(Perceptron):
    """Each token goes to one of three experts in a list, and none to the first."""

    def make(self):
        return blocks.Stack(NeverChosen(), NeverChosen())


class CalledExperts(Perceptron):
    """Experts that are called whether or not a token reaches them: data ranks reduce the same gradients."""

    def make(self):
        return blocks.Stack(Experts(), Experts())


class BalancedExperts(Perceptron):
    """Blocks leave a router's loss on themselves."""

    def make(self):
        return blocks.Stack(Balanced(), Balanced())

    def loss(self, batch):
        loss = super().loss(batch)
        return loss + sum(block.balance for block in self.inner.blocks)


class SoftExperts(Perceptron):
    """Each token goes to every expert, in products over all of them."""

    def make(self):
        return blocks.Stack(StackedExperts(), StackedExperts())
