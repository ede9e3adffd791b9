"""Bytes that a rank sends in one optimizer step, on each axis, as the ledger of a run counts them."""

from itertools import pairwise

from lightning_3d.layout import COMPRESSED_BYTES, POWERSGD_RANK, Layout
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import (
    LOSS_BYTES,
    absent_experts,
    block_bytes,
    gathered_bytes,
    layers_on_rank,
    rank_trained,
    tied_copy,
)

LOSS_SUMS = 3
"""Numbers that a vocabulary split over ranks sums for each token: maximum, exponentials, the target's logit."""


def ring_all_reduce(elements: float, ranks: int) -> float:
    """Elements that each of `ranks` ranks sends to all-reduce a buffer on a ring: `2(N-1)/N` of it."""
    return 2 * ring_reduce_scatter(elements, ranks)


def ring_reduce_scatter(elements: float, ranks: int) -> float:
    """Elements that each rank sends to reduce-scatter a buffer on a ring: `(N-1)/N` of it; an all-gather the same."""
    return elements * (ranks - 1) / ranks


def powersgd_elements(rows: float, columns: float, rank: int) -> float:
    """Elements that PowerSGD sends in place of a `rows` x `columns` gradient: `(m+n) r`."""
    return (rows + columns) * rank


def data_parts(job: Job, layout: Layout, *, stage: int, microbatches: int) -> tuple[float, float]:
    """Bytes of gathered weights and reduced gradients: among ranks that share a sharded copy, and between copies."""
    ranks, group, apart = layout.gradient_ranks, layout.shards, absent_experts(job, layout, stage)
    reduced = (rank_trained(job.profile, layout, stage) - apart) * gradient_bytes(job, layout)
    if group == 1:
        return ring_all_reduce(reduced, ranks), 0.0
    reduces = reductions(layout, microbatches)
    between = ring_all_reduce(reduced / group, ranks // group)
    gathered = gathered_bytes(job, layout, stage)
    if layout.streams_weights:  # blocks for forward and for backward, the rest once
        gathered = microbatches * (gathered + job.profile.layers * block_bytes(job, layout))
    return ring_reduce_scatter(gathered + reduces * reduced, group), reduces * between


def reductions(layout: Layout, microbatches: int) -> int:
    """Times that gradients are reduced in a step."""
    return microbatches if layout.zero_stage >= 2 and not layout.pipelined else 1


def gradient_bytes(job: Job, layout: Layout) -> float:
    profile, codec = job.profile, job.options.compression
    if codec is None:
        return job.numbers(layout).gradient
    if codec != "powersgd":
        return COMPRESSED_BYTES[codec]
    matrices, width = 2 * profile.block_regions, profile.boundary_elements / profile.positions
    factors = matrices * powersgd_elements(width, profile.matrix_parameters / width / matrices, POWERSGD_RANK)
    return 4 * (factors + profile.vector_parameters) / profile.block_parameters


def uneven(positions: float, ranks: int) -> tuple[float, float]:
    """Factors on what ranks send to gather `positions`, filled up to equal shards, and to scatter sums in full."""
    rest = positions % ranks
    return (1 + (ranks - rest) / positions, 2.0) if rest else (1.0, 1.0)


def routed_bytes(job: Job, layout: Layout, *, micro: int) -> float:
    """Bytes that one block sends to experts and back, for one microbatch."""
    profile, options, again = job.profile, job.options, layout.recompute == "full"
    routed = (4 + 2 * again) * micro * profile.routed_elements / layout.tensor_parallel_size
    return ring_reduce_scatter(routed * job.numbers(layout).product, options.experts)


def exchange_bytes(job: Job, layout: Layout, *, micro: int) -> float:
    """Bytes that attention of one block sends over the context axis for one microbatch, as docs/long.md has them.

    Ranks exchange heads where they divide those of queries and keys. Else each gathers all keys and values. A block
    without attention is taken for one whose ranks share the heads of a module, or beside other axes for a whole one:
    the stream is gathered on the way to such blocks, or its gradient on the way back.
    """
    profile, ranks, tensor = job.profile, job.options.context, layout.tensor_parallel_size
    gather, scatter = uneven(profile.positions * ranks, ranks)
    if profile.heads % (ranks * tensor) == 0:
        sent = ring_reduce_scatter(profile.query_elements + profile.key_elements, ranks)
    else:
        sent = (ranks - 1) * profile.key_elements * (gather + scatter) / 2
    if job.whole_mixers(layout):
        borders = sum(one != other for one, other in pairwise(profile.mixers)) / max(1, len(profile.mixers))
        mixed = borders * gather * profile.element_bytes
    else:
        mixed = profile.mixed_share * (gather + scatter) * (profile.element_bytes + job.numbers(layout).product)
    mixed *= (ranks - 1) * profile.boundary_elements / 2
    return (2 + (layout.recompute == "full")) * micro * (sent / tensor * job.numbers(layout).product + mixed)


def context_bytes(job: Job, layout: Layout, *, stage: int, micro: int) -> float:
    """Bytes on the context axis for one microbatch: of each block, gradients of what enters the first, and losses."""
    profile, others = job.profile, job.options.context - 1
    sent = layers_on_rank(profile, layout, stage) * exchange_bytes(job, layout, micro=micro)
    gather, _ = uneven(profile.positions * (others + 1), others + 1)
    stream = others * micro * profile.boundary_elements * profile.element_bytes * gather
    whole = profile.mixers if job.whole_mixers(layout) else ()
    if stage == 0 and profile.first_parameters > profile.first_frozen and not any(whole[:1]):
        sent += stream
    if stage == layout.last_rank:
        sent += stream if profile.joins_positions and not any(whole[-1:]) else others * 2 * LOSS_BYTES
    return sent


def data_calls(job: Job, layout: Layout, *, microbatches: int) -> int:
    """Collectives of a step on the data axis: one for each block and one for the rest, and each time anew."""
    units, piped = layers_on_rank(job.profile, layout) + 1, layout.pipelined
    if layout.shards == 1:
        return 1
    if piped or layout.zero_stage == 1:
        return 2 * units
    return microbatches * (2 * units if layout.zero_stage == 2 else 3 * units - 1)


def tensor_bytes(job: Job, layout: Layout, *, stage: int, micro: int) -> float:
    """Bytes on the tensor axis for one microbatch: sums of each block, of embeddings, and of the loss of a head."""
    profile, tensor, numbers = job.profile, layout.tensor_parallel_size, job.numbers(layout)
    elements = micro * profile.boundary_elements
    product = min(numbers.product, profile.element_bytes)
    regions, layers = profile.block_regions, layers_on_rank(profile, layout, stage)
    split = profile.divides(layout)
    gather, scatter = uneven(profile.positions, tensor) if split else (1.0, 1.0)  # a sum is a scatter and a gather
    sent = layers * regions * (product + profile.element_bytes) * (gather + scatter) / 2 * elements
    sent += layers * micro * profile.side_elements * profile.element_bytes
    again = profile.repeated_sums * product
    if split:
        again = (again * scatter + regions * profile.element_bytes * gather) / 2
    sent += job.recomputed(layout) * layers * again * elements
    if split:
        # after the blocks of a stage the stream is gathered, before them its gradient; each rank's norms see a part
        sent += len(layout.stages[stage]) * elements * profile.element_bytes * gather
        sent += layers * (profile.block_parameters - profile.half_parameters) * numbers.gradient
    if stage == 0 and profile.first_parameters > profile.first_whole:
        sent += elements * job.options.context * profile.element_bytes  # before the blocks sequences are whole
    splits_head = profile.last_parameters > profile.last_whole or profile.tied_parameters > 0
    if stage == layout.last_rank and splits_head:
        sent += elements * (profile.head_bytes or profile.element_bytes)
        sent += LOSS_SUMS * LOSS_BYTES * micro * profile.positions
    return ring_all_reduce(sent, tensor)


def pipeline_bytes(job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int) -> float:
    """Bytes on the pipeline axis: activations forward, their gradients backward, gradients of tied weights."""
    profile = job.profile
    ties = tied_copy(profile, layout) / layout.tensor_parallel_size if stage in (0, layout.last_rank) else 0
    boundary = micro * profile.boundary_elements * profile.element_bytes
    return layout.transfers(stage) * microbatches * boundary + ties * job.numbers(layout).gradient
