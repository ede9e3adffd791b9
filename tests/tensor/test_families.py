"""Families from the installed transformers that nobody wrote a plan for: split, or whole, and never wrong.

Blocks with flash attention, which no CPU has, are planned as those with torch's own.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.layout import Layout
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.strategy.banner import opening
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import RefuseNoHeads
from tests.parity import in_turn, long, silent
from tests.tensor.parity import assert_small, in_threads, share_of_blocks
from tests.zoo import blocks
from tests.zoo.families import BATCHES, FAMILIES, loss_of
from tests.zoo.registry import members

transformers = pytest.importorskip("transformers")
QUICK = ("qwen3", "gemma2", "bloom", "deepseek_v3", "olmo2", "bart", "albert")
CACHED = ("rwkv",)
"""Evaluation takes a state as wide as the whole model from block to block: no plan for that, so it computes whole."""
IN_FULL = {
    "opt", "bloom", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "switch",
    "albert", "deberta relative", "deberta_v2", "convbert", "swin", "swinv2", "convnext", "segformer", "siglip", "wavlm",
}  # fmt: skip
"""Families with blocks whose stream tensor ranks do not divide."""
PARTLY = {
    # what stays whole, and so more than half of these tiny blocks
    "falcon multi-query": "a key and a value in one matrix with the queries",
    "gpt_bigcode": "a key and a value in one matrix with the queries",
    "diffllama": "lambdas and a norm of each head, large only in a tiny model",
    "dbrx": "experts as rows of one matrix",
    "recurrent_gemma": "gates block by block",
    "rwkv": "a gate on what leaves the second product",
    "squeezebert": "convolutions",
    "convbert": "convolutions",
    "convnext": "convolutions",
    "segformer": "a convolution before keys and values",
    "swinv2": "a stage is planned in one piece",
    "wav2vec2": "convolutions",
    "hubert": "convolutions",
    "wavlm": "attention that torch computes in one call, and convolutions",
    **dict.fromkeys(("vit", "deit", "beit", "dinov2"), "a convolution and positions, which count as a block here"),
}


def names():
    return [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long], id=name) for name in members("families")
    ]


def _planned(name):
    torch.manual_seed(0)
    family = FAMILIES[name]
    module, batch = family.build().train(), BATCHES[family.inputs]()
    with silent():
        return module, plan_tensor(module, 2, calls=record_calls(module, lambda: loss_of(module, batch)))


@pytest.mark.parametrize("name", in_turn(names(), 2, 1))
def test_large_matrices_are_split(name):
    module, plan = _planned(name)
    share = share_of_blocks(module, plan)
    assert share > 0.55 if name in PARTLY else share <= 0.56, f"{share:.2f} of the blocks on a rank: {plan.unsplit}"


@pytest.mark.parametrize(("name", "most"), [("mamba", 1), ("modernbert", 6)])
def test_the_opening_line_says_how_little_stayed_whole(name, most):
    module, plan = _planned(name)
    text = opening(module, Layout(tensor_parallel_size=2), None, plan)
    percent = re.search(r"tensor: \d+ parameters split, .* \((\d+)%\) not split", text)
    assert int(percent.group(1)) <= most, text


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, True), (3, True), long(4, False)])
@pytest.mark.parametrize("name", in_turn(names(), 2))
def test_shards_in_threads_train_as_one_process(name, size, sequence_parallel):
    torch.manual_seed(0)
    family = FAMILIES[name]
    module, batches = family.build().train(), [BATCHES[family.inputs]() for _ in range(3)]
    proven = name not in CACHED
    plan, difference = in_threads(
        module, loss_of, batches, size, all_proven=proven, sequence_parallel=sequence_parallel
    )
    assert_small(difference)
    in_full = any("sequence parallelism" in name for name in plan.unsplit)
    assert in_full == (sequence_parallel and name in IN_FULL)


def _plan(module, implementation):
    """Recorded with torch's attention, in place of a GPU."""
    tokens = torch.randint(0, 50, (2, 8))
    calls = record_calls(module, lambda: module(input_ids=tokens, labels=tokens))
    module.config._attn_implementation = implementation
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = dict(functions)
    with silent():
        plan = plan_tensor(module, 2, calls=calls)
    assert dict(functions) == before
    return plan


def test_flash_attention_is_divided_by_heads():
    torch.manual_seed(0)
    wanted, plan = (_plan(blocks.llama(), name) for name in ("sdpa", "flash_attention_2"))
    assert len(plan.units) == 2
    assert plan.splits == wanted.splits
    assert plan.unsplit == wanted.unsplit


class Sinks(torch.nn.Module):
    """Gives each attention a number for each head."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.sinks = torch.nn.Parameter(torch.zeros(4))

    def forward(self, *args, **kwargs):
        return self.attention(*args, s_aux=self.sinks, **kwargs)


def test_what_the_cpu_cannot_prove_stays_unsplit():
    module = blocks.llama()
    for layer in module.model.layers:
        layer.self_attn = Sinks(layer.self_attn)
    plan = _plan(module, "flash_attention_2")
    assert not plan.units
    assert all("flash attention takes 's_aux'" in why for why in plan.unsplit.values())


def test_attention_without_heads_is_an_error_of_the_candidate():
    """The CPU kernel of torch 2.11 divides by their number, which ended the process of Phi-3 with tensor ranks."""
    empty, one = torch.zeros(2, 0, 8, 16), torch.zeros(2, 1, 8, 16)
    with Interceptor(RefuseNoHeads()):
        with pytest.raises(ValueError, match="without heads"):
            F.scaled_dot_product_attention(empty, key=empty, value=empty)
        assert F.scaled_dot_product_attention(one, one, one, is_causal=True).shape == one.shape
