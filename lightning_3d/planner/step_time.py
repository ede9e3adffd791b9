"""`StepTime`: the seconds of one optimizer step, by cause."""

from dataclasses import dataclass, fields

from lightning_3d.layout import HALVED_BACKWARD, Layout
from lightning_3d.planner.bubble import PassTimes, bubble_time
from lightning_3d.planner.hardware import Accelerator, Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import frozen_share, layers_on_rank, rank_parameters, rank_trained, shards
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.scale import ring_latency, sum_latency
from lightning_3d.planner.wire_bytes import data_bytes, data_calls, tensor_bytes

DATA_OVERLAP = 0.8
"""Share of one microbatch's compute behind which gradients and weights travel."""
PIPELINE_OVERLAP = 0.5
"""Share of pipeline transfers that other microbatches' compute hides."""
SPLIT_COST = 0.03
"""Cost of computing gradients of inputs and of weights separately, as a share of the compute."""
KEPT_PASSES = 6
"""Times that a byte saved for backward crosses the memory bus: written and read by forward and backward."""
WEIGHT_PASSES = 5
"""Times that a microbatch reads a weight (three products) or reads and writes its gradient."""
GRADIENT_PASSES = 3
"""Of those, the ones that a frozen weight does without."""
USUAL_KERNELS = 10
"""Of a GPT's block whose attention is one kernel: four products, two norms, the attention, three that go element by
element. The time to start those is what is known of a device."""
HOST_ADAM_BYTES = 20e9
"""Bytes per second at which the host updates offloaded optimizer states, per device."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step that are spent on each thing, as far as nothing else hides it."""

    compute: float
    traffic: float = 0
    launching: float = 0
    recompute: float = 0
    bubble: float = 0
    tensor: float = 0
    pipeline: float = 0
    data: float = 0
    optimizer: float = 0
    offload: float = 0
    overhead: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def limit(self) -> str:
        """The largest part of the time, in words."""
        name = max((field.name for field in fields(self)), key=lambda name: getattr(self, name))
        return _WORDS[name]


_WORDS = {
    "compute": "matrix products",
    "traffic": "memory bandwidth",
    "launching": "launching kernels (host)",
    "recompute": "memory (recompute)",
    "bubble": "pipeline bubble",
    "tensor": "links (tensor)",
    "pipeline": "links (pipeline)",
    "data": "links (data)",
    "optimizer": "memory bandwidth (optimizer)",
    "offload": "host link (offload)",
    "overhead": "latency and the training loop",
}


def step_time(job: Job, layout: Layout, cluster: Cluster, *, micro: int, microbatches: int) -> StepTime:
    """Seconds of one step of `microbatches` of `micro` samples per data rank."""
    if job.sustained is not None:
        return sustained_step(job, layout, cluster.devices)
    useful, again = compute_seconds(job, layout, cluster, micro)
    traffic, launching = traffic_seconds(job, layout, cluster, micro)
    if splits_backward(layout):
        traffic += SPLIT_COST * useful
    parts = pass_times(job.profile, layout, useful=useful + traffic + launching, again=again)
    bubble = bubble_time(
        layout.schedule,
        stages=layout.pipeline_parallel_size,
        chunks=layout.stages_per_rank,
        times=parts,
        joined=True,
    )
    return StepTime(
        compute=useful * microbatches,
        traffic=traffic * microbatches,
        launching=launching * microbatches,
        recompute=again * microbatches,
        bubble=bubble,
        tensor=tensor_seconds(job, layout, cluster, micro) * microbatches,
        pipeline=pipeline_seconds(job, layout, cluster, micro) * microbatches,
        data=data_seconds(job, layout, cluster, hidden_by=DATA_OVERLAP * useful, microbatches=microbatches),
        optimizer=optimizer_seconds(job, layout, cluster),
        offload=offload_seconds(job, layout, cluster, microbatches),
        overhead=overhead_seconds(job, layout, cluster, microbatches),
    )


def splits_backward(layout: Layout) -> bool:
    """Return True if gradients of weights are computed separately.

    Backwards of recomputed blocks run in one piece (`lightning_3d/pipeline/prove.py`), in the same order.
    """
    return layout.schedule in HALVED_BACKWARD and layout.pipeline_parallel_size > 1 and layout.recompute == "none"


def pass_times(profile: Profile, layout: Layout, *, useful: float, again: float) -> PassTimes:
    """Seconds of each pass of a microbatch on a rank: `useful` ones and `again` seconds of recomputing."""
    unit = useful / profile.passes
    backward, weights = unit * profile.backward_share + again, unit * profile.weight_share
    if layout.schedule in HALVED_BACKWARD and not splits_backward(layout):
        return PassTimes(forward=unit, backward_input=backward + weights, backward_weight=0.0)
    return PassTimes(forward=unit, backward_input=backward, backward_weight=weights)


def sustained_step(job: Job, layout: Layout, devices: int) -> StepTime:
    """A step at a known rate per device: every loss is in that rate already."""
    rate = devices * (job.sustained or 1.0)
    useful = job.profile.model_flops(job.batch) / rate
    return StepTime(compute=useful, recompute=job.profile.hardware_flops(job.batch, layout.recompute) / rate - useful)


def compute_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> tuple[float, float]:
    """Seconds of one microbatch on the busiest rank: useful, and done again."""
    profile, device = job.profile, cluster.accelerator
    rate = device.peak(job.precision) * device.matrix_share * layout.tensor_parallel_size
    pipeline = layout.pipeline_parallel_size
    layers = layers_on_rank(profile.layers, layout)
    forward = max(layers * profile.block_flops, (profile.layers * profile.block_flops + profile.last_flops) / pipeline)
    again = {"none": 0.0, "selective": 3 * profile.attention_flops, "full": profile.block_flops}[layout.recompute]
    return profile.passes * forward * micro / rate, layers * again * micro / rate


def traffic_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> tuple[float, float]:
    """Seconds of one microbatch on the memory bus, and seconds in which the device waits for the host.

    The bus serves small matrices, norms and activations. The longer of the two hides the other.
    """
    profile, device = job.profile, cluster.accelerator
    tensor = layout.tensor_parallel_size
    kept = profile.block_activations(tensor=tensor, sequence_parallel=layout.sequence_parallel, recompute="none")
    passes = WEIGHT_PASSES - GRADIENT_PASSES * frozen_share(profile)
    weights = passes * job.numbers(layout).product * profile.block_parameters / tensor
    layers = layers_on_rank(profile.layers, layout)
    bus = layers * (KEPT_PASSES * kept * micro + weights) / (device.memory_gb_per_s * 1e9)
    launches = launch_seconds(job, layout, device)
    useful, _ = compute_seconds(job, layout, cluster, micro)
    return (bus, 0.0) if bus >= launches - useful else (0.0, launches - useful)


def launch_seconds(job: Job, layout: Layout, device: Accelerator) -> float:
    """Seconds that the host takes to start the kernels of one microbatch. What is outside of blocks runs on any rank of
    a pipeline, as the step's own code does.
    """
    profile = job.profile
    blocks = layers_on_rank(profile.layers, layout) * (profile.block_kernels or USUAL_KERNELS)
    return (blocks + profile.outside_kernels) / USUAL_KERNELS * device.block_launch_us * 1e-6


def tensor_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> float:
    """Seconds of tensor collectives for one microbatch; nothing hides them. Full recompute repeats the forward's."""
    tensor = layout.tensor_parallel_size
    if tensor == 1:
        return 0.0
    ends = {0, layout.pipeline_parallel_size - 1}
    sent = max(tensor_bytes(job, layout, stage=stage, micro=micro) for stage in ends)
    return sent / link_rate(cluster, span=tensor, stride=1)


def tensor_sums(job: Job, layout: Layout) -> float:
    """Sums over tensor ranks for one microbatch, on the busiest rank."""
    again = 1.5 if layout.recompute == "full" else 1
    return again * layers_on_rank(job.profile.layers, layout) * 2 * job.profile.block_regions


def pipeline_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> float:
    """Seconds of stage-to-stage transfers for one microbatch that nothing hides."""
    if layout.pipeline_parallel_size == 1:
        return 0.0
    sent = 2 * layout.stages_per_rank * micro * job.profile.boundary_elements * job.profile.element_bytes
    neighbour = layout.data_parallel_size * layout.tensor_parallel_size
    return (1 - PIPELINE_OVERLAP) * sent / link_rate(cluster, span=2, stride=neighbour)


def data_seconds(job: Job, layout: Layout, cluster: Cluster, *, hidden_by: float, microbatches: int) -> float:
    """Seconds of gradient and weight collectives that compute does not hide."""
    ranks = layout.data_parallel_size
    if ranks == 1:
        return 0.0
    sent = data_bytes(job, layout, stage=0, microbatches=microbatches)
    stride = layout.tensor_parallel_size
    latency = ring_latency if layout.zero_stage else sum_latency
    waits = data_calls(job, layout, microbatches=microbatches) * latency(cluster, span=ranks, stride=stride)
    seconds = sent / link_rate(cluster, span=ranks, stride=stride) + waits
    reduces = microbatches if layout.zero_stage >= 2 and layout.pipeline_parallel_size == 1 else 1
    return max(0.0, seconds - hidden_by * reduces)


def optimizer_seconds(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds to read and write every state that this rank updates."""
    if layout.offload != "none":
        return 0.0
    per = job.per_parameter
    touched = updated_parameters(job, layout) * (2 * per.optimizer + per.gradients + per.weights)
    return touched / (cluster.accelerator.memory_gb_per_s * 1e9)


def offload_seconds(job: Job, layout: Layout, cluster: Cluster, microbatches: int) -> float:
    """Seconds to move gradients and weights over the host link, and to update on the host."""
    if layout.offload == "none":
        return 0.0
    per, link = job.per_parameter, cluster.accelerator.host_link_gb_per_s * 1e9
    updated = updated_parameters(job, layout)
    passes = 2 * microbatches if layout.offload == "all" else 1
    held = rank_parameters(job.profile, layout, 0) / shards(layout)
    moved = updated * per.gradients + held * passes * per.weights
    return moved / link + updated * 2 * per.optimizer / HOST_ADAM_BYTES


def overhead_seconds(job: Job, layout: Layout, cluster: Cluster, microbatches: int) -> float:
    """Seconds of the training loop itself, and of what is started, however little it sends or computes."""
    tensor, seconds = layout.tensor_parallel_size, cluster.accelerator.step_us * 1e-6
    if tensor > 1:
        sums = tensor_sums(job, layout) * microbatches
        ring = ring_latency(cluster, span=tensor, stride=1)  # sequence parallelism gathers and scatters instead
        seconds += sums * (2 * ring if layout.sequence_parallel else sum_latency(cluster, span=tensor, stride=1))
    if layout.pipeline_parallel_size > 1:
        neighbour = layout.data_parallel_size * tensor
        hop = ring_latency(cluster, span=2, stride=neighbour)
        seconds += 2 * (layout.pipeline_parallel_size - 1 + layout.stages_per_rank * microbatches) * hop
    return seconds


def updated_parameters(job: Job, layout: Layout) -> float:
    """Trained parameters whose optimizer states this rank owns."""
    return rank_trained(job.profile, layout, 0) / shards(layout)


def link_rate(cluster: Cluster, *, span: int, stride: int) -> float:
    """Bytes per second that one rank sends on a ring of `span` ranks `stride` apart.

    A ring that stays in a node uses the node's links. One that crosses nodes leaves a node once per group of its
    members there, so its members share their network cards.
    """
    device, per_node = cluster.accelerator, cluster.domain
    node = device.node_link_gb_per_s * 1e9 * device.link_share
    if span * stride <= per_node:
        return node
    members = max(1, per_node // stride)
    return min(node, device.cluster_link_gb_per_s * 1e9 * device.link_share * members)
