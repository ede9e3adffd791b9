"""`RankMemory`: what one rank of a layout holds at its peak."""

from dataclasses import dataclass, fields
from math import ceil

from lightning_3d.layout import Layout
from lightning_3d.planner.activations import microbatches_held
from lightning_3d.planner.job import Job
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.states import StateBytes, sharded_states


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    """Logits and what the loss keeps."""
    buffers: float
    """Received activations and gradients of the pipeline, gathered weights of ZeRO 3 and offload."""
    reserved: float
    """Driver, communication library, fragmentation."""
    host: float = 0
    """In host memory, where something is offloaded; not part of the total."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")


def rank_parameters(profile: Profile, layout: Layout, stage: int) -> float:
    """Parameters that one tensor rank of pipeline rank `stage` computes with."""
    pipeline, tensor = layout.pipeline_parallel_size, layout.tensor_parallel_size
    blocks = layers_on_rank(profile.layers, layout)
    split = (profile.block_parameters - profile.whole_parameters) / tensor
    parameters = blocks * (split + profile.whole_parameters)
    if stage == 0:
        parameters += profile.first_parameters / tensor
    if stage == pipeline - 1:
        parameters += (profile.last_parameters + (profile.tied_parameters if pipeline > 1 else 0)) / tensor
    return parameters


def layers_on_rank(layers: int, layout: Layout) -> int:
    """Most blocks that a pipeline rank holds."""
    return ceil(layers / layout.num_stages) * layout.stages_per_rank


def rank_memory(job: Job, layout: Layout, *, stage: int, micro: int, microbatches: int, reserved: float) -> RankMemory:
    """What a rank of pipeline rank `stage` holds, with `microbatches` of `micro` samples."""
    profile = job.profile
    parameters = rank_parameters(profile, layout, stage)
    states = resident_states(job.per_parameter, parameters, layout)
    kept, host = offloaded(states, layout)
    last = stage == layout.pipeline_parallel_size - 1
    return RankMemory(
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        activations=stage_activations(profile, layout, stage=stage, micro=micro, microbatches=microbatches),
        head=profile.last_bytes * micro / layout.tensor_parallel_size if last else 0,
        buffers=receive_buffers(profile, layout, stage=stage, micro=micro) + gathered_weights(job, layout),
        reserved=reserved,
        host=host,
    )


def resident_states(per_parameter: StateBytes, parameters: float, layout: Layout) -> StateBytes:
    """States at the peak. Under a pipeline, weights are gathered and gradients reduced once per step, so that stages 2
    and 3 hold as much as stage 1 there."""
    stage = 3 if layout.offload == "all" else layout.zero_stage
    if layout.pipeline_parallel_size > 1:
        stage = min(layout.zero_stage, 1)
    ranks = layout.zero_shard_size or layout.data_parallel_size
    return sharded_states(per_parameter, parameters, stage=stage, ranks=ranks)  # type: ignore[arg-type]


def offloaded(states: StateBytes, layout: Layout) -> tuple[StateBytes, float]:
    """What stays on the device, and how many bytes go to the host. A pipeline keeps weights gathered and gradients
    whole for its step, so that only the optimizer can leave it."""
    if layout.offload == "none":
        return states, 0.0
    if layout.pipeline_parallel_size > 1:
        return StateBytes(weights=states.weights, gradients=states.gradients, optimizer=0), states.optimizer
    return StateBytes(weights=0, gradients=0, optimizer=0), states.total


def stage_activations(profile: Profile, layout: Layout, *, stage: int, micro: int, microbatches: int) -> float:
    """Bytes kept for backward at the peak. Full recompute also holds one block's activations while it does it again."""
    tensor, split = layout.tensor_parallel_size, layout.sequence_parallel
    block = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute=layout.recompute) * micro
    held = microbatches_held(
        layout.schedule,
        stages=layout.pipeline_parallel_size,
        chunks=layout.stages_per_rank,
        microbatches=microbatches,
    )
    if layout.pipeline_parallel_size == 1:
        held = 1
    elif stage and layout.schedule in ("1f1b", "interleaved_1f1b"):
        held = max(1, min(microbatches, held - stage))
    again = profile.block_activations(tensor=tensor, sequence_parallel=split, recompute="none") * micro
    return block * layers_on_rank(profile.layers, layout) * held + (again if layout.recompute == "full" else 0)


def receive_buffers(profile: Profile, layout: Layout, *, stage: int, micro: int) -> float:
    """One microbatch on its way in each direction of each virtual stage: a buffer is taken when its receive starts.
    (torch's own `PipelineStage` takes one per microbatch for the whole step.)"""
    pipeline, chunks = layout.pipeline_parallel_size, layout.stages_per_rank
    if pipeline == 1:
        return 0.0
    directions = 2 * chunks - (stage == 0) - (stage == pipeline - 1)
    return directions * micro * profile.boundary_elements * profile.element_bytes


def gathered_weights(job: Job, layout: Layout) -> float:
    """Two blocks' whole weights and gradients, which pass through a device that keeps only shards."""
    streamed = layout.offload == "all" or layout.zero_stage == 3
    if not streamed or layout.pipeline_parallel_size > 1:
        return 0.0
    profile, per = job.profile, job.per_parameter
    largest = max(profile.block_parameters, profile.first_parameters, profile.last_parameters)
    return 2 * largest / layout.tensor_parallel_size * (per.weights + per.gradients)
