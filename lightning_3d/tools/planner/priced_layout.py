"""`Plan`: one layout of a job on a cluster, priced."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.optim.state_bytes import StateBytes
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import PlannedMemory, rank_memory, whole_states
from lightning_3d.tools.planner.step_time import StepTime, step_time
from lightning_3d.tools.planner.wire_bytes import context_bytes, data_parts, pipeline_bytes, tensor_bytes

LOST_SECONDS = 1001.0
"""Lost by one failure: Llama 3 405B lost less than 10% of 54 days to 466 interruptions, checkpoints included."""
SLOWNESS = 0.1
"""More time that a slow machine takes: MegaScale (arXiv 2402.15627) found 0.5% of machines about 10% slower."""
MARGIN = 0.05
"""Share of a device that a plan should leave free: fragmentation differs from run to run."""
POWER_OVERHEAD = 1.2
"""Energy with cooling and power supply, over that of the devices (PUE)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    cluster: Cluster
    layout: Layout
    micro: int
    """Samples in a microbatch."""
    microbatches: int
    """Microbatches per data rank and step: pipeline pieces, or accumulation without a pipeline."""
    memory: tuple[PlannedMemory, ...]
    """Of the first and the last pipeline rank (one where there is no pipeline)."""
    time: StepTime

    def states(self, stage: int) -> StateBytes:
        """Bytes of a rank of pipeline rank `stage`, as a dry run counts them: gradients when the optimizer steps."""
        return whole_states(self.job, self.layout, stage).of(1 / self.layout.shards)

    def sent(self, stage: int) -> dict[str, float]:
        """Bytes that a rank of pipeline rank `stage` sends in a step, by axis."""
        job, layout, micro, count = self.job, self.layout, self.micro, self.microbatches
        sent = {
            DATA_AXIS: sum(data_parts(job, layout, stage=stage, microbatches=count)),
            CONTEXT_AXIS: context_bytes(job, layout, stage=stage, micro=micro) * count,
            TENSOR_AXIS: tensor_bytes(job, layout, stage=stage, micro=micro) * count,
            PIPELINE_AXIS: pipeline_bytes(job, layout, stage=stage, micro=micro, microbatches=count),
        }
        return {axis: size for axis, size in sent.items() if size}

    @property
    def peak(self) -> PlannedMemory:
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        return all_fit(self.memory, self.cluster)

    @property
    def tight(self) -> bool:
        """True where it fits, and less than a twentieth of a device is free."""
        room = self.cluster.accelerator.memory_gb * 1e9
        return (1 - MARGIN) * room < self.peak.total <= room

    @property
    def seconds(self) -> float:
        return self.time.total * elapsed(self.job, self.cluster)

    @property
    def device_hours(self) -> float:
        return self.cluster.devices * self.seconds / 3600

    @property
    def dollars(self) -> float | None:
        """Of the whole training, or None where the accelerator has no price."""
        price = self.cluster.accelerator.price
        return None if price is None else self.device_hours * price.dollars_per_hour

    @property
    def kwh(self) -> float:
        return self.device_hours * self.cluster.accelerator.watts / 1000 * POWER_OVERHEAD

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do in the time."""
        return self._utilisation(self.job.profile.model_flops(self.job.batch))

    @property
    def hfu(self) -> float:
        share = self.job.options.recomputed
        return self._utilisation(self.job.profile.hardware_flops(self.job.batch, self.layout.recompute, share))

    @property
    def tokens_per_second(self) -> float:
        return self.job.batch * self.job.profile.tokens / self.time.total

    def _utilisation(self, flops: float) -> float:
        peak = self.cluster.accelerator.peak(self.job.precision)
        return flops / (self.time.total * self.cluster.devices * peak)


def price_layout(job: Job, cluster: Cluster, layout: Layout, *, micro: int) -> Plan:
    """`layout` with microbatches of `micro` samples, priced whether it fits or not."""
    microbatches = max(1, job.batch // (layout.data_parallel_size * micro))
    if job.whole_mixers(layout):
        job = replace(job, profile=job.profile.with_whole_mixers(job.options.context))
    return Plan(
        job=job,
        cluster=cluster,
        layout=replace(layout, num_microbatches=microbatches if layout.pipelined else "auto"),
        micro=micro,
        microbatches=microbatches,
        memory=tuple(stages_memory(job, cluster, layout, layout.ends, micro=micro, microbatches=microbatches)),
        time=step_time(job, layout, cluster, micro=micro, microbatches=microbatches),
    )


def stages_memory(
    job: Job, cluster: Cluster, layout: Layout, stages: Iterable[int], *, micro: int, microbatches: int
) -> Iterator[PlannedMemory]:
    reserved = cluster.accelerator.reserved_gb * 1e9
    for stage in stages:
        yield rank_memory(job, layout, stage=stage, micro=micro, microbatches=microbatches, reserved=reserved)


def all_fit(memory: Iterable[PlannedMemory], cluster: Cluster) -> bool:
    """Return True if the devices of `cluster` and their hosts have room for `memory`."""
    device = cluster.accelerator
    return all(one.total <= device.memory_gb * 1e9 and one.host <= device.host_memory_gb * 1e9 for one in memory)


def elapsed(job: Job, cluster: Cluster) -> float:
    """Seconds of the training for each of a step. A known rate already contains restarts and slow machines."""
    return job.steps * (1.0 if job.sustained is not None else slowest(cluster) / running_share(cluster))


def slowest(cluster: Cluster) -> float:
    """Time of a step over that of healthy machines: all wait for a slow one, if the cluster has one."""
    return 1 + SLOWNESS * (1 - (1 - cluster.accelerator.slow_share) ** cluster.nodes)


def running_share(cluster: Cluster) -> float:
    """Share of the time in which a training runs, and does not repeat steps or wait for a restart."""
    hours = cluster.accelerator.failure_hours
    if not hours:
        return 1.0
    between = hours * 3600 / cluster.devices
    return between / (between + LOST_SECONDS)
