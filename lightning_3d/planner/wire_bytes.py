"""Bytes that a rank sends in one optimizer step, on each axis, as the ledger of a run counts them."""

from lightning_3d.layout import Layout
from lightning_3d.planner.formulas import ring_all_reduce, ring_reduce_scatter
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import (
    block_bytes,
    gathered_bytes,
    layers_on_rank,
    rank_trained,
    shards,
    streams_weights,
)

LOSS_SUMS = 3
"""Numbers that a vocabulary split over ranks sums for each token: maximum, exponentials, the target's logit."""
LOSS_BYTES = 4
"""Of such a number, which is fp32 in every precision."""


def data_bytes(job: Job, layout: Layout, *, stage: int, microbatches: int) -> float:
    """Bytes on the data axis: gathered weights and reduced gradients. Copies of a hybrid shard also sum theirs."""
    ranks, group, numbers = layout.data_parallel_size, shards(layout), job.numbers(layout)
    trained = rank_trained(job.profile, layout, stage) * numbers.gradient
    if group == 1:
        return ring_all_reduce(trained, ranks)
    reduces = microbatches if layout.zero_stage >= 2 and layout.pipeline_parallel_size == 1 else 1
    between = ring_all_reduce(trained / group, ranks // group)
    gathered = sent_weights(job, layout, stage=stage, microbatches=microbatches)
    return ring_reduce_scatter(gathered + reduces * trained, group) + reduces * between


def sent_weights(job: Job, layout: Layout, *, stage: int, microbatches: int) -> float:
    """Bytes that are gathered in a step. Stage 3 gathers blocks for forward and for backward, the rest once."""
    weights = gathered_bytes(job, layout, stage)
    if not streams_weights(layout):
        return weights
    return microbatches * (weights + job.profile.layers * block_bytes(job, layout))


def data_calls(job: Job, layout: Layout, *, microbatches: int) -> int:
    """Collectives of a step on the data axis: one for each block and one for the rest, and each time anew."""
    units, piped = layers_on_rank(job.profile.layers, layout) + 1, layout.pipeline_parallel_size > 1
    if shards(layout) == 1:
        return 1
    if piped or layout.zero_stage == 1:
        return 2 * units
    return microbatches * (2 * units if layout.zero_stage == 2 else 3 * units - 1)


def tensor_bytes(job: Job, layout: Layout, *, stage: int, micro: int) -> float:
    """Bytes on the tensor axis for one microbatch: sums of each block, of embeddings, and of the loss of a head."""
    profile, tensor, numbers = job.profile, layout.tensor_parallel_size, job.numbers(layout)
    elements = micro * profile.boundary_elements
    product = min(numbers.product, profile.element_bytes)
    forward = 2 if layout.recompute == "full" else 1
    block = profile.block_regions * (forward * product + profile.element_bytes) * elements
    sent = layers_on_rank(profile.layers, layout, stage) * block
    if stage == 0 and profile.first_parameters > profile.first_whole:
        sent += elements * profile.element_bytes
    if stage == layout.pipeline_parallel_size - 1 and splits_head(job):
        sent += elements * profile.element_bytes + LOSS_SUMS * LOSS_BYTES * micro * profile.positions
    return ring_all_reduce(sent, tensor)


def splits_head(job: Job) -> bool:
    """Return True if tensor ranks split the output head."""
    return job.profile.last_parameters > job.profile.last_whole or job.profile.tied_parameters > 0


def pipeline_bytes(job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int) -> float:
    """Bytes on the pipeline axis: activations forward, their gradients backward, gradients of tied weights."""
    profile, pipeline, chunks = job.profile, layout.pipeline_parallel_size, layout.stages_per_rank
    if pipeline == 1:
        return 0.0
    sends = 2 * chunks - (stage == 0) - (stage == pipeline - 1)
    ties = profile.tied_parameters / layout.tensor_parallel_size if stage in (0, pipeline - 1) else 0
    boundary = micro * profile.boundary_elements * profile.element_bytes
    return sends * microbatches * boundary + ties * job.numbers(layout).gradient
