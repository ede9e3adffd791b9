"""`Plan`: one layout of a job on a cluster, priced."""

from dataclasses import dataclass, replace

from lightning_3d.layout import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.planner.formulas import energy_kwh, rent
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import RankMemory, rank_memory, states_between_steps
from lightning_3d.planner.scale import running_share
from lightning_3d.planner.states import StateBytes
from lightning_3d.planner.step_time import StepTime, step_time
from lightning_3d.planner.wire_bytes import data_bytes, pipeline_bytes, tensor_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its memory, time and cost."""

    job: Job
    cluster: Cluster
    layout: Layout
    micro: int
    """Samples in a microbatch."""
    microbatches: int
    """Microbatches per data rank and step: pipeline pieces, or accumulation without a pipeline."""
    memory: tuple[RankMemory, ...]
    """Of the first and the last pipeline rank (one where there is no pipeline)."""
    time: StepTime

    def states(self, stage: int) -> StateBytes:
        """Bytes of a rank of pipeline rank `stage`: those that a dry run counts."""
        return states_between_steps(self.job, self.layout, stage)

    def sent(self, stage: int) -> dict[str, float]:
        """Bytes that a rank of pipeline rank `stage` sends in a step, by axis."""
        job, layout, micro, count = self.job, self.layout, self.micro, self.microbatches
        sent = {
            DATA_AXIS: data_bytes(job, layout, stage=stage, microbatches=count),
            TENSOR_AXIS: tensor_bytes(job, layout, stage=stage, micro=micro) * count,
            PIPELINE_AXIS: pipeline_bytes(job, layout, stage=stage, micro=micro, microbatches=count),
        }
        return {axis: size for axis, size in sent.items() if size}

    @property
    def peak(self) -> RankMemory:
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        device = self.cluster.accelerator
        return self.peak.total <= device.memory_gb * 1e9 and self.peak.host <= device.host_memory_gb * 1e9

    @property
    def seconds(self) -> float:
        """Of the complete training. A known rate already contains the restarts."""
        share = 1.0 if self.job.sustained is not None else running_share(self.cluster)
        return self.time.total * self.job.steps / share

    @property
    def device_hours(self) -> float:
        return self.cluster.devices * self.seconds / 3600

    @property
    def dollars(self) -> float | None:
        """Of the whole training, or None where the accelerator has no price."""
        price = self.cluster.accelerator.price
        if price is None:
            return None
        return rent(devices=self.cluster.devices, dollars_per_hour=price.dollars_per_hour, hours=self.seconds / 3600)

    @property
    def kwh(self) -> float:
        watts = self.cluster.accelerator.watts
        return energy_kwh(devices=self.cluster.devices, watts=watts, hours=self.seconds / 3600)

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do in the time."""
        return self._utilisation(self.job.profile.model_flops(self.job.batch))

    @property
    def hfu(self) -> float:
        """The same with recomputed FLOPs counted."""
        return self._utilisation(self.job.profile.hardware_flops(self.job.batch, self.layout.recompute))

    @property
    def tokens_per_second(self) -> float:
        return self.job.batch * self.job.profile.tokens / self.time.total

    def _utilisation(self, flops: float) -> float:
        peak = self.cluster.accelerator.peak(self.job.precision)
        return flops / (self.time.total * self.cluster.devices * peak)


def price_layout(job: Job, cluster: Cluster, layout: Layout, *, micro: int) -> Plan:
    """`layout` with microbatches of `micro` samples, priced whether it fits or not."""
    microbatches = max(1, job.batch // (layout.data_parallel_size * micro))
    return Plan(
        job=job,
        cluster=cluster,
        layout=replace(layout, num_microbatches=microbatches if layout.pipeline_parallel_size > 1 else "auto"),
        micro=micro,
        microbatches=microbatches,
        memory=ends_memory(job, cluster, layout, micro=micro, microbatches=microbatches),
        time=step_time(job, layout, cluster, micro=micro, microbatches=microbatches),
    )


def ends_memory(job: Job, cluster: Cluster, layout: Layout, *, micro: int, microbatches: int) -> tuple[RankMemory, ...]:
    """Memory of the first and last pipeline ranks, between which the others lie."""
    reserved = cluster.accelerator.reserved_gb * 1e9
    stages = (0,) if layout.pipeline_parallel_size == 1 else (0, layout.pipeline_parallel_size - 1)
    return tuple(
        rank_memory(job, layout, stage=stage, micro=micro, microbatches=microbatches, reserved=reserved)
        for stage in stages
    )
