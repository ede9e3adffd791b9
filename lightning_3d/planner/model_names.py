"""Models by name: published shapes, and plain sizes such as `7b`."""

import re
from difflib import get_close_matches

from lightning_3d.errors import PlannerError
from lightning_3d.planner.show import parse_count, show_count
from lightning_3d.planner.transformer import Transformer


def _gpt(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 50257, sequence: int = 2048) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        positions=sequence,
    )


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    feedforward: int,
    *,
    kv_heads: int | None = None,
    vocabulary: int = 32000,
    sequence: int = 4096,
    tied: bool = False,
    qkv_bias: bool = False,
) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        sequence=sequence,
        feedforward=feedforward,
        gated=True,
        qkv_bias=qkv_bias,
        out_bias=False,
        mlp_bias=False,
        norm_bias=False,
        tied=tied,
        dropout=False,
    )


_SHAPES = [
    _gpt("gpt2", 12, 768, 12, sequence=1024),
    _gpt("gpt2-medium", 24, 1024, 16, sequence=1024),
    _gpt("gpt2-large", 36, 1280, 20, sequence=1024),
    _gpt("gpt2-xl", 48, 1600, 25, sequence=1024),
    _gpt("gpt3-125m", 12, 768, 12),
    _gpt("gpt3-1.3b", 24, 2048, 16),
    _gpt("gpt3-6.7b", 32, 4096, 32),
    _gpt("gpt3-13b", 40, 5120, 40),
    _gpt("gpt3-175b", 96, 12288, 96, 51200),
    _gpt("megatron-1.7b", 24, 2304, 24, 51200),
    _gpt("megatron-3.6b", 30, 3072, 32, 51200),
    _gpt("megatron-7.5b", 36, 4096, 32, 51200),
    _gpt("megatron-18b", 40, 6144, 48, 51200),
    _gpt("megatron-22b", 48, 6144, 64, 51200),
    _gpt("megatron-39b", 48, 8192, 64, 51200),
    _gpt("megatron-76b", 60, 10240, 80, 51200),
    _gpt("megatron-145b", 80, 12288, 96, 51200),
    _gpt("megatron-310b", 96, 16384, 128, 51200),
    _gpt("megatron-530b", 105, 20480, 128, 51200),
    _gpt("megatron-1t", 128, 25600, 160, 51200),
    _llama("llama-7b", 32, 4096, 32, 11008, sequence=2048),
    _llama("llama-13b", 40, 5120, 40, 13824, sequence=2048),
    _llama("llama-30b", 60, 6656, 52, 17920, sequence=2048),
    _llama("llama-65b", 80, 8192, 64, 22016, sequence=2048),
    _llama("llama2-7b", 32, 4096, 32, 11008),
    _llama("llama2-13b", 40, 5120, 40, 13824),
    _llama("llama2-70b", 80, 8192, 64, 28672, kv_heads=8),
    _llama("llama3.2-1b", 16, 2048, 32, 8192, kv_heads=8, vocabulary=128256, sequence=8192, tied=True),
    _llama("llama3.2-3b", 28, 3072, 24, 8192, kv_heads=8, vocabulary=128256, sequence=8192, tied=True),
    _llama("llama3-8b", 32, 4096, 32, 14336, kv_heads=8, vocabulary=128256, sequence=8192),
    _llama("llama3-70b", 80, 8192, 64, 28672, kv_heads=8, vocabulary=128256, sequence=8192),
    _llama("llama3-405b", 126, 16384, 128, 53248, kv_heads=8, vocabulary=128256, sequence=8192),
    _llama("mistral-7b", 32, 4096, 32, 14336, kv_heads=8, sequence=8192),
    _llama("qwen2-7b", 28, 3584, 28, 18944, kv_heads=4, vocabulary=152064, qkv_bias=True),
]
MODELS = {shape.name: shape for shape in _SHAPES}
ALIASES = {
    "gpt3": "gpt3-175b",
    "gpt-2": "gpt2",
    "gpt-3": "gpt3-175b",
    "gpt2-1.5b": "gpt2-xl",
    "llama-70b": "llama2-70b",
    "llama-8b": "llama3-8b",
    "mt-nlg": "megatron-530b",
}
_SIZE = re.compile(r"\d+(?:\.\d+)?[mbt]", re.IGNORECASE)


def named_model(name: str) -> Transformer:
    """The model called `name`, or a GPT of exactly the parameters that a size such as `7.5b` says."""
    key = name.lower()
    key = ALIASES.get(key, key)
    if key in MODELS:
        return MODELS[key]
    if _SIZE.fullmatch(key):
        return sized_model(key)
    near = get_close_matches(key, [*MODELS, *ALIASES], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "write a name such as llama-7b or a size such as 7b."
    raise PlannerError(f"no model is called {name!r}: {hint} A config.json file or module.Class works too.")


def sized_model(size: str) -> Transformer:
    """A GPT of exactly `size` parameters, with the layers of the nearest published GPT and width to match."""
    parameters = parse_count(size, "model size")
    gpts = [shape for shape in _SHAPES if not shape.gated]
    nearest = min(gpts, key=lambda shape: abs(shape.parameters / parameters - parameters / shape.parameters))
    width = (parameters / (12 * nearest.layers)) ** 0.5
    hidden = max(128, round(width / 128) * 128)
    shape = _gpt(size, nearest.layers, hidden, hidden // 128, 51200)
    while shape.embedding_parameters > parameters / 2 and hidden > 128:
        hidden -= 128
        shape = _gpt(size, nearest.layers, hidden, hidden // 128, 51200)
    if parameters < shape.embedding_parameters * 2:
        # Its blocks would have next to no parameters, or fewer than none.
        raise PlannerError(
            f"a GPT of {size} parameters would be little more than its embeddings: give at least"
            f" {show_count(2 * shape.embedding_parameters)}, or --layers --hidden --heads --vocabulary --sequence."
        )
    return Transformer(**{**vars(shape), "nominal": parameters})
