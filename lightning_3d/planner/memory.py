"""`PlannedMemory`: the memory of one rank of a layout at its peak."""

from dataclasses import dataclass, fields, replace

from lightning_3d.layout import LARGE_LOGITS, LOGITS_PART, SCHEDULES, Layout
from lightning_3d.planner.formulas import microbatches_held
from lightning_3d.planner.job import Job, Options
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.states import StateBytes

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
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")


def last_rank(layout: Layout) -> int:
    """The pipeline rank that owns what comes after the blocks: the first one of a V."""
    return 0 if SCHEDULES[layout.schedule].v_shaped else layout.pipeline_parallel_size - 1


def tied_copy(profile: Profile, layout: Layout) -> float:
    """Elements of the tied parameters that the last stage needs again: none where one rank has both ends."""
    return profile.tied_parameters if last_rank(layout) else 0.0


def rank_parameters(profile: Profile, layout: Layout, stage: int) -> float:
    """Parameters that one tensor rank of pipeline rank `stage` computes with."""
    tensor = layout.tensor_parallel_size
    parameters = layers_on_rank(profile.layers, layout, stage) * _in_block(profile, tensor)
    if stage == 0:
        parameters += (profile.first_parameters - profile.first_whole) / tensor + profile.first_whole
    if stage == last_rank(layout):
        words = profile.last_parameters - profile.last_whole + tied_copy(profile, layout)
        parameters += words / tensor + profile.last_whole
    return parameters + _padding(profile, layout, stage)


def _padding(profile: Profile, layout: Layout, stage: int) -> float:
    """Elements that fill up parameters whose rows the data ranks do not divide: in shards and in messages of ZeRO."""
    last = stage == last_rank(layout)
    present = {"first": stage == 0, "block": layers_on_rank(profile.layers, layout, stage), "last": last}
    filled = sum(present[place] * size * (-rows % shards(layout)) / rows for place, rows, size in profile.rows)
    return filled / layout.tensor_parallel_size


def rank_trained(profile: Profile, layout: Layout, stage: int) -> float:
    """Of those, the ones that have gradients. (A tied copy has none where as much before the blocks is frozen.)"""
    tensor = layout.tensor_parallel_size
    frozen = layers_on_rank(profile.layers, layout, stage) * _in_block(profile, tensor) * profile.frozen_share
    if stage == 0:
        frozen += profile.first_frozen / tensor
    if stage == last_rank(layout):
        frozen += (profile.last_frozen + min(tied_copy(profile, layout), profile.first_frozen)) / tensor
    return rank_parameters(profile, layout, stage) - frozen


def gathered_bytes(job: Job, layout: Layout, stage: int) -> float:
    """Bytes of the weights of a rank in full, as they are gathered for a step."""
    profile, numbers = job.profile, job.numbers(layout)
    tensor, half = layout.tensor_parallel_size, layers_on_rank(profile.layers, layout, stage) * _half(job, layout)
    if stage == 0:
        half += profile.first_half
    if stage == last_rank(layout):
        half += profile.last_half / (tensor if profile.last_parameters > profile.last_whole else 1)
    absent = absent_experts(job, layout, stage)
    present = rank_parameters(profile, layout, stage) - absent
    return numbers.gathered * present - (numbers.gathered - numbers.half) * (half - absent)


def absent_experts(job: Job, layout: Layout, stage: int) -> float:
    """Parameters of experts that other expert ranks own."""
    share, layers = 1 - 1 / job.options.experts, layers_on_rank(job.profile.layers, layout, stage)
    return share * layers * job.profile.expert_parameters / layout.tensor_parallel_size


def block_bytes(job: Job, layout: Layout) -> float:
    """Bytes of the gathered weights of one block."""
    numbers, half = job.numbers(layout), _half(job, layout)
    absent = (1 - 1 / job.options.experts) * job.profile.expert_parameters / layout.tensor_parallel_size
    vectors = job.profile.block_parameters - job.profile.half_parameters
    return numbers.half * (half - absent) + numbers.gathered * vectors


def _half(job: Job, layout: Layout) -> float:
    """Parameters of products in one block on a tensor rank. Norms are unsplit."""
    profile = job.profile
    return _in_block(profile, layout.tensor_parallel_size) - (profile.block_parameters - profile.half_parameters)


def _in_block(profile: Profile, tensor: int) -> float:
    """Parameters of one block on one of `tensor` ranks."""
    return (profile.block_parameters - profile.whole_parameters) / tensor + profile.whole_parameters


def cast_bytes(job: Job, layout: Layout, *, stage: int, microbatches: int) -> float:
    """Bytes of the 16-bit copies of matrices that autocast makes. Each microbatch keeps its own until its backward.

    Full recompute makes those of a block again, so that one block has some at a time.
    """
    profile, numbers = job.profile, job.numbers(layout)
    in_half = numbers.half < numbers.gathered
    flying = held_microbatches(layout, stage, microbatches)
    kept = layers_on_rank(profile.layers, layout, stage) * flying
    blocks = 1 + (1 - job.options.recomputed) * (kept - 1) if layout.recompute == "full" else kept
    matrices = 0.0 if in_half else blocks * profile.matrix_parameters
    if stage == last_rank(layout):
        head = profile.last_parameters - profile.last_whole - (profile.last_half if in_half else 0)
        matrices += (max(0.0, head) + profile.tied_parameters) * flying
    return numbers.cast * matrices / layout.tensor_parallel_size


def layers_on_rank(layers: int, layout: Layout, stage: int | None = None) -> int:
    """Blocks of pipeline rank `stage`, by default of the one with most."""
    ranks = layout.stages if stage is None else (layout.stages[stage],)
    return max(sum(layers_on_stage(layers, layout, virtual) for virtual in own) for own in ranks)


def layers_on_stage(layers: int, layout: Layout, virtual: int) -> int:
    """Blocks of virtual stage `virtual`. Early stages have one more where the number does not divide."""
    least, more = divmod(layers, len(layout.stages) * len(layout.stages[0]))
    return least + (virtual < more)


def rank_memory(
    job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int, reserved: float
) -> PlannedMemory:
    """The memory of a rank of pipeline rank `stage` at its peak, with `microbatches` of `micro` samples.

    The peak is at one of two times. At the end of the last forward all activations exist. At the end of the last
    backward all gradients exist, and the temporaries of one block's gradients or of its update.
    """
    kept, host = offloaded(states_in_step(job, layout, stage, microbatches), layout, job.options)
    states = PlannedMemory(**vars(kept), reserved=reserved, host=host)
    temporary = gathered_weights(job, layout, backward=True) + _block_gradients(job, layout)
    after_forward = _after_forward(job, layout, states, stage=stage, micro=micro, microbatches=microbatches)
    return max(after_forward, replace(states, buffers=temporary), key=lambda memory: memory.total)


def _after_forward(
    job: Job, layout: Layout, states: PlannedMemory, *, stage: int, micro: int, microbatches: int
) -> PlannedMemory:
    profile, host, gradients = job.profile, states.host, states.gradients
    last = stage == last_rank(layout)
    activations = stage_activations(job, layout, stage=stage, micro=micro, microbatches=microbatches)
    if job.options.offload == "activations":
        activations, host = 2 * activations / layers_on_rank(profile.layers, layout), host + activations
    buffers = receive_buffers(profile, layout, stage=stage, micro=micro) + gathered_weights(job, layout)
    head, loss = head_bytes(job, layout, micro) if last else (0.0, 0.0)
    if streams_weights(layout):
        # or a moment later: the old gradients are dropped, the next block is gathered and one has new gradients
        first_backward = 2 * _block_gradients(job, layout)
        gradients, buffers = max((gradients, buffers), (0.0, buffers + first_backward), key=sum)
    if layout.pipeline_parallel_size > 1:
        buffers += FRESH_GRADIENTS * _block_gradients(job, layout)
        if held_microbatches(layout, stage, microbatches) >= microbatches:
            # the first gradients come with the first activations gone
            later = activations * (1 - 1 / microbatches) + gradients
            activations, gradients = (activations, 0.0) if activations > later else (later - gradients, gradients)
    elif microbatches > 1:  # backward begins with the loss, beside the gradients of earlier microbatches
        head += loss
    elif loss > gradients:  # backward begins with the loss, and the gradients of the step before are dropped
        head, gradients = head + loss, 0.0
    casts = cast_bytes(job, layout, stage=stage, microbatches=microbatches)
    return replace(
        states, gradients=gradients, activations=activations, head=head, casts=casts, buffers=buffers, host=host
    )


def head_bytes(job: Job, layout: Layout, micro: int) -> tuple[float, float]:
    """Bytes that are saved after the blocks, and more at the peak of the loss. Large logits exist in parts alone."""
    profile, tensor = job.profile, layout.tensor_parallel_size
    saved, loss = profile.last_bytes * micro / tensor, profile.loss_bytes * micro / tensor
    if not in_parts(job, layout, micro):
        return saved, loss
    sums = 4 * (profile.tied_parameters or profile.last_parameters - profile.last_whole) / tensor
    return max(0.0, saved - 4 * profile.logits * micro / tensor), LOGITS_IN_USE * LOGITS_PART + sums


def in_parts(job: Job, layout: Layout, micro: int) -> bool:
    """Return True if the loss is computed from parts of the logits."""
    logits = job.profile.logits * micro / layout.tensor_parallel_size
    return logits * job.numbers(layout).product >= LARGE_LOGITS


def _block_gradients(job: Job, layout: Layout) -> float:
    trained = job.profile.block_parameters - job.profile.block_frozen
    return trained / layout.tensor_parallel_size * job.per_parameter.gradients


def _whole_states(job: Job, layout: Layout, stage: int) -> StateBytes:
    return job.states(rank_parameters(job.profile, layout, stage), rank_trained(job.profile, layout, stage))


def shards(layout: Layout) -> int:
    """Data ranks among which states are divided; 1 where nothing is."""
    ranks = layout.zero_shard_size or layout.data_parallel_size
    return ranks if layout.zero_stage else 1


def streams_weights(layout: Layout) -> bool:
    """Return True if full weights exist only block by block. A pipeline gathers them once for its step."""
    return layout.zero_stage == 3 and shards(layout) > 1 and layout.pipeline_parallel_size == 1


def states_in_step(job: Job, layout: Layout, stage: int, microbatches: int) -> StateBytes:
    """The states when backward begins, and when it ends. Stages 1 and 2 have gathered weights and their shards.

    Gradients are those of the step before, or those of earlier microbatches. Each block's are reduced and freed when
    they are computed, or once in a step if they accumulate.
    """
    whole, ranks = _whole_states(job, layout, stage), shards(layout)
    present = whole.gradients - job.per_parameter.gradients * absent_experts(job, layout, stage)
    gradients = present if accumulates(layout, microbatches) else whole.gradients / ranks
    return StateBytes(weights=_weights(job, layout, stage), gradients=gradients, optimizer=whole.optimizer / ranks)


def accumulates(layout: Layout, microbatches: int) -> bool:
    """Return True if a rank adds up gradients of several microbatches before it reduces them."""
    return layout.pipeline_parallel_size > 1 or (layout.zero_stage <= 1 and microbatches > 1)


def states_between_steps(job: Job, layout: Layout, stage: int) -> StateBytes:
    """Weights and optimizer states between steps, and gradients when the optimizer steps: those of a dry run."""
    return _whole_states(job, layout, stage).of(1 / shards(layout))


def _weights(job: Job, layout: Layout, stage: int) -> float:
    """Bytes of shards, and of gathered weights."""
    sharded = _whole_states(job, layout, stage).weights / shards(layout)
    if shards(layout) == 1:
        return sharded - job.per_parameter.weights * absent_experts(job, layout, stage)
    if streams_weights(layout):
        return sharded
    return sharded + gathered_bytes(job, layout, stage)


def offloaded(states: StateBytes, layout: Layout, options: Options = Options()) -> tuple[StateBytes, float]:  # noqa: B008
    """The states that stay on the device, and the bytes in host memory.

    A pipeline has gathered weights and full gradients for its step, so that only the optimizer can leave it.
    """
    if layout.offload == "none" and options.offload != "optimizer":
        return states, 0.0
    if layout.pipeline_parallel_size > 1 or options.offload == "optimizer":
        return states.times(1, 1, 0), states.optimizer
    return states.of(0), states.total


def held_microbatches(layout: Layout, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a pipeline rank has at once: one without a pipeline."""
    if layout.pipeline_parallel_size == 1:
        return 1
    held = microbatches_held(
        layout.schedule,
        stages=layout.pipeline_parallel_size,
        chunks=layout.stages_per_rank,
        microbatches=microbatches,
    )
    fewer = SCHEDULES[layout.schedule].fewer_on_later_ranks
    return max(1, min(microbatches, held - stage)) if stage and fewer else held


def stage_activations(job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int) -> float:
    """Bytes saved for backward at the peak. Recompute has those of one block while it computes them again."""
    tensor, split, profile = layout.tensor_parallel_size, layout.sequence_parallel, job.profile
    block = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute=layout.recompute) * micro
    flying = held_microbatches(layout, stage, microbatches)
    blocks, first = (
        layers_on_rank(profile.layers, layout, stage) * flying,
        0.0 if stage else profile.first_bytes * micro,
    )
    if layout.recompute == "none":
        return block * blocks + first * flying
    unsaved = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute="none") * micro
    if layout.recompute == "selective":
        again = max(0.0, unsaved - block + profile.region_bytes * micro)
        return block * blocks + again + first * flying
    share = job.options.recomputed
    return blocks * (share * block + (1 - share) * unsaved) + (unsaved if share else 0) + first * flying


def receive_buffers(profile: Profile, layout: Layout, *, stage: int, micro: int) -> float:
    """One microbatch on its way in each direction of each virtual stage: a buffer is taken when its receive starts.
    (torch's own `PipelineStage` takes one per microbatch for the whole step.)"""
    return transfers(layout, stage) * micro * profile.boundary_elements * profile.element_bytes


def transfers(layout: Layout, stage: int) -> int:
    """Sends, and as many receives, of a pipeline rank for each microbatch. Stages of one rank exchange nothing."""
    own, count = layout.stages[stage], len(layout.stages) * len(layout.stages[0])
    next_to = (near for virtual in own for near in (virtual - 1, virtual + 1))
    return sum(0 <= near < count and near not in own for near in next_to)


def gathered_weights(job: Job, layout: Layout, *, backward: bool = False) -> float:
    """Bytes of full weights on a device that has only shards: of a block and the head, or of two blocks in backward."""
    if not streams_weights(layout) and (layout.offload == "none" or layout.pipeline_parallel_size > 1):
        return 0.0
    profile, numbers = job.profile, job.numbers(layout)
    freed = layout.zero_stage == 3
    head = profile.last_freed if freed and backward else 0.0
    outside = profile.first_parameters + profile.last_parameters - (profile.first_freed if freed else 0.0) - head
    half = profile.first_half + (0 if head else profile.last_half)
    rest = (numbers.gathered * outside - (numbers.gathered - numbers.half) * half) / layout.tensor_parallel_size
    return (1 + backward) * block_bytes(job, layout) + rest
