"""Advice: what to change where no layout fits, and the notes under a plan.

Notes name assumptions, energy, the size of a checkpoint, and rules of thumb next to the plan.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from lightning_3d.layout import SCHEDULES
from lightning_3d.module.amounts import show_bytes, show_count, show_hours, show_seconds
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import TOKENS_PER_PARAMETER, Job
from lightning_3d.tools.planner.priced_layout import LOST_SECONDS, SLOWNESS, Plan, running_share, slowest
from lightning_3d.tools.planner.search import ANYTHING, Pins, can_fit, families, leanest

RULE_HOURS = 13.3
"""Hours of an A100 80 GB for a billion tokens and a billion parameters, as people quote them."""
A100_PEAK, RULE_SHARE = 312e12, 0.40
"""FLOP/s of an A100 with 16-bit numbers, and the share of it that the rule of thumb takes to be reached."""


def explain_misfit(job: Job, cluster: Cluster, pins: Pins, catalogue: Catalogue) -> str:
    """One line: how far off the leanest layout is, and what would fit."""
    name = job.profile.name
    lean = leanest(job, cluster, pins)
    if lean is None:
        if why := impossible(job, cluster, pins) or to_blame(job, cluster, pins):
            return f"{name} on {cluster}: {why.rstrip('.')}."
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
    tensor, pipeline, chunks = pins.tensor or 1, pins.pipeline or 1, pins.stages_per_rank or 1
    blocks = job.profile.layers
    parts = ", ".join(map(str, job.profile.tensor_divides))
    own = SCHEDULES[pins.schedule].stages_per_rank if pins.schedule else None
    per_rank = {None: None, 1: "one stage"}.get(own, f"{own} stages")
    wrong = {
        f"--tensor {tensor} does not divide {cluster.devices} devices": cluster.devices % tensor,
        f"--pipeline {pipeline} does not divide {cluster.devices} devices": cluster.devices % pipeline,
        f"--tensor {tensor} must divide each of {parts} (heads, key-value heads, feed-forward width)": (
            not job.profile.can_split(tensor)
        ),
        f"--pipeline {pipeline} is more than its {blocks} blocks": pipeline > blocks,
        f"--schedule {pins.schedule} has {per_rank} on a rank, not --stages-per-rank {chunks}": (
            own and pins.stages_per_rank not in (None, own)
        ),
        f"--pipeline {pins.pipeline} x --stages-per-rank {pins.stages_per_rank} is more than its {blocks} blocks": (
            pipeline * chunks > blocks
        ),
    }
    return next((text for text, holds in wrong.items() if holds), None)


_FLAGS = ("micro", "schedule", "stages_per_rank", "pipeline", "tensor")


def to_blame(job: Job, cluster: Cluster, pins: Pins) -> str | None:
    """The one flag without which some layout would be left, in words; None if there is no single one."""
    for field in _FLAGS:
        value = getattr(pins, field)
        if value is None or not any(families(job, cluster, replace(pins, **{field: None}))):
            continue
        flag, batch = f"--{field.replace('_', '-')}", f"a batch of {job.batch} samples"
        if field == "micro":
            return f"{flag} {value} divides what a data rank has of {batch} in no layout: give another --batch."
        needs = SCHEDULES[pins.schedule].needs if pins.schedule and field in ("schedule", "stages_per_rank") else ""
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
    device, options = cluster.accelerator, []
    for devices in (cluster.devices * 2**power for power in range(1, 15)):
        batch = -(-job.batch // devices) * devices
        if devices < 2 * 16384 and can_fit(replace(job, batch=batch), Cluster.of(device, devices), pins):
            options.append(f"at least {devices} devices (a batch that they divide)")
            break
    for larger in sorted(catalogue.complete, key=lambda one: one.memory_gb):
        more = larger.runs_here and larger.memory_gb > device.memory_gb
        if more and can_fit(job, Cluster.of(larger, cluster.devices), pins):
            options.append(f"{larger.name} ({larger.memory_gb:g} GB)")
            break
    options += ["a shorter --sequence"] * (job.profile.tokens > 1)
    return f"What would help: {', or '.join(options)}."


def _need(plan: Plan) -> str:
    peak, device = plan.peak, plan.cluster.accelerator
    if peak.total > device.memory_gb * 1e9:
        size, part = max((size, part) for part, size in vars(peak).items() if part != "host")
        return f"{show_bytes(peak.total)} of {device.memory_gb:g} GB per device, mostly {part} ({show_bytes(size)})"
    return f"{show_bytes(peak.host)} of {device.host_memory_gb:g} GB host memory per device"


def notes_on(args: Namespace, best: Plan) -> tuple[str, ...]:
    job = best.job
    notes = []
    if not best.fits:
        notes.append(f"it does not fit: this layout needs {_need(best)}. The time is that of the rate alone")
    if job.options.context > args.context_parallel:
        notes.append(f"{job.options.context} context ranks share each sample: no layout without them fits")
    if job.options.offload == "activations" and args.offload is None:
        notes.append("activations wait in host memory: without that they are computed again, which takes longer")
    if args.kernels == "fused" and job.profile.divides(best.layout):
        notes.append(
            "--kernels fused: tensor ranks are priced as in Megatron-LM, which gathers a divided sequence again in"
            " backward. This package keeps it, and needs more memory"
        )
    if args.sustained is not None:
        notes.append(
            "--sustained: all layouts take the same time, and recompute adds its FLOPs. The simplest comes first"
        )
    if args.tokens is None and args.samples is None and args.run_for is None:
        what, flag = ("tokens", "--tokens") if job.profile.tokens > 1 else ("samples", "--samples")
        notes.append(f"assumed: {TOKENS_PER_PARAMETER} {what} per parameter ({flag})")
    if args.batch is None:
        notes.append(f"assumed: {job.batch} samples per step{_batch_like(best)} (--batch)")
    notes.append(
        f"{show_hours(best.device_hours)} device-hours" + (f", {show_hours(best.kwh)} kWh" if best.kwh else "")
    )
    per = best.job.per_parameter
    profile = best.job.profile
    size = profile.parameters * per.weights + profile.trained * per.optimizer
    seconds = size / (best.cluster.nodes * best.cluster.accelerator.disk_gb_per_s * 1e9)
    notes.append(f"a checkpoint with optimizer states is {show_bytes(size)}, written in {show_seconds(seconds)}")
    notes += [*losses(best), *old_price(best)]
    notes += [f"priced only, not run by this package: {name}" for name in job.options.not_run]
    notes += by_hand(best) if job.profile.tokens > 1 else []
    if job.profile.trained != job.profile.parameters:
        notes.append(
            f"{show_count(job.profile.trained)} of {show_count(job.profile.parameters)} parameters are trained"
        )
    return (*notes, *other_rates([best]), *counted_only([best]))


def _batch_like(plan: Plan) -> str:
    """The origin of an assumed batch; empty where it comes from the usual number of tokens."""
    profile = plan.job.profile
    if profile.tokens > 1 or not profile.example_samples:
        return ""
    return f", {plan.job.batch // plan.cluster.devices} on each device after the batch that the module was run on"


def old_price(plan: Plan) -> list[str]:
    price = plan.cluster.accelerator.price
    if price is None or not price.date or (date.today() - date.fromisoformat(f"{price.date[:7]}-01")).days <= 366:
        return []
    return [f"the price of {plan.cluster.accelerator.name} is of {price.date}, older than a year: --price takes yours"]


def losses(plan: Plan) -> Iterator[str]:
    """Failures and slow machines of the cluster, where they take more than a thousandth of the time."""
    device, lost, slower = plan.cluster.accelerator, 1 - running_share(plan.cluster), slowest(plan.cluster) - 1
    if plan.job.sustained is not None:
        return
    if slower >= 0.001:
        yield (
            f"slow machines add {slower:.1%} to the time: one in {1 / device.slow_share:,.0f} is {SLOWNESS:.0%} slower"
            " (MegaScale), and all wait for it (--set slow_share=)"
        )
    if lost >= 0.001:
        yield (
            f"a failure every {show_seconds(device.failure_hours * 3600 / plan.cluster.devices)} takes {lost:.1%} of"
            f" the time: one in {device.failure_hours:,.0f} h of a device (Llama 3), {LOST_SECONDS / 60:.0f} min lost"
            " (--set failure_hours=)"
        )


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
    devices = dict.fromkeys(plan.cluster.accelerator for plan in plans)
    return [
        f"{device.name} is in the catalogue for comparison only: lightning_3d does not run on it."
        for device in devices
        if not device.runs_here
    ]


def by_hand(plan: Plan) -> list[str]:
    """Rules of thumb for the same job, to compare with the plan."""
    job = plan.job
    tokens, parameters = job.samples * job.profile.tokens, job.profile.active
    known = plan.cluster.accelerator.sustained_tflops
    sustained = job.sustained or (None if known is None else known * 1e12)
    notes = []
    if sustained is not None:
        again = plan.layout.recompute == "full"
        seconds = training_seconds(tokens, parameters, plan.cluster.devices * sustained, again)
        formula = "8TP/(nX)" if again else "6TP/(nX)"
        notes.append(f"by hand, {formula} at X = {sustained / 1e12:g} TFLOP/s per device: {show_seconds(seconds)}")
    hours = RULE_HOURS * tokens / 1e9 * parameters / 1e9
    per_parameter = job.profile.model_flops(1) / (parameters * job.profile.tokens)
    reached = job.profile.model_flops(job.batch) / (plan.time.total * plan.cluster.devices)
    notes.append(
        f"rule of thumb, {RULE_HOURS} hours per billion tokens and billion parameters: {show_hours(hours)} A100 80 GB"
        f" hours; planned: {show_hours(plan.device_hours)} of {plan.cluster.accelerator.name}, at"
        f" {reached / 1e12:.3g} TFLOP/s a device and {per_parameter:.2g} FLOPs per parameter and token,"
        f" where the rule has {RULE_SHARE * A100_PEAK / 1e12:.3g} and 6"
    )
    return notes


def training_seconds(tokens: float, parameters: float, rate: float, recompute: bool = False) -> float:
    """`8TP/(nX)` with full recompute, `6TP/(nX)` without: a few percent below the exact FLOPs, which also count
    attention and the head."""
    return (8 if recompute else 6) * tokens * parameters / rate
