"""What a reader should know beside a plan: assumptions, energy, checkpoints, and the sums people do by hand."""

from argparse import Namespace
from collections.abc import Sequence

from lightning_3d.planner.duration import A100_PEAK, RULE_SHARE, rule_of_thumb_hours, training_seconds
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.question import TOKENS_PER_PARAMETER
from lightning_3d.planner.states import master_bytes
from lightning_3d.planner.units import show_bytes, show_count, show_hours, show_seconds


def notes_on(args: Namespace, best: Plan) -> tuple[str, ...]:
    """Notes on the plan that is shown first."""
    job = best.job
    notes = []
    if args.tokens is None and args.samples is None:
        what, flag = ("tokens", "--tokens") if job.profile.tokens > 1 else ("samples", "--samples")
        notes.append(f"assumed: {TOKENS_PER_PARAMETER} {what} per parameter ({flag})")
    if args.batch is None:
        notes.append(f"assumed: {job.batch} samples per step{_batch_like(best)} (--batch)")
    notes.append(
        f"{show_hours(best.device_hours)} device-hours" + (f", {show_hours(best.kwh)} kWh" if best.kwh else "")
    )
    notes.append(checkpoint_note(best))
    notes += by_hand(best) if job.profile.tokens > 1 else []
    return (*notes, *how_to_recompute(best), *frozen_note(best), *other_rates([best]), *counted_only([best]))


def _batch_like(plan: Plan) -> str:
    """Where an assumed batch comes from, if not from the tokens that are usual."""
    profile = plan.job.profile
    if profile.tokens > 1 or not profile.example_samples:
        return ""
    return f", {plan.job.batch // plan.cluster.devices} on each device after the batch that the module was run on"


def how_to_recompute(plan: Plan) -> list[str]:
    """What the user has to do for a plan that recomputes: it is the module that does it."""
    if plan.layout.recompute == "none":
        return []
    where = "each block" if plan.layout.recompute == "full" else "the attention of each block"
    return [
        f"recompute {plan.layout.recompute}: the strategy has no switch for it. Checkpoint {where} in your module"
        " (torch.utils.checkpoint with use_reentrant=False), or whole blocks of a Hugging Face model with"
        " model.gradient_checkpointing_enable()"
    ]


def frozen_note(plan: Plan) -> list[str]:
    """That not all of the module is trained."""
    profile = plan.job.profile
    if profile.trained == profile.parameters:
        return []
    return [f"{show_count(profile.trained)} of {show_count(profile.parameters)} parameters are trained"]


def other_rates(plans: Sequence[Plan]) -> list[str]:
    """Where a device has no rate for the precision, and machines that are not as the catalogue has them."""
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
    """Which of the accelerators are not for running on."""
    devices = dict.fromkeys(plan.cluster.accelerator for plan in plans)
    return [
        f"{device.name} is priced and counted only: lightning_3d does not run on it."
        for device in devices
        if not device.runs_here
    ]


def checkpoint_note(plan: Plan) -> str:
    """How large a checkpoint is, and how long all nodes write it."""
    per = plan.job.per_parameter
    profile, masters = plan.job.profile, master_bytes(plan.job.precision)
    size = profile.parameters * (masters or per.weights) + profile.trained * (per.optimizer - masters)
    seconds = size / (plan.cluster.nodes * plan.cluster.accelerator.disk_gb_per_s * 1e9)
    return f"a checkpoint with optimizer states is {show_bytes(size)}, written in {show_seconds(seconds)}"


def by_hand(plan: Plan) -> list[str]:
    """The approximations people use, beside the plan."""
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
