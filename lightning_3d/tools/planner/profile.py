"""`Profile`: cost of one sample in one block of a model, for any source of the model."""

from dataclasses import dataclass, replace

from lightning_3d.layout import Layout, RecomputeMode

Units = tuple[tuple[str, float, float], ...]
"""Place, cost and unsplit elements of the modules that a pipeline places, in running order."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model as the planner sees it. Amounts are for one sample; bytes are at the planned precision."""

    name: str
    layers: int
    """Blocks between which a pipeline may cut."""
    block_parameters: float
    """In one block (the mean where blocks differ)."""
    whole_parameters: float = 0
    """Of those, the unsplit ones of each tensor rank: norms, biases after a row-split matrix."""
    vector_parameters: float = 0
    """Of `block_parameters`, those that are no matrices: autocast does not cast them."""
    half_parameters: float = 0
    """Of `block_parameters`, those of products and their biases: mixed precision with ZeRO gathers them in 16 bits."""
    half_whole: float = 0
    """Of those, biases that tensor ranks share, and gather in 32 bits."""
    packed_parameters: float = 0
    """Of `half_parameters`, those that are quantised: they are gathered as they are."""
    first_half: float = 0
    """The same, before the blocks."""
    last_half: float = 0
    first_parameters: float = 0
    """Before the blocks: embeddings."""
    first_whole: float = 0
    """Of those, the unsplit ones of each tensor rank: positions, small tables."""
    last_parameters: float = 0
    """After the blocks: last norm and head."""
    last_whole: float = 0
    first_freed: float = 0
    """Of `first_parameters`, those of large embeddings: ZeRO 3 has them only while they are called."""
    last_freed: float = 0
    """Of `last_parameters`, those of large heads: ZeRO 3 frees them when their gradients are reduced."""
    rows: tuple[tuple[str, int, float, bool], ...] = ()
    """Place, first dimension and elements of parameters: data ranks that do not divide the first dimension pad it."""
    units: Units = ()
    """Without them a pipeline cuts between blocks."""
    tied_parameters: float = 0
    """Of `first_parameters`, those that the last stage needs a copy of."""
    block_frozen: float = 0
    """Of `block_parameters`, those that are not trained."""
    first_frozen: float = 0
    last_frozen: float = 0
    backward_share: float = 1
    """Share of the blocks through which gradients go back: none that stands before all that is trained."""
    block_flops: float = 0
    """Forward FLOPs of one block."""
    attention_flops: float = 0
    """Of those, the ones of attention."""
    attention_again: float = 0
    """FLOPs of attention that the module itself computes again in backward."""
    last_flops: float = 0
    """Forward FLOPs after the blocks."""
    block_kernels: float = 0
    """Kernels that the forward of one block starts, however large the batch; 0 where not known."""
    outside_kernels: float = 0
    """Kernels that a forward starts before and after the blocks."""
    whole_bytes: float = 0
    """Saved for backward by one block, on every tensor rank unless the sequence is split too."""
    split_bytes: float = 0
    """Saved by one block, split over tensor ranks."""
    attention_bytes: float = 0
    """Saved by one block, split over tensor ranks: the scores of attention."""
    kept_bytes: float = 0
    """Results of products and attention in one block: what selective recompute keeps."""
    region_bytes: float = 0
    """Of those, the ones of the stream's width, which tensor ranks sum and keep once more as a sum."""
    boundary_elements: float = 0
    """Elements that pass from one block to the next."""
    side_elements: float = 0
    """That enter the mean block besides, as what a decoder reads of an encoder. Tensor ranks sum their gradients."""
    query_elements: float = 0
    """Queries of one block, and results of its attention."""
    key_elements: float = 0
    """Its keys and values."""
    heads: int = 0
    """Divides the heads of queries, and those of keys."""
    mixers: tuple[bool, ...] = ()
    """Which blocks mix positions by other means than attention."""
    joins_positions: bool = False
    """True where the head is computed on fewer positions than the blocks: on the first one, or on their mean."""
    expert_parameters: float = 0
    """Of `block_parameters`, those of routed experts."""
    active_share: float = 1
    """Share of them that a token goes through."""
    experts: int = 0
    """Routed experts of a block that has some."""
    expert_count: float = 0
    """Routed experts of the mean block."""
    expert_depth: float = 1
    """Width that their products sum over, a mean."""
    routed_elements: float = 0
    """Elements that one block sends to its experts; as many come back."""
    positions: float = 0
    """Positions of the stream between blocks: tokens of a text, patches of an image."""
    block_regions: float = 2
    """Regions of a block that tensor ranks split, with one sum each in forward and in backward."""
    region_inputs: float = 2
    """Tensors that the products of a block save of what regions gather: under autocast a copy for each product."""
    saves_last: bool = False
    """True where a block saves something after its last product."""
    first_bytes: float = 0
    """Saved before the blocks: images."""
    last_bytes: float = 0
    """Saved after the blocks: logits."""
    logits: float = 0
    """Elements that the last linear layer gives."""
    loss_bytes: float = 0
    """More bytes of the loss at its peak than it saves: logits and their gradient in the middle of its backward."""
    element_bytes: int = 2
    """Of a boundary element."""
    head_bytes: int = 0
    """Of an element that enters the head; 0 where it is as wide as a boundary element."""
    tokens: int = 1
    """Tokens in a sample."""
    example_samples: int = 0
    """Samples in the batch that the module was run on; 0 where there was none."""
    tensor_divides: tuple[int, ...] = ()
    """The tensor size must divide each of these: heads, key-value heads, feed-forward width."""
    tensor_splits: bool = True
    """False where nothing is known that a tensor axis could split."""

    def sliced(self, slices: int) -> "Profile":
        """The profile of one of `slices` equal pieces of each sample, as context ranks compute it."""
        own = {name: getattr(self, name) / slices for name in _OF_SAMPLE}
        return replace(self, **own, tokens=self.tokens // slices)

    def with_whole_mixers(self, slices: int) -> "Profile":
        """The profile of pieces where blocks of `mixers` are computed on all of them."""
        more = 1 + (slices - 1) * self.mixed_share
        again = self.attention_again + (more - 1) * self.block_flops
        names = ("kept_bytes", "whole_bytes", "split_bytes", "region_bytes", "block_regions")
        return replace(self, attention_again=again, **{name: getattr(self, name) * more for name in names})

    @property
    def mixed_share(self) -> float:
        return sum(self.mixers) / max(1, len(self.mixers))

    @property
    def parameters(self) -> float:
        return self.layers * self.block_parameters + self.first_parameters + self.last_parameters

    @property
    def active(self) -> float:
        return self.parameters - self.layers * self.expert_parameters * (1 - self.active_share)

    @property
    def trained(self) -> float:
        return self.parameters - self.layers * self.block_frozen - self.first_frozen - self.last_frozen

    @property
    def frozen_share(self) -> float:
        return self.block_frozen / self.block_parameters if self.block_parameters else 0.0

    @property
    def matrix_parameters(self) -> float:
        """Of one block, those that a product multiplies with."""
        return self.block_parameters - self.vector_parameters

    @property
    def expert_flops(self) -> float:
        return 2 * self.tokens * self.expert_parameters * self.active_share

    @property
    def forward_flops(self) -> float:
        return self.layers * self.block_flops + self.last_flops

    @property
    def weight_share(self) -> float:
        """Products for gradients of weights, over those of the forward: only what is trained has one."""
        return self.trained / self.parameters if self.parameters else 1.0

    @property
    def passes(self) -> float:
        """Products of forward and backward over those of the forward: three where everything is trained."""
        return 1 + self.backward_share + self.weight_share

    @property
    def repeated_sums(self) -> float:
        """Sums of regions in a block that is computed again: it ends with the last result that backward needs."""
        return self.block_regions - (not self.saves_last)

    def model_flops(self, samples: float) -> float:
        """Forward and backward, nothing recomputed: the FLOPs of MFU."""
        return self.passes * self.forward_flops * samples

    def hardware_flops(self, samples: float, recompute: RecomputeMode, share: float = 1.0) -> float:
        """FLOPs of the devices. Full recompute is that of a `share` of the blocks.

        Attention that the module computes again counts as in Korthikanti et al. (2022), equation 9.
        """
        again = 3 * self.attention_again + (share * self.block_flops if recompute == "full" else 0.0)
        return (self.passes * self.forward_flops + self.layers * again) * samples

    def block_activations(self, *, tensor: int, sequence_parallel: bool, recompute: RecomputeMode) -> float:
        """Bytes that one block saves for backward, per sample, on one tensor rank."""
        parts = tensor if sequence_parallel else 1
        if recompute == "none":
            return self.whole_bytes / parts + (self.split_bytes + self.attention_bytes) / tensor
        enters = self.boundary_elements * self.element_bytes / parts
        if recompute == "full":
            return enters
        sums = self.region_bytes / parts if tensor > 1 else 0.0
        gathered = self.region_bytes if sequence_parallel else 0.0
        return enters + (self.kept_bytes - self.region_bytes) / tensor + self.region_bytes + sums + gathered

    def divides(self, layout: Layout) -> bool:
        """Return True if tensor ranks divide the positions of the stream, if it has some for each."""
        return layout.sequence_parallel and not 0 < self.positions < layout.tensor_parallel_size

    def can_split(self, tensor: int) -> bool:
        return tensor == 1 or (self.tensor_splits and all(size % tensor == 0 for size in self.tensor_divides))


_OF_SAMPLE = (
    "block_flops", "attention_flops", "last_flops", "whole_bytes", "split_bytes", "attention_bytes",
    "boundary_elements", "side_elements", "query_elements", "key_elements", "routed_elements",
    "positions", "first_bytes", "last_bytes", "loss_bytes", "logits", "kept_bytes", "region_bytes", "attention_again",
)  # fmt: skip
"""Amounts that are those of one sample."""
