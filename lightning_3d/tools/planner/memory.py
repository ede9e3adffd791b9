"""`PlannedMemory`: the memory of one rank of a layout at its peak."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from lightning_3d.layout import LARGE_LOGITS, LOGITS_PART, Layout, Schedule
from lightning_3d.optim.state_bytes import StateBytes, offloaded
from lightning_3d.pipeline.stage_costs import balanced_cut
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.profile import Profile, Units

LOSS_BYTES = 4
"""Of a number of the loss, which is fp32 in every precision."""
LOGITS_IN_USE = 5
"""Parts of large logits, their results and gradients that exist at a time."""
FRESH_GRADIENTS = 0.5
"""Share of one block's gradients that a backward has computed and not yet added to those of earlier microbatches."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Bytes on one rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0
    head: float = 0
    """Logits and the loss."""
    casts: float = 0
    """16-bit copies of fp32 matrices, in mixed precision."""
    buffers: float = 0
    """Received activations and gradients of the pipeline, gathered weights of ZeRO 3 and offload."""
    reserved: float = 0
    """Driver, communication library, fragmentation."""
    host: float = 0
    """In host memory, where something is offloaded; not part of the total."""

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.head + self.casts + self.buffers + self.reserved

    def but(self, **changes: float) -> "PlannedMemory":
        """The same with `changes`; a search asks very often, and `replace` takes three times as long."""
        return PlannedMemory(**{**vars(self), **changes})


def tied_copy(profile: Profile, layout: Layout) -> float:
    """Elements of the tied parameters that the last stage needs again: none where one rank has both ends."""
    return profile.tied_parameters if layout.last_rank else 0.0


def rank_parameters(profile: Profile, layout: Layout, stage: int) -> float:
    """Parameters that one tensor rank of pipeline rank `stage` computes with."""
    blocks = layers_on_rank(profile, layout, stage) * _in_block(profile, layout.tensor_parallel_size)
    whole = (0.0 if stage else profile.first_whole) + _last_whole(profile, layout, stage)
    padding = sum(_filled(profile, layout, _parts(profile, layout, stage)))
    return blocks + whole + sum(_words(profile, layout, stage)) + padding


def _words(profile: Profile, layout: Layout, stage: int) -> tuple[float, float]:
    """Elements of embeddings and of heads on a tensor rank."""
    first = 0.0 if stage else profile.first_parameters - profile.first_whole
    last = profile.last_parameters - profile.last_whole + tied_copy(profile, layout)
    return first / layout.tensor_parallel_size, (stage == layout.last_rank) * last / layout.tensor_parallel_size


def _parts(profile: Profile, layout: Layout, stage: int) -> dict[str, int]:
    """Number of times that a stage has what is before the blocks, a block, and what is behind them."""
    return {"first": stage == 0, "block": layers_on_rank(profile, layout, stage), "last": stage == layout.last_rank}


def _filled(profile: Profile, layout: Layout, parts: dict[str, int]) -> tuple[float, float]:
    """The padding of weights that are gathered in 16 bits in mixed precision, and of the others."""
    half = other = 0.0
    whole = {"first": profile.first_whole, "last": profile.last_whole}
    for place, rows, size, in_half in profile.rows:
        filled = parts.get(place, 0) * size * (-rows % layout.shards) / rows
        filled /= 1 if size <= whole.get(place, 0) else layout.tensor_parallel_size
        half, other = half + filled * in_half, other + filled * (not in_half)
    return half, other


def rank_trained(profile: Profile, layout: Layout, stage: int) -> float:
    """Of those, the ones that have gradients. (A tied copy has none where as much before the blocks is frozen.)"""
    tensor = layout.tensor_parallel_size
    frozen = layers_on_rank(profile, layout, stage) * _in_block(profile, tensor) * profile.frozen_share
    if stage == 0:
        frozen += profile.first_frozen / tensor
    if stage == layout.last_rank:
        frozen += (profile.last_frozen + min(tied_copy(profile, layout), profile.first_frozen)) / tensor
    return rank_parameters(profile, layout, stage) - frozen


def gathered_bytes(job: Job, layout: Layout, stage: int) -> float:
    profile, numbers = job.profile, job.numbers(layout)
    tensor, layers = layout.tensor_parallel_size, layers_on_rank(profile, layout, stage)
    half = layers * (_half(job, layout) - _packed(job, layout))
    if stage == 0:
        half += profile.first_half
    if stage == layout.last_rank:
        half += profile.last_half / (tensor if profile.last_parameters > profile.last_whole else 1)
    absent = absent_experts(job, layout, stage)
    present = rank_parameters(profile, layout, stage) - absent
    half += _filled(profile, layout, _parts(profile, layout, stage))[0]
    return numbers.gathered * present - (numbers.gathered - numbers.half) * (half - absent)


def absent_experts(job: Job, layout: Layout, stage: int) -> float:
    """Parameters of experts that other expert ranks own."""
    share, layers = 1 - 1 / job.options.experts, layers_on_rank(job.profile, layout, stage)
    return share * layers * job.profile.expert_parameters / layout.tensor_parallel_size


def block_bytes(job: Job, layout: Layout) -> float:
    numbers, half = job.numbers(layout), _half(job, layout)
    absent = (1 - 1 / job.options.experts) * job.profile.expert_parameters / layout.tensor_parallel_size
    vectors = _in_block(job.profile, layout.tensor_parallel_size) - half
    packed = (numbers.gathered - numbers.half) * _packed(job, layout)
    half_filled, filled = _filled(job.profile, layout, {"block": 1})
    return numbers.half * (half - absent + half_filled) + packed + numbers.gathered * (vectors + filled)


def _packed(job: Job, layout: Layout) -> float:
    """Quantised numbers in one block on a rank. Frozen experts are among them."""
    absent = (1 - 1 / job.options.experts) * job.profile.expert_parameters
    return max(0.0, job.profile.packed_parameters - absent) / layout.tensor_parallel_size


def _half(job: Job, layout: Layout) -> float:
    """Parameters of products in one block on a tensor rank, but for biases that ranks share. Norms are unsplit."""
    profile, tensor = job.profile, layout.tensor_parallel_size
    vectors = profile.block_parameters - profile.half_parameters + profile.half_whole * (tensor > 1)
    return _in_block(profile, tensor) - vectors


def _in_block(profile: Profile, tensor: int) -> float:
    """Parameters of one block on one of `tensor` ranks."""
    return (profile.block_parameters - profile.whole_parameters) / tensor + profile.whole_parameters


def cast_bytes(job: Job, layout: Layout, *, stage: int, microbatches: int) -> tuple[float, float]:
    """Bytes of the 16-bit copies of matrices that autocast makes, and of those of a block that is computed again.

    Each microbatch keeps its own until its backward, except for those of blocks that are computed again.
    """
    profile, numbers = job.profile, job.numbers(layout)
    in_half = numbers.half < numbers.gathered
    flying = layout.held(stage, microbatches)
    kept = layers_on_rank(profile, layout, stage) * flying * (1 - job.recomputed(layout, selective=True))
    block = 0.0 if in_half else numbers.cast * profile.matrix_parameters / layout.tensor_parallel_size
    head = 0.0
    if stage == layout.last_rank:
        own = profile.last_parameters - profile.last_whole - (profile.last_half if in_half else 0)
        head = (max(0.0, own) + profile.tied_parameters) * flying
    return block * kept + numbers.cast * head / layout.tensor_parallel_size, block * (layout.recompute != "none")


def layers_on_rank(profile: Profile, layout: Layout, stage: int | None = None) -> int:
    """Blocks of pipeline rank `stage`, by default of the one with most."""
    shape = (layout.schedule, layout.pipeline_parallel_size, layout.stages_per_rank)
    blocks = _layers_by_rank(profile.layers, profile.units, *shape)
    return max(blocks) if stage is None else blocks[stage]


@cache
def _layers_by_rank(layers: int, units: Units, schedule: Schedule, ranks: int, chunks: int) -> tuple[int, ...]:
    stages = Layout(schedule=schedule, pipeline_parallel_size=ranks, stages_per_rank=chunks).stages
    blocks = layers_by_stage(layers, units, sum(map(len, stages)))
    return tuple(sum(blocks[stage] for stage in own) for own in stages)


def layers_by_stage(layers: int, units: Units, count: int) -> tuple[int, ...]:
    """Blocks of each virtual stage: as a run cuts the units of a module; else, stages at both ends have one less."""
    if not units:
        more, first = layers % count, (count - layers % count) // 2
        return tuple(layers // count + (first <= stage < first + more) for stage in range(count))
    bounds = pairwise(balanced_cut(tuple(cost for _, cost, _ in units), count))
    return tuple(sum(place == "block" for place, *_ in units[start:stop]) for start, stop in bounds)


def _last_whole(profile: Profile, layout: Layout, stage: int) -> float:
    """Unsplit parameters after the blocks on a rank: a large head may have its stage without the norm before it."""
    if not layout.pipelined or not profile.units:
        return profile.last_whole if stage == layout.last_rank else 0.0
    head = layout.num_stages - 1
    cuts = balanced_cut(tuple(cost for _, cost, _ in profile.units), layout.num_stages)
    units = [[unit for v in own if v < head for unit in profile.units[cuts[v] : cuts[v + 1]]] for own in layout.stages]
    early = [sum(size for place, _, size in own if place == "last") for own in units]
    return early[stage] + (profile.last_whole - sum(early) if stage == layout.last_rank else 0.0)


def rank_memory(
    job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int, reserved: float
) -> PlannedMemory:
    """The memory of a rank of pipeline rank `stage` at its peak, with `microbatches` of `micro` samples.

    At the end of the last backward all gradients exist, and the temporaries of one block's. Then the optimizer steps.
    """
    kept, host = offloaded(
        states_in_step(job, layout, stage, microbatches), layout, optimizer=job.options.offload == "optimizer"
    )
    states = PlannedMemory(**vars(kept), reserved=reserved, host=host)
    words = max(_words(job.profile, layout, stage))
    fresh = words * job.per_parameter.gradients if microbatches > 1 else 0.0
    temporary = gathered_weights(job, layout, backward=True) + max(_block_gradients(job, layout), fresh)
    earlier = _before_end(job, layout, states, stage=stage, micro=micro, microbatches=microbatches)
    return max([states.but(buffers=temporary), *earlier], key=lambda memory: memory.total)


def _before_end(
    job: Job, layout: Layout, states: PlannedMemory, *, stage: int, micro: int, microbatches: int
) -> Iterator[PlannedMemory]:
    """The end of the last forward; the backward of the loss, of the last block, and of blocks computed again."""
    profile, host, block, streams = job.profile, states.host, _block_gradients(job, layout), layout.streams_weights
    activations, again = stage_activations(job, layout, stage=stage, micro=micro, microbatches=microbatches)
    if job.options.offload == "activations":
        activations, host = 2 * activations / layers_on_rank(profile, layout), host + activations
    # one microbatch on its way in each direction of each virtual stage: a buffer is taken when its receive starts
    received = layout.transfers(stage) * micro * profile.boundary_elements * profile.element_bytes
    buffers = received + gathered_weights(job, layout)
    saved, result, loss = head_bytes(job, layout, micro) if stage == layout.last_rank else (0.0, 0.0, 0.0)
    casts, casts_again = cast_bytes(job, layout, stage=stage, microbatches=microbatches)
    # the next block is gathered, and one has new gradients, before those of another one are reduced
    streamed, piped = 2 * streams * block_bytes(job, layout), layout.pipelined
    times = [(states.gradients, 1.0)]
    if piped and layout.held(stage, microbatches) >= microbatches:
        # the first gradients come with the first activations gone
        times = [(0.0, 1.0), (states.gradients, 1 - 1 / microbatches)]
    for gradients, share in times:
        kept = states.but(
            gradients=gradients, activations=activations * share, casts=casts * share, host=host,
            buffers=buffers + piped * FRESH_GRADIENTS * block,
        )  # fmt: skip
        # without earlier microbatches, backward begins with the gradients of the step before dropped
        begun = kept if piped or microbatches > 1 else kept.but(gradients=0.0)
        yield kept.but(head=saved + result)
        yield begun.but(head=saved + loss)
        if layout.recompute == "none":
            yield begun.but(head=saved, activations=kept.activations + again, buffers=buffers + streamed)
            continue
        yield begun.but(
            activations=kept.activations + again, casts=kept.casts + casts_again,
            buffers=buffers + streamed + block,
        )  # fmt: skip
        others = states.gradients - (0.0 if streams else block)
        yield begun.but(gradients=others, activations=again, casts=casts_again, buffers=buffers + block)


def head_bytes(job: Job, layout: Layout, micro: int) -> tuple[float, float, float]:
    """Bytes that are saved after the blocks, more while the loss is computed, and more at the peak of its backward.

    The loss reads the logits, in mixed precision also an fp32 copy. A split vocabulary has one more, less the maximum.
    Large logits exist in parts alone.
    """
    profile, tensor, product = job.profile, layout.tensor_parallel_size, job.numbers(layout).product
    saved, loss = profile.last_bytes * micro / tensor, profile.loss_bytes * micro / tensor
    logits = profile.logits * micro / tensor
    if not in_parts(job, layout, micro):
        copied = tensor > 1 or job.precision.endswith("-mixed")
        return saved, logits * (product + LOSS_BYTES * copied), loss
    sums = 4 * (profile.tied_parameters or profile.last_parameters - profile.last_whole) / tensor
    return max(0.0, saved - 4 * logits), 0.0, LOGITS_IN_USE * LOGITS_PART + sums


def in_parts(job: Job, layout: Layout, micro: int) -> bool:
    """Return True if the loss is computed from parts of the logits."""
    logits = job.profile.logits * micro / layout.tensor_parallel_size
    return logits * job.numbers(layout).product >= LARGE_LOGITS


def _block_gradients(job: Job, layout: Layout) -> float:
    trained = job.profile.block_parameters - job.profile.block_frozen
    return trained / layout.tensor_parallel_size * job.per_parameter.gradients


def whole_states(job: Job, layout: Layout, stage: int) -> StateBytes:
    """Those of a rank of pipeline rank `stage`, if data ranks divided none."""
    return job.states(rank_parameters(job.profile, layout, stage), rank_trained(job.profile, layout, stage))


def states_in_step(job: Job, layout: Layout, stage: int, microbatches: int) -> StateBytes:
    """The states when backward begins, and when it ends. Stages 1 and 2 have gathered weights and their shards.

    Gradients are those of the step before, or those of earlier microbatches. Each block's are reduced and freed when
    they are computed, or once in a step if they accumulate.
    """
    whole, absent = whole_states(job, layout, stage), absent_experts(job, layout, stage)
    shard = whole.of(1 / layout.shards)
    weights, gradients = shard.weights, shard.gradients
    if layout.accumulates(microbatches):
        gradients = whole.gradients - job.per_parameter.gradients * absent
    if layout.shards == 1:
        weights -= job.per_parameter.weights * absent
    elif not layout.streams_weights:
        weights += gathered_bytes(job, layout, stage)
    return StateBytes(weights=weights, gradients=gradients, optimizer=shard.optimizer)


def stage_activations(job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int) -> tuple[float, float]:
    """Bytes saved for backward after the last forward, and more while one block is computed again."""
    profile, flying = job.profile, layout.held(stage, microbatches)
    tensor, split = layout.tensor_parallel_size, profile.divides(layout)
    unsaved = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute="none") * micro
    gathered = profile.region_bytes * profile.region_inputs / max(1.0, profile.block_regions)
    unsaved += split * (1 - 1 / tensor) * gathered * micro  # each region saves what it gathers
    block = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute=layout.recompute) * micro
    blocks, share = layers_on_rank(profile, layout, stage) * flying, job.recomputed(layout, selective=True)
    kept = blocks * (share * block + (1 - share) * unsaved) + (0.0 if stage else profile.first_bytes * micro * flying)
    if layout.recompute == "selective":
        unsaved = max(0.0, unsaved - block + profile.region_bytes * micro)
    # the sum of uneven shards is one of the full stream, and of a copy
    uneven = 2 * micro * profile.boundary_elements * profile.element_bytes * (split and profile.positions % tensor > 0)
    return kept, (unsaved if share else 0.0) + uneven


def gathered_weights(job: Job, layout: Layout, *, backward: bool = False) -> float:
    """Bytes of full weights on a device that has only shards: of a block and the head, or of two blocks in backward."""
    if not layout.streams_weights and (layout.offload == "none" or layout.pipelined):
        return 0.0
    profile, numbers = job.profile, job.numbers(layout)
    freed = layout.zero_stage == 3
    head = profile.last_freed if freed and backward else 0.0
    outside = profile.first_parameters + profile.last_parameters - (profile.first_freed if freed else 0.0) - head
    half = profile.first_half + (0 if head else profile.last_half)
    rest = (numbers.gathered * outside - (numbers.gathered - numbers.half) * half) / layout.tensor_parallel_size
    return (1 + backward) * block_bytes(job, layout) + rest
