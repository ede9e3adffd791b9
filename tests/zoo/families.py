"""Tiny models of many families from the installed transformers: nothing random, a few thousand parameters each."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.zoo.registry import member

LLAMA = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**LLAMA, "num_key_value_heads": 2}
GPT = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
AUDIO = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "feat_extract_norm": "layer", "mask_time_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a tiny model of a family is made, and with what it is called."""

    config: str
    """Name of the configuration's class."""
    model: str
    """Name of the model's class."""
    inputs: str
    """A key of `BATCHES`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""

    def build(self):
        """The model. It draws no random numbers when it runs."""
        import transformers

        config = getattr(transformers, self.config)(**self.values)
        _silence(config)
        model = getattr(transformers, self.model)(config)
        for parameter in model.parameters():
            if parameter.abs().max().item() < 1e-3:  # a norm would blow up the first steps of what is all but zero
                torch.nn.init.normal_(parameter, std=0.02)
        return model


def _silence(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if hasattr(value, "to_dict"):
            _silence(value)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (2, 8))
    return {"input_ids": ids, "labels": ids}


def sentences() -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(3, 50, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def masked() -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(3, 50, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def images(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def pairs() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 50, (2, 8)), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def speech() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 50, (2, 8))}


def waves() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}


BATCHES = {
    "tokens": tokens, "sentences": sentences, "masked": masked, "images": images, "large images": lambda: images(32),
    "pictures": pictures, "pairs": pairs, "speech": speech, "waves": waves,
}  # fmt: skip


def loss_of(module: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that the model gives, or the mean square of what it gives."""
    out = module(**batch)
    if isinstance(out, tuple):
        return out[0]
    return out.loss if getattr(out, "loss", None) is not None else out.last_hidden_state.square().mean()


def _causal(name: str, values: dict[str, Any], **more: Any) -> Family:
    return Family(f"{name}Config", f"{name}ForCausalLM", "tokens", {**values, **more})


def _seq2seq(name: str, values: dict[str, Any], **more: Any) -> Family:
    return Family(f"{name}Config", f"{name}ForConditionalGeneration", "tokens", {**values, **more})


def _encoder(name: str, values: dict[str, Any] = LLAMA, kind: str = "MaskedLM", **more: Any) -> Family:
    inputs = "masked" if kind == "MaskedLM" else "sentences"
    return Family(f"{name}Config", f"{name}For{kind}", inputs, {**values, **more})


def _vision(name: str, values: dict[str, Any] = VISION, inputs: str = "images", **more: Any) -> Family:
    return Family(f"{name}Config", f"{name}ForImageClassification", inputs, {**values, **more})


MOE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    **LLAMA, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    # decoders
    "qwen2": _causal("Qwen2", GROUPED),
    "qwen3": _causal("Qwen3", GROUPED, head_dim=8),
    "mistral": _causal("Mistral", GROUPED, head_dim=8),
    "gemma": _causal("Gemma", GROUPED, head_dim=8),
    "gemma2": _causal("Gemma2", GROUPED, head_dim=8),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", "tokens", {**GROUPED, "head_dim": 8}),
    "phi": _causal("Phi", LLAMA),
    "opt": _causal("OPT", {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": _causal("Bloom", {**LLAMA, "n_layer": 2, "n_head": 4}),
    "falcon multi-query": _causal("Falcon", LLAMA, ffn_hidden_size=64),
    "falcon": _causal("Falcon", LLAMA, new_decoder_architecture=True, num_kv_heads=2),
    "falcon alibi": _causal("Falcon", LLAMA, multi_query=False, alibi=True, parallel_attn=False),
    "gptj": _causal("GPTJ", GPT, rotary_dim=4),
    "gpt_neo": _causal(
        "GPTNeo", {**LLAMA, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    ),
    "gpt_bigcode": Family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", "tokens", GPT),
    "codegen": Family("CodeGenConfig", "CodeGenForCausalLM", "tokens", {**GPT, "n_ctx": 32, "rotary_dim": 4}),
    "mpt": _causal("Mpt", {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}),
    "mixtral": _causal("Mixtral", GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _causal("Qwen2Moe", MOE, shared_expert_intermediate_size=24),
    "qwen3_moe": _causal("Qwen3Moe", MOE, head_dim=8),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", "tokens", MOE),
    "deepseek_v2": Family("DeepseekV2Config", "DeepseekV2ForCausalLM", "tokens", MLA),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", "tokens", MLA),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        "tokens",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo": _causal("Olmo", GROUPED),
    "olmo2": _causal("Olmo2", GROUPED),
    "stablelm": Family("StableLmConfig", "StableLmForCausalLM", "tokens", GROUPED),
    "starcoder2": _causal("Starcoder2", GROUPED),
    "cohere": _causal("Cohere", GROUPED),
    "cohere qk norm": _causal("Cohere", GROUPED, use_qk_norm=True),
    "glm": _causal("Glm", GROUPED, head_dim=8),
    "glm4": _causal("Glm4", GROUPED, head_dim=8),
    "granite": _causal("Granite", GROUPED),
    "nemotron": _causal("Nemotron", GROUPED, head_dim=8),
    "persimmon": _causal("Persimmon", LLAMA),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", "tokens", GROUPED),
    "exaone4": _causal("Exaone4", GROUPED, sliding_window=4, sliding_window_pattern=2),
    "diffllama": _causal("DiffLlama", GROUPED),
    "dbrx": _causal(
        "Dbrx",
        {
            "vocab_size": 50,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
    ),
    "xglm": _causal("XGLM", {**LLAMA, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "biogpt": Family("BioGptConfig", "BioGptForCausalLM", "tokens", LLAMA),
    "ctrl": Family("CTRLConfig", "CTRLLMHeadModel", "tokens", {**GPT, "dff": 48}),
    "openai": Family("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", "tokens", GPT),
    "mamba": _causal("Mamba", {**LLAMA, "state_size": 4}),
    "mamba2": _causal(
        "Mamba2", {**LLAMA, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    ),
    "rwkv": Family("RwkvConfig", "RwkvForCausalLM", "tokens", LLAMA),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        "tokens",
        {**LLAMA, "num_hidden_layers": 3, "attention_window_size": 8},
    ),
    "lfm2": _causal("Lfm2", GROUPED, full_attn_idxs=[1]),
    "modernbert decoder": Family("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", "tokens", LLAMA),
    # encoder and decoder
    "t5": _seq2seq("T5", T5),
    "t5 gated": _seq2seq("T5", T5, feed_forward_proj="gated-gelu"),
    "umt5": _seq2seq("UMT5", T5),
    "switch": Family(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        "tokens",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
            "expert_capacity": 16,
            "router_jitter_noise": 0.0,
        },
    ),
    "bart": _seq2seq("Bart", SEQ2SEQ),
    "mbart": Family("MBartConfig", "MBartForConditionalGeneration", "tokens", SEQ2SEQ),
    "pegasus": _seq2seq("Pegasus", SEQ2SEQ),
    "marian": Family("MarianConfig", "MarianMTModel", "tokens", {**SEQ2SEQ, "decoder_vocab_size": 50}),
    "m2m_100": Family("M2M100Config", "M2M100ForConditionalGeneration", "tokens", SEQ2SEQ),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "speech",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    # encoders
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta", max_position_embeddings=40),
    "distilbert": Family(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "masked",
        {"vocab_size": 50, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32},
    ),
    "albert": _encoder("Albert", embedding_size=16),
    "deberta": _encoder("Deberta"),
    "deberta relative": _encoder("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": _encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "electra": _encoder("Electra", embedding_size=16),
    "mpnet": Family("MPNetConfig", "MPNetForMaskedLM", "masked", {**LLAMA, "max_position_embeddings": 40}),
    "squeezebert": Family("SqueezeBertConfig", "SqueezeBertForMaskedLM", "masked", {**LLAMA, "embedding_size": 32}),
    "convbert": Family("ConvBertConfig", "ConvBertForMaskedLM", "masked", {**LLAMA, "embedding_size": 32}),
    "roformer": Family("RoFormerConfig", "RoFormerForMaskedLM", "masked", {**LLAMA, "embedding_size": 32}),
    "fnet": Family("FNetConfig", "FNetForSequenceClassification", "sentences", LLAMA),
    "esm": Family(
        "EsmConfig", "EsmForMaskedLM", "masked", {**LLAMA, "mask_token_id": 49, "position_embedding_type": "rotary"}
    ),
    "modernbert": Family("ModernBertConfig", "ModernBertForMaskedLM", "masked", LLAMA),
    "bert classifier": _encoder("Bert", kind="SequenceClassification"),
    # vision, sound, both
    "vit": Family("ViTConfig", "ViTForImageClassification", "images", VISION),
    "deit": Family("DeiTConfig", "DeiTForImageClassification", "images", VISION),
    "beit": _vision("Beit", use_relative_position_bias=True),
    "dinov2": _vision("Dinov2", mlp_ratio=2),
    "swin": _vision(
        "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "large images",
    ),
    "swinv2": _vision(
        "Swinv2",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "large images",
    ),
    "convnext": Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "large images",
        {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1]},
    ),
    "segformer": Family(
        "SegformerConfig",
        "SegformerForImageClassification",
        "large images",
        {
            "hidden_sizes": [8, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 4],
            "decoder_hidden_size": 16,
        },
    ),
    "siglip": Family("SiglipVisionConfig", "SiglipVisionModel", "pictures", VISION),
    "clip": Family(
        "CLIPConfig", "CLIPModel", "pairs", {"text_config": LLAMA, "vision_config": VISION, "projection_dim": 16}
    ),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", "waves", AUDIO),
    "hubert": Family("HubertConfig", "HubertForSequenceClassification", "waves", AUDIO),
    "wavlm": Family("WavLMConfig", "WavLMForSequenceClassification", "waves", AUDIO),
}

BECAUSE = {
    "qwen2": "Biases on queries, keys and values, and on nothing else.",
    "qwen3": "Norms of each query and key head.",
    "mistral": "A width of heads that is set, not derived.",
    "gemma": "Norms that add one to their weights, embeddings that are scaled.",
    "gemma2": "Norms behind attention and MLP, scores that are capped.",
    "gemma3": "Local and global attention in turn.",
    "phi": "Attention and MLP in parallel behind one norm.",
    "opt": "Learned positions with an offset.",
    "bloom": "Slopes of heads for positions, fused products packed head by head.",
    "falcon multi-query": "One key head for all queries in the matrix of the queries.",
    "falcon": "Groups of queries, each with its key and value, in one matrix.",
    "falcon alibi": "Slopes of heads for positions, made anew in each forward.",
    "gptj": "Rotary positions on a part of each head, branches in parallel.",
    "gpt_neo": "Scores without a scale, local attention in every second block.",
    "gpt_bigcode": "One key head, fused with the queries.",
    "codegen": "Fused products in sections of their own order, whose number its code reads.",
    "mpt": "Slopes of heads for positions, products without biases.",
    "mixtral": "Experts that a router chooses.",
    "qwen2_moe": "A shared expert with a gate beside the chosen ones.",
    "qwen3_moe": "Chosen experts and norms of heads.",
    "olmoe": "Many small experts, norms over all heads at once.",
    "deepseek_v2": "Keys and values from a latent, a part of the key common to all heads.",
    "deepseek_v3": "A latent, a shared expert, and a router with a bias that no gradient trains.",
    "gpt_oss": "Experts in one tensor, a score for each head that belongs to no position.",
    "olmo": "Norms without parameters.",
    "olmo2": "Norms behind the branches, and over all heads at once.",
    "stablelm": "Rotary positions on a part of each head, layer norms with biases.",
    "starcoder2": "Grouped keys with biases and an MLP without a gate.",
    "cohere": "Branches in parallel, logits with a scale.",
    "cohere qk norm": "A norm whose weight has a row for each head.",
    "glm": "A gate and a value in one matrix, rotary positions interleaved.",
    "glm4": "Norms behind the branches beside a fused gate.",
    "granite": "Scales on embeddings, residuals, scores and logits.",
    "nemotron": "A squared activation without a gate, norms that add one to their weights.",
    "persimmon": "Fused products with norms of queries and keys, head by head.",
    "smollm3": "Blocks without positions among blocks with them.",
    "exaone4": "A window in some blocks, norms behind the branches.",
    "diffllama": "A difference of two attentions, with factors learned for all heads.",
    "dbrx": "Experts as rows of one matrix, values that are clipped.",
    "xglm": "Positions as sines, embeddings with a scale.",
    "biogpt": "Learned positions with an offset, a scale on embeddings.",
    "ctrl": "Attention written out by hand, with a mask of ones.",
    "openai": "Norms behind each branch, matrices stored transposed.",
    "mamba": "A state space instead of attention.",
    "mamba2": "A state space with heads and groups in one projection.",
    "rwkv": "A gate on what leaves the second product, a state from block to block.",
    "recurrent_gemma": "A linear recurrence with gates block by block.",
    "lfm2": "Short convolutions in some blocks, attention in others.",
    "modernbert decoder": "A norm before the first block that is an identity.",
    "t5": "A table of position biases that the first block shares with all others.",
    "t5 gated": "A gate beside the first product of the MLP.",
    "umt5": "A table of position biases in each block.",
    "switch": "One expert for a token, with a capacity.",
    "bart": "A decoder that reads an encoder, norms behind the branches.",
    "mbart": "Norms before the branches of an encoder and a decoder.",
    "pegasus": "Positions as sines in an encoder and a decoder.",
    "marian": "A bias on the logits that is a buffer.",
    "m2m_100": "Positions as sines with an offset that padding makes.",
    "whisper": "Convolutions before an encoder of sound, keys without a bias.",
    "bert": "The plain encoder that most others come from.",
    "roberta": "Positions that are counted from the padding.",
    "distilbert": "Attention and MLP under names of their own.",
    "albert": "One block that is used at every depth.",
    "deberta": "Queries, keys and values fused, with biases beside the product.",
    "deberta relative": "Scores of contents with positions, by gathers.",
    "deberta_v2": "Positions as rows of a table that all blocks read.",
    "electra": "Embeddings narrower than the blocks.",
    "mpnet": "A table of position biases from the encoder to each block.",
    "squeezebert": "Products as grouped convolutions.",
    "convbert": "Attention beside convolutions whose kernels the tokens make.",
    "roformer": "Rotary positions in an encoder.",
    "fnet": "A Fourier transform instead of attention.",
    "esm": "Rotary positions and a scale for masked tokens.",
    "modernbert": "Fused products, gates, local attention in an encoder.",
    "bert classifier": "A pooled head instead of one for each token.",
    "vit": "Images: a convolution and positions before the blocks.",
    "deit": "Two tokens that stand for classes.",
    "beit": "A table of biases for distances in two dimensions.",
    "dinov2": "A factor for each channel of the branches.",
    "swin": "Windows that shift, stages of other widths.",
    "swinv2": "Scores of cosines with a temperature for each head, biases from a small MLP.",
    "convnext": "Convolutions by channel and no attention.",
    "segformer": "A convolution before keys and values.",
    "siglip": "Attention that pools with a learned query.",
    "clip": "Two towers and a loss over all pairs of a batch.",
    "wav2vec2": "Sound: convolutions of features and of positions.",
    "hubert": "Sound with weights that a norm computes.",
    "wavlm": "Attention that torch computes in one call, with gated position biases.",
}
for name, family in FAMILIES.items():
    member("tensor", because=BECAUSE[name], name=name)(family.build)
