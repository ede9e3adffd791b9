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

    because: str
    """What it has that no other one has."""
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


def _causal(because: str, name: str, values: dict[str, Any], **more: Any) -> Family:
    return Family(because, f"{name}Config", f"{name}ForCausalLM", "tokens", {**values, **more})


def _seq2seq(because: str, name: str, values: dict[str, Any], **more: Any) -> Family:
    return Family(because, f"{name}Config", f"{name}ForConditionalGeneration", "tokens", {**values, **more})


def _encoder(because: str, name: str, values: dict[str, Any] = LLAMA, kind: str = "MaskedLM", **more: Any) -> Family:
    inputs = "masked" if kind == "MaskedLM" else "sentences"
    return Family(because, f"{name}Config", f"{name}For{kind}", inputs, {**values, **more})


def _vision(because: str, name: str, values: dict[str, Any] = VISION, inputs: str = "images", **more: Any) -> Family:
    return Family(because, f"{name}Config", f"{name}ForImageClassification", inputs, {**values, **more})


MOE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    **LLAMA, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    # decoders
    "qwen2": _causal("Biases on queries, keys and values, and on nothing else.", "Qwen2", GROUPED),
    "qwen3": _causal("Norms of each query and key head.", "Qwen3", GROUPED, head_dim=8),
    "mistral": _causal("A width of heads that is set, not derived.", "Mistral", GROUPED, head_dim=8),
    "gemma": _causal("Norms that add one to their weights, embeddings that are scaled.", "Gemma", GROUPED, head_dim=8),
    "gemma2": _causal("Norms behind attention and MLP, scores that are capped.", "Gemma2", GROUPED, head_dim=8),
    "gemma3": Family(
        "Local and global attention in turn.", "Gemma3TextConfig", "Gemma3ForCausalLM", "tokens",
        {**GROUPED, "head_dim": 8},
    ),
    "phi": _causal("Attention and MLP in parallel behind one norm.", "Phi", LLAMA),
    "opt": _causal("Learned positions with an offset.", "OPT", LLAMA, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _causal(
        "Slopes of heads for positions, fused products packed head by head.", "Bloom", LLAMA, n_layer=2, n_head=4,
    ),
    "falcon multi-query": _causal(
        "One key head for all queries in the matrix of the queries.", "Falcon", LLAMA, ffn_hidden_size=64,
    ),
    "falcon": _causal(
        "Groups of queries, each with its key and value, in one matrix.", "Falcon", LLAMA,
        new_decoder_architecture=True, num_kv_heads=2,
    ),
    "falcon alibi": _causal(
        "Slopes of heads for positions, made anew in each forward.", "Falcon", LLAMA, multi_query=False, alibi=True,
        parallel_attn=False,
    ),
    "gptj": _causal("Rotary positions on a part of each head, branches in parallel.", "GPTJ", GPT, rotary_dim=4),
    "gpt_neo": _causal(
        "Scores without a scale, local attention in every second block.", "GPTNeo", LLAMA, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
    "gpt_bigcode": _causal("One key head, fused with the queries.", "GPTBigCode", GPT),
    "codegen": _causal(
        "Fused products in sections of their own order, whose number its code reads.", "CodeGen", GPT, n_ctx=32,
        rotary_dim=4,
    ),
    "mpt": _causal(
        "Slopes of heads for positions, products without biases.", "Mpt",
        {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    ),
    "mixtral": _causal(
        "Experts that a router chooses.", "Mixtral", GROUPED, num_local_experts=4, num_experts_per_tok=2,
    ),
    "qwen2_moe": _causal(
        "A shared expert with a gate beside the chosen ones.", "Qwen2Moe", MOE, shared_expert_intermediate_size=24,
    ),
    "qwen3_moe": _causal("Chosen experts and norms of heads.", "Qwen3Moe", MOE, head_dim=8),
    "olmoe": _causal("Many small experts, norms over all heads at once.", "Olmoe", MOE),
    "deepseek_v2": _causal("Keys and values from a latent, a part of the key common to all heads.", "DeepseekV2", MLA),
    "deepseek_v3": _causal(
        "A latent, a shared expert, and a router with a bias that no gradient trains.", "DeepseekV3", MLA,
    ),
    "gpt_oss": _causal(
        "Experts in one tensor, a score for each head that belongs to no position.", "GptOss", GROUPED, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "olmo": _causal("Norms without parameters.", "Olmo", GROUPED),
    "olmo2": _causal("Norms behind the branches, and over all heads at once.", "Olmo2", GROUPED),
    "stablelm": _causal("Rotary positions on a part of each head, layer norms with biases.", "StableLm", GROUPED),
    "starcoder2": _causal("Grouped keys with biases and an MLP without a gate.", "Starcoder2", GROUPED),
    "cohere": _causal("Branches in parallel, logits with a scale.", "Cohere", GROUPED),
    "cohere qk norm": _causal("A norm whose weight has a row for each head.", "Cohere", GROUPED, use_qk_norm=True),
    "glm": _causal("A gate and a value in one matrix, rotary positions interleaved.", "Glm", GROUPED, head_dim=8),
    "glm4": _causal("Norms behind the branches beside a fused gate.", "Glm4", GROUPED, head_dim=8),
    "granite": _causal("Scales on embeddings, residuals, scores and logits.", "Granite", GROUPED),
    "nemotron": _causal(
        "A squared activation without a gate, norms that add one to their weights.", "Nemotron", GROUPED, head_dim=8,
    ),
    "persimmon": _causal("Fused products with norms of queries and keys, head by head.", "Persimmon", LLAMA),
    "smollm3": _causal("Blocks without positions among blocks with them.", "SmolLM3", GROUPED),
    "exaone4": _causal(
        "A window in some blocks, norms behind the branches.", "Exaone4", GROUPED, sliding_window=4,
        sliding_window_pattern=2,
    ),
    "diffllama": _causal("A difference of two attentions, with factors learned for all heads.", "DiffLlama", GROUPED),
    "dbrx": _causal(
        "Experts as rows of one matrix, values that are clipped.", "Dbrx",
        {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    "xglm": _causal(
        "Positions as sines, embeddings with a scale.", "XGLM", LLAMA, d_model=32, ffn_dim=48, num_layers=2,
        attention_heads=4,
    ),
    "biogpt": _causal("Learned positions with an offset, a scale on embeddings.", "BioGpt", LLAMA),
    "ctrl": Family(
        "Attention written out by hand, with a mask of ones.", "CTRLConfig", "CTRLLMHeadModel", "tokens",
        {**GPT, "dff": 48},
    ),
    "openai": Family(
        "Norms behind each branch, matrices stored transposed.", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", "tokens",
        GPT,
    ),
    "mamba": _causal("A state space instead of attention.", "Mamba", LLAMA, state_size=4),
    "mamba2": _causal(
        "A state space with heads and groups in one projection.", "Mamba2", LLAMA, state_size=4, num_heads=8,
        head_dim=8, n_groups=2, chunk_size=8,
    ),
    "rwkv": _causal("A gate on what leaves the second product, a state from block to block.", "Rwkv", LLAMA),
    "recurrent_gemma": _causal(
        "A linear recurrence with gates block by block.", "RecurrentGemma", LLAMA, num_hidden_layers=3,
        attention_window_size=8,
    ),
    "lfm2": _causal("Short convolutions in some blocks, attention in others.", "Lfm2", GROUPED, full_attn_idxs=[1]),
    "modernbert decoder": _causal("A norm before the first block that is an identity.", "ModernBertDecoder", LLAMA),
    # encoder and decoder
    "t5": _seq2seq("A table of position biases that the first block shares with all others.", "T5", T5),
    "t5 gated": _seq2seq("A gate beside the first product of the MLP.", "T5", T5, feed_forward_proj="gated-gelu"),
    "umt5": _seq2seq("A table of position biases in each block.", "UMT5", T5),
    "switch": _seq2seq(
        "One expert for a token, with a capacity.", "SwitchTransformers", T5, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_decoder_layers=2, expert_capacity=16,
        router_jitter_noise=0.0,
    ),
    "bart": _seq2seq("A decoder that reads an encoder, norms behind the branches.", "Bart", SEQ2SEQ),
    "mbart": _seq2seq("Norms before the branches of an encoder and a decoder.", "MBart", SEQ2SEQ),
    "pegasus": _seq2seq("Positions as sines in an encoder and a decoder.", "Pegasus", SEQ2SEQ),
    "marian": Family(
        "A bias on the logits that is a buffer.", "MarianConfig", "MarianMTModel", "tokens",
        {**SEQ2SEQ, "decoder_vocab_size": 50},
    ),
    "m2m_100": _seq2seq("Positions as sines with an offset that padding makes.", "M2M100", SEQ2SEQ),
    "whisper": Family(
        "Convolutions before an encoder of sound, keys without a bias.", "WhisperConfig",
        "WhisperForConditionalGeneration", "speech",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    # encoders
    "bert": _encoder("The plain encoder that most others come from.", "Bert"),
    "roberta": _encoder("Positions that are counted from the padding.", "Roberta", max_position_embeddings=40),
    "distilbert": _encoder(
        "Attention and MLP under names of their own.", "DistilBert",
        {"vocab_size": 50, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32},
    ),
    "albert": _encoder("One block that is used at every depth.", "Albert", embedding_size=16),
    "deberta": _encoder("Queries, keys and values fused, with biases beside the product.", "Deberta"),
    "deberta relative": _encoder(
        "Scores of contents with positions, by gathers.", "Deberta", relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "deberta_v2": _encoder(
        "Positions as rows of a table that all blocks read.", "DebertaV2", relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "electra": _encoder("Embeddings narrower than the blocks.", "Electra", embedding_size=16),
    "mpnet": _encoder(
        "A table of position biases from the encoder to each block.", "MPNet", max_position_embeddings=40,
    ),
    "squeezebert": _encoder("Products as grouped convolutions.", "SqueezeBert", embedding_size=32),
    "convbert": _encoder("Attention beside convolutions whose kernels the tokens make.", "ConvBert", embedding_size=32),
    "roformer": _encoder("Rotary positions in an encoder.", "RoFormer", embedding_size=32),
    "fnet": Family(
        "A Fourier transform instead of attention.", "FNetConfig", "FNetForSequenceClassification", "sentences", LLAMA,
    ),
    "esm": _encoder(
        "Rotary positions and a scale for masked tokens.", "Esm", mask_token_id=49, position_embedding_type="rotary",
    ),
    "modernbert": _encoder("Fused products, gates, local attention in an encoder.", "ModernBert"),
    "bert classifier": _encoder("A pooled head instead of one for each token.", "Bert", kind="SequenceClassification"),
    # vision, sound, both
    "vit": _vision("Images: a convolution and positions before the blocks.", "ViT"),
    "deit": _vision("Two tokens that stand for classes.", "DeiT"),
    "beit": _vision("A table of biases for distances in two dimensions.", "Beit", use_relative_position_bias=True),
    "dinov2": _vision("A factor for each channel of the branches.", "Dinov2", mlp_ratio=2),
    "swin": _vision(
        "Windows that shift, stages of other widths.", "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "large images",
    ),
    "swinv2": _vision(
        "Scores of cosines with a temperature for each head, biases from a small MLP.", "Swinv2",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "large images",
    ),
    "convnext": _vision(
        "Convolutions by channel and no attention.", "ConvNext",
        {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1]}, "large images",
    ),
    "segformer": _vision(
        "A convolution before keys and values.", "Segformer", {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16}, "large images",
    ),
    "siglip": Family(
        "Attention that pools with a learned query.", "SiglipVisionConfig", "SiglipVisionModel", "pictures", VISION,
    ),
    "clip": Family(
        "Two towers and a loss over all pairs of a batch.", "CLIPConfig", "CLIPModel", "pairs",
        {"text_config": LLAMA, "vision_config": VISION, "projection_dim": 16},
    ),
    "wav2vec2": Family(
        "Sound: convolutions of features and of positions.", "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification",
        "waves", AUDIO,
    ),
    "hubert": Family(
        "Sound with weights that a norm computes.", "HubertConfig", "HubertForSequenceClassification", "waves", AUDIO,
    ),
    "wavlm": Family(
        "Attention that torch computes in one call, with gated position biases.", "WavLMConfig",
        "WavLMForSequenceClassification", "waves", AUDIO,
    ),
    # more decoders
    "gpt_neox": _causal("Queries, keys and values packed head by head.", "GPTNeoX", LLAMA),
    "phi3": _causal("A gate and a value in one matrix.", "Phi3", GROUPED, pad_token_id=0),
}  # fmt: skip

for name, family in FAMILIES.items():
    member("tensor", because=family.because, name=name)(family.build)
