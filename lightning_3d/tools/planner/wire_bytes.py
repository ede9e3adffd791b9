"""Bytes that a rank sends in one optimizer step, on each axis, as the ledger of a run counts them."""

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
    gathered = sent_weights(job, layout, stage=stage, microbatches=microbatches)
    return ring_reduce_scatter(gathered + reduces * reduced, group), reduces * between


def reductions(layout: Layout, microbatches: int) -> int:
    """Times that gradients are reduced in a step."""
    return microbatches if layout.zero_stage >= 2 and not layout.pipelined else 1


def gradient_bytes(job: Job, layout: Layout) -> float:
    """Bytes of the gradient of one parameter on the links."""
    profile, codec = job.profile, job.options.compression
    if codec is None:
        return job.numbers(layout).gradient
    if codec != "powersgd":
        return COMPRESSED_BYTES[codec]
    matrices, width = 2 * profile.block_regions, profile.boundary_elements / profile.positions
    factors = matrices * powersgd_elements(width, profile.matrix_parameters / width / matrices, POWERSGD_RANK)
    return 4 * (factors + profile.vector_parameters) / profile.block_parameters


def block_exchange_bytes(job: Job, layout: Layout, *, micro: int) -> tuple[float, float]:
    """Bytes for one block and microbatch: keys and values over context ranks, tokens to experts and back.

    Each rank gathers the keys and values of all slices in forward and in backward, and sends their gradients.
    """
    profile, options, size = job.profile, job.options, job.numbers(layout).product
    again = 1 if layout.recompute == "full" else 0
    tensor = layout.tensor_parallel_size
    keys = (3 + again) * (options.context - 1) * micro * profile.key_elements * size / tensor
    routed = (4 + 2 * again) * micro * profile.routed_elements * size / tensor
    return keys, ring_reduce_scatter(routed, options.experts)


def sent_weights(job: Job, layout: Layout, *, stage: int, microbatches: int) -> float:
    """Bytes that are gathered in a step. Stage 3 gathers blocks for forward and for backward, the rest once."""
    weights = gathered_bytes(job, layout, stage)
    if not layout.streams_weights:
        return weights
    return microbatches * (weights + job.profile.layers * block_bytes(job, layout))


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
    split, rest = profile.divides(layout), profile.positions % tensor
    # a sum is a scatter and a gather; uneven shards are filled up to be gathered, and summed in full to be scattered
    gather, scatter = (1 + (tensor - rest) / profile.positions, 2.0) if split and rest else (1.0, 1.0)
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
        sent += elements * profile.element_bytes
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
