import json
import re

import pytest

from lightning_3d.errors import PlannerError
from lightning_3d.tools.planner.known_models import FAMILIES, MODELS, named_model, read_config, transformer_of
from tests.planner.closed_forms import gpt_flops, gpt_layer_activations, gpt_parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-7b", 7_615_616_512),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_counts_equal_the_published_checkpoints(name, parameters):
    assert named_model(name).parameters == parameters
    assert named_model(name).profile().parameters == pytest.approx(parameters)


def test_a_plain_size_has_exactly_that_many_parameters():
    for size, parameters in (("7b", 7e9), ("7.5B", 7.5e9), ("175b", 175e9), ("1t", 1e12), ("30m", 30e6)):
        assert named_model(size).profile().parameters == pytest.approx(parameters, rel=1e-12)


def test_near_misses_are_named():
    with pytest.raises(PlannerError, match="llama-7b"):
        named_model("lama-7b")


@pytest.mark.parametrize(
    ("recompute", "attention", "paper"),
    [("none", "eager", "none"), ("none", "checkpointed", "selective"), ("full", "eager", "full")],
)
def test_the_profile_of_a_gpt_is_the_published_closed_form(recompute, attention, paper):
    shape = named_model("megatron-22b")
    profile = shape.profile(precision="16-true", attention=attention)
    numbers = {"sequence": 2048, "layers": 48, "hidden": 6144, "vocabulary": 51200}
    assert profile.hardware_flops(4, recompute) == pytest.approx(gpt_flops(batch=4, recompute=paper, **numbers))
    assert profile.parameters == pytest.approx(gpt_parameters(**numbers), rel=1e-5)
    for tensor in (1, 8):
        for split in (False, True):
            kept = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute=recompute)
            assert 4 * kept == gpt_layer_activations(
                sequence=2048, batch=4, hidden=6144, heads=64, tensor=tensor, sequence_parallel=split, recompute=paper
            ) / (tensor if recompute == "full" and split else 1)  # this package divides what enters a block as well


SMALL = {
    "vocab_size": 96, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 16,
}  # fmt: skip
FIELDS = {
    "gpt2": {"vocab_size": 96, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {**SMALL, "num_key_value_heads": 1, "head_dim": 16},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **SMALL, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 12,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    },
    "phi3": {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    "llama": {**SMALL, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_counts_as_transformers_builds_it(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **FIELDS.get(family, {**SMALL, "num_key_value_heads": 2}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert transformer_of(config.to_dict()).parameters == built


def test_config_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert read_config(path).hidden == 32
    path.write_text(json.dumps({"model_type": "llama", **SMALL, "hidden_size": None}))
    with pytest.raises(PlannerError, match=r"lacks hidden_size or n_embd"):
        read_config(path)
    path.write_text(json.dumps({"model_type": "mamba", **SMALL}))
    with pytest.raises(PlannerError, match=r"'mamba' is not one"):
        read_config(path)
    for wrong, said in (
        ({"intermediate_size": "wide"}, "intermediate_size='wide' must be a whole number"),
        ({"num_key_value_heads": 3}, "heads=4 do not share kv_heads=3 evenly"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"model_type": None}, "lacks model_type"),
    ):
        path.write_text(json.dumps({"model_type": "llama", **SMALL, **wrong}))
        with pytest.raises(PlannerError, match=said):
            read_config(path)
    path.write_text("{")
    with pytest.raises(PlannerError, match="not JSON"):
        read_config(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        read_config(tmp_path / "none.json")


def test_every_named_model_has_about_the_parameters_its_name_says():
    for name, shape in MODELS.items():
        size = name.rpartition("-")[2]
        if re.fullmatch(r"[\d.]+[bmt]", size):
            assert shape.parameters == pytest.approx(named_model(size).profile().parameters, rel=0.25), name
