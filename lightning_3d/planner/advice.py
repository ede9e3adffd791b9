"""What to change where nothing fits."""

from dataclasses import replace

from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.hardware import Accelerator, Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.order import V_SCHEDULES
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.search import ANYTHING, Pins, families, leanest, search
from lightning_3d.planner.units import show_bytes


def explain_misfit(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> str:
    """One line: how far off the leanest layout is, and what would fit."""
    name, device = job.profile.name, cluster.accelerator
    lean = leanest(job, cluster, pins)
    if lean is None:
        wrong = impossible(job, cluster, pins)
        if wrong:
            return f"{name} on {cluster}: {wrong}."
        blame = to_blame(job, cluster, pins)
        if blame:
            return f"{name} on {cluster}: {blame}"
        return (
            f"{name}: no layout of {cluster.devices} devices divides a batch of {job.batch} samples and"
            f" {job.profile.layers} blocks{' with what is fixed' if pins != ANYTHING else ''}: use a batch that is a"
            f" multiple of the devices, or other sizes."
        )
    peak = lean.peak
    if peak.total > device.memory_gb * 1e9:
        need = f"{show_bytes(peak.total)} of {device.memory_gb:g} GB per device, mostly {_most(lean)}"
    else:
        need = f"{show_bytes(peak.host)} of {device.host_memory_gb:g} GB host memory per device"
    how = f"{lean.layout}, {lean.layout.recompute} recompute, offload {lean.layout.offload}"
    return (
        f"{name} does not fit on {cluster}: the leanest layout ({how}) needs {need}."
        f" {remedy(job, cluster, pins, catalogue)}"
    )


def impossible(job: Job, cluster: Cluster, pins: Pins) -> str | None:
    """What is wrong with what is fixed, where one number says it."""
    sizes = {"--tensor": pins.tensor, "--pipeline": pins.pipeline}
    for flag, size in sizes.items():
        if size is not None and cluster.devices % size:
            return f"{flag} {size} does not divide {cluster.devices} devices"
    if pins.tensor is not None and not job.profile.can_split(pins.tensor):
        parts = ", ".join(map(str, job.profile.tensor_divides))
        return f"--tensor {pins.tensor} must divide each of {parts} (heads, key-value heads, feed-forward width)"
    if pins.pipeline is not None and pins.pipeline > job.profile.layers:
        return f"--pipeline {pins.pipeline} is more than its {job.profile.layers} blocks"
    if pins.schedule in ("1f1b", "gpipe") and pins.chunks not in (None, 1):
        return f"--schedule {pins.schedule} has one stage on a rank, not --stages-per-rank {pins.chunks}"
    if pins.schedule in V_SCHEDULES and pins.chunks not in (None, 2):
        return f"--schedule {pins.schedule} has two stages on a rank, not --stages-per-rank {pins.chunks}"
    stages = (pins.pipeline or 1) * (pins.chunks or 1)
    if stages > job.profile.layers:
        blocks = job.profile.layers
        return f"--pipeline {pins.pipeline} x --stages-per-rank {pins.chunks} is more than its {blocks} blocks"
    return None


_FLAGS = ("micro", "schedule", "chunks", "pipeline", "tensor")
_NEEDS = {
    "interleaved_1f1b": "microbatches that are a multiple of the pipeline's ranks, and 2 blocks on each",
    "interleaved_zero_bubble": "microbatches that are a multiple of the pipeline's ranks",
    "loopedbfs": "a microbatch for each of the pipeline's ranks, and 2 blocks on each",
    "zbv_zero_bubble": "2 microbatches and 2 blocks for each of the pipeline's ranks",
    "dualpipev": "2 microbatches and 2 blocks for each of the pipeline's ranks",
}


def to_blame(job: Job, cluster: Cluster, pins: Pins) -> str | None:
    """Which one of the things that are fixed leaves no layout, although the others leave some."""
    for field in _FLAGS:
        value = getattr(pins, field)
        if value is None or not any(families(job, cluster, replace(pins, **{field: None}))):
            continue
        flag = "--stages-per-rank" if field == "chunks" else f"--{field}"
        batch = f"a batch of {job.batch} samples"
        if field == "micro":
            return f"{flag} {value} divides what a data rank has of {batch} in no layout: give another --batch."
        needs = _NEEDS.get(pins.schedule or "", "") if field in ("schedule", "chunks") else ""
        why = f": {pins.schedule} needs {needs}" if needs else ""
        return (
            f"with {flag} {value} no layout divides {batch} and {job.profile.layers} blocks{why}. Leave it out, or give"
            " another --batch."
        )
    return None


def remedy(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> str:
    """What would make it fit: fewer fixed choices, more devices, or larger ones."""
    if pins != ANYTHING and search(job, cluster):
        return "It fits when the search is free: leave out the flags that fix the layout."
    more = _more_devices(job, cluster, pins)
    larger = _larger_device(job, cluster, pins, catalogue)
    options = [
        f"at least {more} devices (a batch that they divide)" if more else "",
        f"{larger.name} ({larger.memory_gb:g} GB)" if larger else "",
        "a shorter --sequence" if job.profile.tokens > 1 else "",
    ]
    return f"What would help: {', or '.join(option for option in options if option)}."


def _most(plan: Plan) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "reserved")
    name = max(parts, key=lambda part: getattr(plan.peak, part))
    return f"{name} ({show_bytes(getattr(plan.peak, name))})"


def _more_devices(job: Job, cluster: Cluster, pins: Pins) -> int | None:
    devices = cluster.devices
    while devices < 16384:
        devices *= 2
        batch = -(-job.batch // devices) * devices
        if search(replace(job, batch=batch), Cluster.of(cluster.accelerator, devices), pins):
            return devices
    return None


def _larger_device(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> Accelerator | None:
    """The smallest accelerator that fits the job on as many devices."""
    devices = sorted(catalogue.complete, key=lambda device: device.memory_gb)
    for device in devices:
        larger = device.runs_here and device.memory_gb > cluster.accelerator.memory_gb
        if larger and search(job, Cluster.of(device, cluster.devices), pins):
            return device
    return None
