"""`Transformer`: the shape of a decoder, its exact parameter count, and its `Profile`."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from lightning_3d.errors import PlannerError
from lightning_3d.layout import APART_BYTES
from lightning_3d.optim.state_bytes import NumberBytes, Precision, number_bytes
from lightning_3d.tools.planner.profile import Profile

Attention = Literal["flash", "eager", "checkpointed"]
Kernels = Literal["eager", "fused"]
"""Fused ones save less: a norm its input, a gated activation its two inputs, a product its input in fp8 where that is
its type. Tensor ranks gather a divided stream again in backward. So do Transformer Engine and Megatron-LM."""
MOST_SIZE = 10**9
"""Of any one size of a model; of the product of all no sum overflows."""
MOST_LAYERS = 10**5


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer. The defaults are a GPT: biases, LayerNorm, learned positions, tied head."""

    name: str = "custom"
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens in a training sample."""
    positions: int = 0
    """Rows of a learned position embedding."""
    kv_heads: int | None = None
    """Key-value heads, where fewer than `heads`."""
    head_size: int | None = None
    feedforward: int | None = None
    """Width inside the MLP; 4 x `hidden` where not given."""
    gated: bool = False
    """Three MLP matrices instead of two."""
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    qk_norm: bool = False
    tied: bool = True
    dropout: bool = True
    experts: int = 0
    """Routed experts of a block, 0 where it has one MLP, and those that a token goes through."""
    active_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Width of the experts that every token goes through."""
    dense_layers: int = 0
    """First blocks, which have one MLP in place of experts."""
    query_rank: int = 0
    """Width between the two matrices that make queries, of latent attention; 0 where one matrix does."""
    key_rank: int = 0
    """The same for keys and values."""
    rope_size: int = 0
    """Part of each head's queries that has positions, and the width of the keys with positions, one for all heads."""
    value_size: int | None = None
    """Of a head, where it is not `head_size`."""
    nominal: float | None = None
    """Parameters as the size is named, used in place of the count where given."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlannerError(f"{self.name}: {name}={size!r} must be a whole number of at least 1.")
            most = MOST_LAYERS if name == "layers" else MOST_SIZE
            if size > most:
                raise PlannerError(f"{self.name}: {name} must be at most {most:,}; no model is larger.")
        if self.head_size is None and self.hidden % self.heads:
            raise PlannerError(f"{self.name}: hidden={self.hidden} does not divide into heads={self.heads}.")
        if self.active_experts > self.experts or self.dense_layers > self.layers:
            raise PlannerError(
                f"{self.name}: active_experts={self.active_experts} of experts={self.experts} and"
                f" dense_layers={self.dense_layers} of layers={self.layers} are more than there are."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise PlannerError(f"{self.name}: heads={self.heads} do not share kv_heads={self.kv_heads} evenly.")

    @property
    def query_width(self) -> int:
        return self.heads * ((self.head_size or self.hidden // self.heads) + self.rope_size)

    @property
    def key_width(self) -> int:
        """Of keys, and of values, as a cache has them: latent ones are expanded when they are used."""
        if self.key_rank:
            return (self.key_rank + self.rope_size) // 2
        return self.query_width // self.heads * (self.kv_heads or self.heads)

    @property
    def value_width(self) -> int:
        return self.heads * self.value_size if self.value_size else self.query_width

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def mlp_width(self) -> int:
        return self.feedforward or 4 * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Weights of the matrices around attention in one block."""
        if not self.key_rank:
            return self.hidden * (2 * self.query_width + 2 * self.key_width)
        keys = self.query_width - self.heads * self.rope_size + self.value_width
        queries = (self.hidden + self.query_width) * self.query_rank or self.hidden * self.query_width
        latent = self.hidden * (self.key_rank + self.rope_size) + self.key_rank * keys
        return queries + latent + self.value_width * self.hidden

    def mlp_widths(self, experts: int) -> int:
        """Widths of the MLPs of all blocks together, with so many experts in each block that has some."""
        sparse = self.sparse_layers
        return (self.layers - sparse) * self.mlp_width + sparse * (experts * self.expert_width + self.shared_width)

    def matrices(self, experts: int) -> float:
        """Weights of the matrices of the mean block, with so many experts. A router has a row for each."""
        mlp = (3 if self.gated else 2) * self.hidden * self.mlp_widths(experts)
        return self.attention_parameters + (mlp + self.sparse_layers * self.hidden * self.experts) / self.layers

    @property
    def matrix_parameters(self) -> float:
        return self.matrices(self.experts)

    @property
    def whole_parameters(self) -> int:
        """Norms and output biases of one block, which no tensor axis splits."""
        return self._norms + self.hidden * (self.out_bias + self.mlp_bias)

    @property
    def block_parameters(self) -> float:
        inner_bias = self.mlp_width * (2 if self.gated else 1) * self.mlp_bias
        split_bias = (self.query_width + 2 * self.key_width) * self.qkv_bias
        return self.matrix_parameters + self.whole_parameters + split_bias + inner_bias

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        head = 0 if self.tied else self.vocabulary * self.hidden
        return round(self.layers * self.block_parameters) + self.embedding_parameters + self._norm + head

    @property
    def _norms(self) -> int:
        """Parameters of the norms of a block."""
        inside = 2 * (self.query_width // self.heads) if self.qk_norm else self.query_rank + self.key_rank
        return 2 * self._norm + inside

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.norm_bias else 1)

    def profile(
        self,
        *,
        precision: Precision = "bf16-mixed",
        attention: Attention = "flash",
        kernels: Kernels = "eager",
        fp8: bool = False,
    ) -> Profile:
        numbers = number_bytes(precision)
        counted = self.block_parameters * self.layers
        blocks = counted if self.nominal is None else counted + self.nominal - self.parameters
        core = 2 * self.sequence**2 * (self.query_width + self.value_width)
        active = self.matrices(self.active_experts) / self.matrix_parameters
        mlp, products = 3 if self.gated else 2, 5 if self.gated and numbers.cast else 2
        stream = self.sequence * self.hidden
        words, places = self.vocabulary * self.hidden, self.positions * self.hidden
        scores = self.heads * self.sequence**2 * (2 * numbers.product + 1 if self.dropout else numbers.product)
        statistics = 4 * self.heads * self.sequence if attention == "flash" else 0
        dropped = 2 * stream if self.dropout else 0
        saved: dict[str, Any] = {
            "kept_bytes": self._kept_bytes(numbers.product) + statistics,
            "region_bytes": 2 * stream * numbers.product,
            "region_inputs": products,
            "whole_bytes": stream * self._norm_bytes(numbers, products) + dropped,
            "split_bytes": self._split_bytes(numbers.product) + statistics,
        }
        if kernels == "fused":
            saved = self._saved_by_fused(numbers, 1 if fp8 else numbers.product, dropped, statistics)
        return Profile(
            name=self.name,
            layers=self.layers,
            block_parameters=blocks / self.layers,
            whole_parameters=self.whole_parameters,
            vector_parameters=self.block_parameters - self.matrix_parameters,
            half_parameters=blocks / self.layers - self._norms,
            last_half=0 if self.tied else words,
            first_parameters=self.embedding_parameters,
            first_whole=places,
            last_parameters=self._norm + (0 if self.tied else words),
            last_whole=self._norm,
            first_freed=sum(size for size in (0 if self.tied else words, places) if 4 * size >= APART_BYTES),
            last_freed=words if not self.tied and 4 * words >= APART_BYTES else 0,
            tied_parameters=words if self.tied else 0,
            block_flops=2 * self.sequence * active * self.matrix_parameters * blocks / counted + core,
            expert_parameters=mlp * self.hidden * self.experts * self.expert_width * self.sparse_layers / self.layers,
            active_share=self.active_experts / self.experts if self.experts else 1.0,
            routed_elements=self.sequence * self.hidden * self.active_experts * self.sparse_layers / self.layers,
            experts=self.experts,
            expert_count=self.experts * self.sparse_layers / self.layers,
            expert_depth=self._depths(mlp == 3),
            attention_flops=core,
            attention_again=core if attention == "checkpointed" else 0,
            last_flops=2 * self.sequence * words,
            attention_bytes=scores if attention == "eager" else 0,
            boundary_elements=stream,
            query_elements=self.sequence * (self.query_width + self.value_width),
            key_elements=2 * self.sequence * self.key_width,
            heads=gcd(self.heads, self.kv_heads or self.heads),
            last_bytes=self.sequence * (4 * self.vocabulary + (numbers.stream + numbers.product) * self.hidden),
            logits=self.sequence * self.vocabulary,
            loss_bytes=8 * self.sequence * self.vocabulary,
            element_bytes=numbers.stream,
            positions=self.sequence,
            tokens=self.sequence,
            tensor_divides=(self.heads, self.kv_heads or self.heads, self.expert_width or self.mlp_width),
            **saved,
        )

    def _norm_bytes(self, numbers: NumberBytes, products: int) -> int:
        """Bytes that the two norms of a block save for each number of the stream.

        A LayerNorm saves its input, and products save its output. An RMSNorm of Hugging Face also saves the normalized
        input, and computes in fp32. Autocast casts the output once for each product.
        """
        return 2 * ((0 if self.norm_bias else 4) + numbers.stream) + products * numbers.product

    def _kept_bytes(self, size: int) -> float:
        """Bytes of the results of products and attention in a block. Attention with dropout is computed again."""
        keys = self.query_width + self.value_width if self.key_rank else 2 * self.key_width
        heads = self.query_width + keys + (0 if self.dropout else self.value_width)
        inside = (2 if self.gated else 1) * self.mlp_widths(self.active_experts) / self.layers
        return size * self.sequence * (heads + inside + 2 * self.hidden)

    def _depths(self, gated: bool) -> float:
        """Harmonic mean of the widths that products of experts sum over, forward and for gradients of inputs."""
        outer, inner = 1 / self.hidden, 1 / (self.expert_width or self.mlp_width)
        first, second = (2 / 3, 1 / 3) if gated else (1 / 2, 1 / 2)
        return 2 / (first * outer + second * inner + first * inner / (2 if gated else 1) + second * outer)

    def _saved_by_fused(self, numbers: NumberBytes, entering: int, dropped: int, statistics: int) -> dict[str, float]:
        """Bytes that a block saves, with `entering` bytes of a number that enters a product.

        Selective recompute drops norms, activations and the products that expand latent keys.
        """
        inner = self.mlp_widths(self.active_experts) / self.layers
        routed = self.active_experts * self.hidden * self.sparse_layers / self.layers * entering
        own = self.value_width * (numbers.product + (entering if entering < numbers.product else 0))
        keys = self.query_width + self.value_width if self.key_rank else 2 * self.key_width
        latent = self.query_rank + self.key_rank + self.rope_size if self.key_rank else self.query_width + keys
        results = (2 if self.gated else 1) * inner
        split = numbers.product * (self.query_width + keys + results) + own + entering * inner + routed
        kept = numbers.stream * self.hidden + numbers.product * latent + own + entering * results + routed
        return {
            "whole_bytes": 2 * self.sequence * self.hidden * (numbers.stream + entering) + dropped,
            "split_bytes": self.sequence * split + statistics,
            "kept_bytes": self.sequence * kept + statistics,
            "region_bytes": 0.0,
            "region_inputs": 0.0,
        }

    def with_sequence(self, sequence: int) -> "Transformer":
        positions = max(sequence, self.positions) if self.positions else 0
        return replace(self, sequence=sequence, positions=positions)

    def _split_bytes(self, size: int) -> float:
        """Bytes inside attention and the MLPs, and of inputs and outputs of experts."""
        keys = self.query_width + self.value_width if self.key_rank else 2 * self.key_width
        routed = 2 * self.active_experts * self.hidden * self.sparse_layers / self.layers
        inside = (4 if self.gated else 2) * self.mlp_widths(self.active_experts) / self.layers
        return size * self.sequence * (self.query_width + self.value_width + keys + inside + routed)
