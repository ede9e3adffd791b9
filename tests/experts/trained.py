"""Mixtures of experts and their batches, for comparisons with one device."""

import torch

from tests.checkpoint.trainings import TwoGroups
from tests.zoo.base import Base

TOKENS = 40
SIZES = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


class Mixture(Base):
    """A language model of transformers on random tokens, 20 steps in two epochs."""

    batch_size, samples = 8, 80

    def __init__(self):
        super().__init__()
        self.model = self.build()

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return (torch.randint(3, TOKENS, (self.samples, 7), generator=generator),)

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
    def build(self):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 8, "head_dim": 8}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **sizes, num_experts_per_tok=3))


class DeepSeek(Mixture):
    """Latent attention, a shared expert, sigmoid routers with a bias, a dense first layer."""

    def build(self):
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        sizes = {"intermediate_size": 24, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_group": 2}
        heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        config = DeepseekV3Config(
            **SIZES, **HEADS | {"num_key_value_heads": 2}, **sizes, **heads, num_experts_per_tok=2, topk_group=1,
            first_k_dense_replace=1,
        )  # fmt: skip
        return DeepseekV3ForCausalLM(config)


class GptOss(Mixture):
    """Experts with biases, and weights with inputs first."""

    def build(self):
        from transformers import GptOssConfig, GptOssForCausalLM

        sizes = {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        return GptOssForCausalLM(GptOssConfig(**SIZES, **HEADS, **sizes))


class Olmoe(Mixture):
    def build(self):
        from transformers import OlmoeConfig, OlmoeForCausalLM

        return OlmoeForCausalLM(
            OlmoeConfig(**SIZES, **HEADS, intermediate_size=12, num_experts=4, num_experts_per_tok=1)
        )


class GroupedQwen3(TwoGroups, Qwen3):
    """For checkpoints: two parameter groups and a schedule."""
