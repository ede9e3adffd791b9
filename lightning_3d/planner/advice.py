"""Advice: what to change where no layout fits, and the notes under a plan.

Notes name assumptions, energy, the size of a checkpoint, and rules of thumb next to the plan.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from lightning_3d.layout import V_SHAPED
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.formulas import A100_PEAK, RULE_SHARE, rule_of_thumb_hours, training_seconds
from lightning_3d.planner.hardware import Accelerator, Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.priced_layout import Plan
from lightning_3d.planner.question import TOKENS_PER_PARAMETER
from lightning_3d.planner.scale import LOST_SECONDS, running_share
from lightning_3d.planner.search import ANYTHING, Pins, can_fit, families, leanest
from lightning_3d.planner.show import show_bytes, show_count, show_hours, show_seconds


def explain_misfit(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> str:
    """One line: how far off the leanest layout is, and what would fit."""
    name = job.profile.name
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
    how = f"{lean.layout}, {lean.layout.recompute} recompute, offload {lean.layout.offload}"
    return (
        f"{name} does not fit on {cluster}: the leanest layout ({how}) needs {_need(lean)}."
        f" Its time there would be {show_seconds(lean.seconds)}. {remedy(job, cluster, pins, catalogue)}"
    )


def impossible(job: Job, cluster: Cluster, pins: Pins) -> str | None:
    """The fixed size that no layout can have, in words; None if there is no single one."""
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
    if pins.schedule in V_SHAPED and pins.chunks not in (None, 2):
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
    """The one flag without which some layout would be left, in words; None if there is no single one."""
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
    """Changes that make the job fit: fewer fixed sizes, more devices, or larger ones."""
    if pins != ANYTHING and can_fit(job, cluster):
        return "It fits when the search is free: leave out the flags that fix the layout."
    more = _more_devices(job, cluster, pins)
    larger = _larger_device(job, cluster, pins, catalogue)
    options = [
        f"at least {more} devices (a batch that they divide)" if more else "",
        f"{larger.name} ({larger.memory_gb:g} GB)" if larger else "",
        "a shorter --sequence" if job.profile.tokens > 1 else "",
    ]
    return f"What would help: {', or '.join(option for option in options if option)}."


def _need(plan: Plan) -> str:
    """The memory that a plan has too little of."""
    peak, device = plan.peak, plan.cluster.accelerator
    if peak.total > device.memory_gb * 1e9:
        return f"{show_bytes(peak.total)} of {device.memory_gb:g} GB per device, mostly {_most(plan)}"
    return f"{show_bytes(peak.host)} of {device.host_memory_gb:g} GB host memory per device"


def _most(plan: Plan) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "head", "casts", "buffers", "reserved")
    name = max(parts, key=lambda part: getattr(plan.peak, part))
    return f"{name} ({show_bytes(getattr(plan.peak, name))})"


def _more_devices(job: Job, cluster: Cluster, pins: Pins) -> int | None:
    devices = cluster.devices
    while devices < 16384:
        devices *= 2
        batch = -(-job.batch // devices) * devices
        if can_fit(replace(job, batch=batch), Cluster.of(cluster.accelerator, devices), pins):
            return devices
    return None


def _larger_device(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> Accelerator | None:
    """The smallest accelerator that fits the job on as many devices."""
    devices = sorted(catalogue.complete, key=lambda device: device.memory_gb)
    for device in devices:
        larger = device.runs_here and device.memory_gb > cluster.accelerator.memory_gb
        if larger and can_fit(job, Cluster.of(device, cluster.devices), pins):
            return device
    return None


def notes_on(args: Namespace, best: Plan) -> tuple[str, ...]:
    """Notes on the plan that is shown first."""
    job = best.job
    notes = []
    if not best.fits:
        notes.append(f"it does not fit: this layout needs {_need(best)}. The time is that of the rate alone")
    if args.sustained is not None:
        notes.append(
            "--sustained: all layouts take the same time, and recompute adds its FLOPs. The simplest comes first"
        )
    if args.tokens is None and args.samples is None:
        what, flag = ("tokens", "--tokens") if job.profile.tokens > 1 else ("samples", "--samples")
        notes.append(f"assumed: {TOKENS_PER_PARAMETER} {what} per parameter ({flag})")
    if args.batch is None:
        notes.append(f"assumed: {job.batch} samples per step{_batch_like(best)} (--batch)")
    notes.append(
        f"{show_hours(best.device_hours)} device-hours" + (f", {show_hours(best.kwh)} kWh" if best.kwh else "")
    )
    notes.append(checkpoint_note(best))
    notes += [*restarts(best), *old_price(best)]
    notes += by_hand(best) if job.profile.tokens > 1 else []
    return (*notes, *how_to_recompute(best), *frozen_note(best), *other_rates([best]), *counted_only([best]))


def _batch_like(plan: Plan) -> str:
    """The origin of an assumed batch; empty where it comes from the usual number of tokens."""
    profile = plan.job.profile
    if profile.tokens > 1 or not profile.example_samples:
        return ""
    return f", {plan.job.batch // plan.cluster.devices} on each device after the batch that the module was run on"


def old_price(plan: Plan) -> list[str]:
    """A note if the price is older than a year."""
    price = plan.cluster.accelerator.price
    if price is None or not price.date:
        return []
    year, month = (int(part) for part in price.date.split("-")[:2])
    if (date.today() - date(year, month, 1)).days <= 366:
        return []
    return [f"the price of {plan.cluster.accelerator.name} is of {price.date}, older than a year: --price takes yours"]


def restarts(plan: Plan) -> list[str]:
    """The time between failures of the cluster, where they take more than a thousandth of the time."""
    lost, hours = 1 - running_share(plan.cluster), plan.cluster.accelerator.failure_hours
    if plan.job.sustained is not None or lost < 0.001:
        return []
    return [
        f"a failure every {show_seconds(hours * 3600 / plan.cluster.devices)} takes {lost:.1%} of the time: one in"
        f" {hours:,.0f} h of a device (Llama 3), {LOST_SECONDS / 60:.0f} min lost (--set failure_hours=)"
    ]


def how_to_recompute(plan: Plan) -> list[str]:
    """A note for a plan that recomputes attention alone: the module does it, not the strategy."""
    if plan.layout.recompute != "selective":
        return []
    return [
        "recompute selective: checkpoint the attention of each block in your module (torch.utils.checkpoint with"
        " use_reentrant=False). The strategy's own recompute='selective' is another: it keeps attention"
    ]


def frozen_note(plan: Plan) -> list[str]:
    """A note if some parameters are frozen."""
    profile = plan.job.profile
    if profile.trained == profile.parameters:
        return []
    return [f"{show_count(profile.trained)} of {show_count(profile.parameters)} parameters are trained"]


def other_rates(plans: Sequence[Plan]) -> list[str]:
    """Notes on devices without a rate for the precision, and on machines larger than those of the catalogue."""
    notes = {}
    for plan in plans:
        device, precision, count = plan.cluster.accelerator, plan.job.precision, plan.cluster.devices_per_node
        missing = device.lacks(precision)
        if missing and plan.job.sustained is None:
            used = device.rated_dtype(precision)
            notes[device.name, "rate"] = (
                f"{device.name} has no {missing} rate in the catalogue: precision {precision} is timed by that of"
                f" {used}"
            )
        if count > device.devices_per_node:
            notes[device.name, "machine"] = (
                f"{device.name} comes {device.devices_per_node} to a machine: {count} are each counted and priced as a"
                " whole one, with the links of one machine between them"
            )
    return list(notes.values())


def counted_only(plans: Sequence[Plan]) -> list[str]:
    """Notes on accelerators that the strategy does not run on."""
    devices = dict.fromkeys(plan.cluster.accelerator for plan in plans)
    return [
        f"{device.name} is in the catalogue for comparison only: lightning_3d does not run on it."
        for device in devices
        if not device.runs_here
    ]


def checkpoint_note(plan: Plan) -> str:
    """The size of a checkpoint, and the time in which all nodes write it."""
    per = plan.job.per_parameter
    profile = plan.job.profile
    size = profile.parameters * per.weights + profile.trained * per.optimizer
    seconds = size / (plan.cluster.nodes * plan.cluster.accelerator.disk_gb_per_s * 1e9)
    return f"a checkpoint with optimizer states is {show_bytes(size)}, written in {show_seconds(seconds)}"


def by_hand(plan: Plan) -> list[str]:
    """Rules of thumb for the same job, to compare with the plan."""
    job = plan.job
    tokens, parameters = job.samples * job.profile.tokens, job.profile.parameters
    known = plan.cluster.accelerator.sustained_tflops
    sustained = job.sustained or (None if known is None else known * 1e12)
    notes = []
    if sustained is not None:
        again = plan.layout.recompute == "full"
        seconds = training_seconds(
            tokens=tokens, parameters=parameters, devices=plan.cluster.devices, sustained=sustained, recompute=again
        )
        formula = "8TP/(nX)" if again else "6TP/(nX)"
        notes.append(f"by hand, {formula} at X = {sustained / 1e12:g} TFLOP/s per device: {show_seconds(seconds)}")
    hours = rule_of_thumb_hours(billion_tokens=tokens / 1e9, billion_parameters=parameters / 1e9)
    reached = job.profile.model_flops(job.batch) / (plan.time.total * plan.cluster.devices)
    notes.append(
        f"rule of thumb, 13.3 hours per billion tokens and billion parameters: {show_hours(hours)} A100 80 GB hours;"
        f" planned: {show_hours(plan.device_hours)} of {plan.cluster.accelerator.name}, at {reached / 1e12:.3g} TFLOP/s"
        f" a device and {_per_parameter(plan)} FLOPs per parameter and token, where the rule has"
        f" {RULE_SHARE * A100_PEAK / 1e12:.3g} and 6"
    )
    return notes


def _per_parameter(plan: Plan) -> str:
    profile = plan.job.profile
    return f"{profile.model_flops(1) / (profile.parameters * profile.tokens):.2g}"
