"""`StepTime`: the seconds of one optimizer step, by cause."""

from dataclasses import dataclass, fields
from functools import cache
from math import ceil, log2

from lightning_3d.layout import HALVED_BACKWARD, Layout, PassTimes, Schedule
from lightning_3d.optim.state_bytes import Precision
from lightning_3d.pipeline.stage_costs import bubble_time
from lightning_3d.tools.planner import wire_bytes
from lightning_3d.tools.planner.hardware import Accelerator, Cluster
from lightning_3d.tools.planner.job import Job, Options
from lightning_3d.tools.planner.memory import in_parts, layers_on_rank, rank_parameters, rank_trained, stage_activations
from lightning_3d.tools.planner.profile import Profile

DATA_OVERLAP = 0.8
"""Share of one microbatch's compute behind which gradients and weights travel."""
CROWDING = 0.3
"""Share of their time that hidden collectives take from products, with which they share processors and memory."""
PIPELINE_OVERLAP = 0.8
"""Share of pipeline transfers that other microbatches' compute hides."""
SPLIT_COST = 0.03
"""Cost of computing gradients of inputs and of weights separately, as a share of the compute."""
KEPT_PASSES = 10
"""Times that a byte saved for backward crosses the memory bus: products, norms and sums write and read it."""
WEIGHT_PASSES = 5
"""Times that a microbatch reads a weight (three products) or reads and writes its gradient."""
LOSS_PASSES = 3
"""Times that logits and the loss cross the memory bus, over their bytes at the peak."""
ROUTED_PASSES = 16
"""Times that what is sent to experts crosses the bus: it is put in order for ranks, then for experts, and back, forward
and backward, as the dispatcher of Megatron-LM does (`moe/token_dispatcher.py`). Each reads and writes."""
DEPTH = 556
"""Width of a product that takes as long as its start and its end: FP8 products in groups reach 1,297 TFLOP/s where they
sum over 7,168 numbers, 1,099 over 2,048 (DeepGEMM on H800)."""
USUAL_DEPTH = 8192
"""Width at which a product reaches `matrix_share`, and tokens over which gradients of weights are summed."""
GRADIENT_PASSES = 3
"""Of those, the ones that a frozen weight does without."""
USUAL_KERNELS = 10
"""Of a GPT's block whose attention is one kernel: four products, two norms, the attention, three that go element by
element. The time to start those is what is known of a device."""
ROUTER_KERNELS = 20
"""Of a router, and of putting tokens in order for experts and back."""
EXPERT_KERNELS = 3
"""Of one expert: its products, and the activation between them."""
FP8_KERNELS = 12
"""More of one expert in fp8: two products cast inputs and weights, each also transposed, with a maximum before."""
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
    "compute": "products",
    "traffic": "memory bus",
    "launching": "host (kernels)",
    "recompute": "recompute",
    "bubble": "bubble",
    "tensor": "links (tensor)",
    "pipeline": "links (pipe)",
    "data": "links (data)",
    "optimizer": "optimizer",
    "offload": "host link",
    "overhead": "latency",
}


def step_time(job: Job, layout: Layout, cluster: Cluster, *, micro: int, microbatches: int) -> StepTime:
    """Seconds of one step of `microbatches` of `micro` samples per data rank."""
    if job.sustained is not None:
        return sustained_step(job, layout, cluster.devices)
    useful, again = compute_seconds(job, layout, cluster, micro)
    traffic, launching = traffic_seconds(job, layout, cluster, micro)
    if layout.splits_backward:
        traffic += SPLIT_COST * useful
    parts = pass_times(job.profile, layout, useful=useful + traffic + launching, again=again)
    bubble = bubble_time(
        layout.schedule, stages=layout.pipeline_parallel_size, chunks=layout.stages_per_rank, times=parts, joined=True
    )
    return StepTime(
        compute=useful * microbatches,
        traffic=traffic * microbatches,
        launching=launching * microbatches,
        recompute=again * microbatches,
        bubble=bubble,
        tensor=tensor_seconds(job, layout, cluster, micro) * microbatches,
        pipeline=pipeline_seconds(job, layout, cluster, micro) * microbatches,
        data=data_seconds(job, layout, cluster, busy=useful + again + traffic, microbatches=microbatches),
        optimizer=optimizer_seconds(job, layout, cluster),
        offload=offload_seconds(job, layout, cluster, micro=micro, microbatches=microbatches, busy=useful),
        overhead=overhead_seconds(job, layout, cluster, microbatches),
    )


def least_seconds(job: Job, layout: Layout, cluster: Cluster, *, micro: int, microbatches: int) -> float:
    """Seconds below which no recompute, ZeRO stage or offload brings a step of `layout`, which has none of them."""
    if job.sustained is not None:
        return sustained_step(job, layout, cluster.devices).compute
    shape = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.schedule, layout.stages_per_rank)
    alike = (job.profile, job.options, job.precision), cluster.accelerator, cluster.domain
    each, idle = _least_microbatch(*alike, shape, layout.sequence_parallel, micro)
    each += pipeline_seconds(job, layout, cluster, micro)
    return each * microbatches + idle + overhead_seconds(job, layout, cluster, microbatches)


@cache
def _least_microbatch(
    what: tuple[Profile, Options, Precision],
    device: Accelerator,
    domain: int,
    shape: tuple[int, int, Schedule, int],
    sequence: bool,
    micro: int,
) -> tuple[float, float]:
    """Seconds of a microbatch, and idle ones of a step. A search of many clusters asks for the same ones on each."""
    job = Job(profile=what[0], options=what[1], precision=what[2], samples=1, batch=1)
    cluster = Cluster(accelerator=device, nodes=1, devices_per_node=domain)
    layout = Layout(
        tensor_parallel_size=shape[0],
        pipeline_parallel_size=shape[1],
        schedule=shape[2],
        stages_per_rank=shape[3],
        sequence_parallel=sequence,
    )
    busy = compute_seconds(job, layout, cluster, micro)[0] + sum(traffic_seconds(job, layout, cluster, micro))
    ranks, halved = layout.pipeline_parallel_size, layout.schedule in HALVED_BACKWARD
    times = pass_times(job.profile, layout, useful=busy, again=0.0)
    # the idle time of a halved backward may shrink where another part of it takes longer
    idle = 0.0 if halved else bubble_time(layout.schedule, stages=ranks, chunks=layout.stages_per_rank, times=times)
    return busy + tensor_seconds(job, layout, cluster, micro), idle


def pass_times(profile: Profile, layout: Layout, *, useful: float, again: float) -> PassTimes:
    """Seconds of each pass of a microbatch on a rank: `useful` ones and `again` seconds of recomputing."""
    unit = useful / profile.passes
    backward, weights = unit * profile.backward_share + again, unit * profile.weight_share
    if layout.schedule in HALVED_BACKWARD and not layout.splits_backward:
        return PassTimes(forward=unit, backward_input=backward + weights, backward_weight=0.0)
    return PassTimes(forward=unit, backward_input=backward, backward_weight=weights)


def sustained_step(job: Job, layout: Layout, devices: int) -> StepTime:
    """A step at a known rate per device: every loss is in that rate already."""
    rate = devices * (job.sustained or 1.0)
    useful = job.profile.model_flops(job.batch) / rate
    all_flops = job.profile.hardware_flops(job.batch, layout.recompute, job.options.recomputed)
    return StepTime(compute=useful, recompute=all_flops / rate - useful)


def compute_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> tuple[float, float]:
    """Seconds of products of one microbatch on the busiest rank: useful, and done again."""
    profile, device, pipeline = job.profile, cluster.accelerator, layout.pipeline_parallel_size
    share = device.matrix_share * layout.tensor_parallel_size / micro
    rate = device.peak(job.precision) * share
    slower = device.matrix_share / (device.attention_share or device.matrix_share)
    core = slower * profile.attention_flops / rate
    products = profile.block_flops - profile.attention_flops + profile.expert_flops * (grouping(job) - 1)
    block = core + products / (device.fp8 * share if job.options.fp8 else rate)
    layers, head = layers_on_rank(profile, layout), profile.last_flops / rate
    if in_parts(job, layout, micro):  # backward multiplies once more
        head *= 1 + 1 / profile.passes
    ends = layers_on_rank(profile, layout, layout.last_rank) * block + head
    moved = max((layers + 1) * block, (profile.layers * block + head) / pipeline)  # a block of the last rank, elsewhere
    forward = max(layers * block, min(ends, moved))
    share, core_again = job.recomputed(layout), slower * profile.attention_again / rate
    return profile.passes * forward, layers * (share * block + (1 - share) * core_again)


def grouping(job: Job) -> float:
    """Time of products of experts over that of large ones: two of three passes sum over their own small widths."""
    slower = (2 * (1 + DEPTH / job.profile.expert_depth) / (1 + DEPTH / USUAL_DEPTH) + 1) / 3
    return slower * job.options.imbalance if job.options.experts > 1 else slower


def traffic_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> tuple[float, float]:
    """Seconds of one microbatch on the memory bus, and seconds in which the device waits for the host.

    The bus serves small matrices, norms and activations. The longer of the two hides the other.
    """
    profile, device = job.profile, cluster.accelerator
    tensor = layout.tensor_parallel_size
    kept = profile.block_activations(tensor=tensor, sequence_parallel=profile.divides(layout), recompute="none")
    passes = WEIGHT_PASSES - GRADIENT_PASSES * profile.frozen_share
    present = profile.block_parameters - (1 - 1 / job.options.experts) * profile.expert_parameters
    weights = passes * job.numbers(layout).product * present / tensor
    layers = layers_on_rank(profile, layout)
    again = job.recomputed(layout)
    if layout.recompute == "selective":  # all but products and attention
        again = 1 - min(1.0, profile.kept_bytes / (profile.whole_bytes + profile.split_bytes + profile.attention_bytes))
    crossings = KEPT_PASSES * (1 + again / 3)
    around = profile.first_bytes + profile.last_bytes + profile.loss_bytes
    outside = LOSS_PASSES * around * micro / tensor / layout.pipeline_parallel_size
    routed = ROUTED_PASSES * profile.routed_elements * job.numbers(layout).product / tensor
    bus = (layers * ((crossings * kept + routed) * micro + weights) + outside) / (device.memory_gb_per_s * 1e9)
    launches = launch_seconds(job, layout, device)
    useful, _ = compute_seconds(job, layout, cluster, micro)
    return (bus, 0.0) if bus >= launches - useful else (0.0, launches - useful)


def launch_seconds(job: Job, layout: Layout, device: Accelerator) -> float:
    """Seconds that the host takes to start the kernels of one microbatch. What is outside of blocks runs on any rank of
    a pipeline, as the step's own code does.
    """
    profile, each = job.profile, EXPERT_KERNELS + FP8_KERNELS * job.options.fp8
    experts = profile.expert_count / job.options.experts
    usual = USUAL_KERNELS + (ROUTER_KERNELS + each * experts if experts else 0)
    blocks = layers_on_rank(profile, layout) * (profile.block_kernels or usual)
    return (blocks + profile.outside_kernels) / USUAL_KERNELS * device.block_launch_us * 1e-6


def tensor_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> float:
    """Seconds of tensor, context and expert collectives for one microbatch. Nothing hides them, except DualPipe."""
    tensor, context = layout.tensor_parallel_size, job.options.context
    sent = (
        max(wire_bytes.tensor_bytes(job, layout, stage=end, micro=micro) for end in layout.ends) if tensor > 1 else 0.0
    )
    keys, routed = (each(job, layout, micro=micro) for each in (wire_bytes.exchange_bytes, wire_bytes.routed_bytes))
    routed *= job.options.imbalance
    seconds = keys / link_rate(cluster, span=context, stride=tensor) + routed / expert_rate(job, layout, cluster)
    return sent / link_rate(cluster, span=tensor, stride=1) + layers_on_rank(job.profile, layout) * seconds


def expert_rate(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Bytes per second that one rank sends to experts. A token goes to another node once, however many it has there."""
    device, reach = cluster.accelerator, max(1, cluster.domain // layout.tensor_parallel_size)
    nodes = max(1.0, job.options.experts / reach)
    copies = max(1.0, job.profile.routed_elements / max(1.0, job.profile.boundary_elements))
    crossing = nodes * (1 - (1 - 1 / nodes) ** copies) / copies * (1 - 1 / nodes)
    seconds = max(1 / device.node_link_gb_per_s, crossing / device.cluster_link_gb_per_s)
    hidden = CROWDING if layout.schedule == "dualpipev" else 1.0
    return 1e9 * device.link_share / seconds / hidden


def tensor_sums(job: Job, layout: Layout) -> float:
    """Sums over tensor ranks for one microbatch, on the busiest rank."""
    sums = 2 * job.profile.block_regions + job.recomputed(layout) * job.profile.repeated_sums
    return layers_on_rank(job.profile, layout) * sums


def pipeline_seconds(job: Job, layout: Layout, cluster: Cluster, micro: int) -> float:
    """Seconds of stage-to-stage transfers for one microbatch that nothing hides."""
    if not layout.pipelined:
        return 0.0
    sent = 2 * layout.stages_per_rank * micro * job.profile.boundary_elements * job.profile.element_bytes
    neighbour = layout.data_parallel_size * layout.tensor_parallel_size
    return (1 - PIPELINE_OVERLAP) * sent / link_rate(cluster, span=2, stride=neighbour)


def data_seconds(job: Job, layout: Layout, cluster: Cluster, *, busy: float, microbatches: int) -> float:
    """Seconds of gradient and weight collectives that compute does not hide, or that they take from it.

    `busy` is the time of one microbatch behind which they travel.
    """
    ranks, group, stride = layout.data_parallel_size, layout.shards, layout.tensor_parallel_size
    if ranks == 1:
        return 0.0
    inside = group if group > 1 else ranks
    within, between = wire_bytes.data_parts(job, layout, stage=0, microbatches=microbatches)
    latency = ring_latency if layout.zero_stage else sum_latency
    waits = wire_bytes.data_calls(job, layout, microbatches=microbatches) * latency(cluster, span=inside, stride=stride)
    sent = within / link_rate(cluster, span=inside, stride=stride)
    sent += between / link_rate(cluster, span=ranks // inside, stride=stride * inside)
    return max(sent + waits - DATA_OVERLAP * busy * wire_bytes.reductions(layout, microbatches), CROWDING * sent)


def optimizer_seconds(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds to read and write every state that this rank updates."""
    if layout.offload != "none" or job.options.offload == "optimizer":
        return 0.0
    per = job.per_parameter
    touched = updated_parameters(job, layout) * (2 * per.optimizer + per.gradients + per.weights)
    return touched / (cluster.accelerator.memory_gb_per_s * 1e9)


def offload_seconds(job: Job, layout: Layout, cluster: Cluster, *, micro: int, microbatches: int, busy: float) -> float:
    """Seconds to move data over the host link, and to update on the host. Activations travel while `busy`."""
    if layout.offload == "none" and job.options.offload is None:
        return 0.0
    per, link = job.per_parameter, cluster.accelerator.host_link_gb_per_s * 1e9
    updated = updated_parameters(job, layout)
    if job.options.offload == "activations":
        kept, _ = stage_activations(job, layout, stage=0, micro=micro, microbatches=1)
        return max(0.0, 2 * kept / link - busy) * microbatches
    passes = 2 * microbatches if layout.offload == "all" else 1
    held = rank_parameters(job.profile, layout, 0) / layout.shards
    moved = updated * per.gradients + held * passes * per.weights
    return moved / link + updated * 2 * per.optimizer / HOST_ADAM_BYTES


def overhead_seconds(job: Job, layout: Layout, cluster: Cluster, microbatches: int) -> float:
    """Seconds of the training loop itself, and of what is started, however little it sends or computes."""
    tensor, seconds = layout.tensor_parallel_size, cluster.accelerator.step_us * 1e-6
    if tensor > 1:
        sums = tensor_sums(job, layout) * microbatches
        ring = ring_latency(cluster, span=tensor, stride=1)  # sequence parallelism gathers and scatters instead
        seconds += sums * (2 * ring if job.profile.divides(layout) else sum_latency(cluster, span=tensor, stride=1))
    if layout.pipelined:
        neighbour = layout.data_parallel_size * tensor
        hop = ring_latency(cluster, span=2, stride=neighbour)
        seconds += 2 * (layout.pipeline_parallel_size - 1 + layout.stages_per_rank * microbatches) * hop
    return seconds


def updated_parameters(job: Job, layout: Layout) -> float:
    """Trained parameters whose optimizer states this rank owns."""
    return rank_trained(job.profile, layout, 0) / layout.shards


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


def ring_latency(cluster: Cluster, *, span: int, stride: int) -> float:
    """Seconds of a gather or a reduce-scatter of nothing on a ring of `span` ranks at a distance of `stride`."""
    device, nodes = cluster.accelerator, _nodes(cluster, span, stride)
    if span == 1:
        return 0.0
    return (device.start_us + (span - nodes) * device.node_hop_us + (nodes - 1) * device.network_hop_us) * 1e-6


def sum_latency(cluster: Cluster, *, span: int, stride: int) -> float:
    """Seconds of an all-reduce of nothing: on a ring twice, or up and down a tree that branches between nodes."""
    device, nodes = cluster.accelerator, _nodes(cluster, span, stride)
    tree = (span / nodes - 1) * device.tree_hop_us + log2(nodes) * device.network_hop_us
    return min(2 * ring_latency(cluster, span=span, stride=stride), (device.start_us + 2 * tree) * 1e-6)


def _nodes(cluster: Cluster, span: int, stride: int) -> int:
    """Nodes that a ring of `span` ranks reaches."""
    return min(span, ceil(span * stride / cluster.domain))
