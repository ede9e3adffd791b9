"""What a reader should know beside a plan: assumptions, energy, checkpoints, and the sums people do by hand."""

from argparse import Namespace
from collections.abc import Sequence

from lightning_3d.planner.duration import rule_of_thumb_hours, training_seconds
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.question import TOKENS_PER_PARAMETER
from lightning_3d.planner.units import show_bytes, show_hours, show_seconds


def notes_on(args: Namespace, best: Plan) -> tuple[str, ...]:
    """Notes on the plan that is shown first."""
    job = best.job
    notes = []
    if args.tokens is None and args.samples is None:
        notes.append(f"assumed: {TOKENS_PER_PARAMETER} tokens per parameter (--tokens)")
    if args.batch is None:
        notes.append(f"assumed: {job.batch} samples per step (--batch)")
    notes.append(
        f"{show_hours(best.device_hours)} device-hours" + (f", {show_hours(best.kwh)} kWh" if best.kwh else "")
    )
    notes.append(checkpoint_note(best))
    notes += by_hand(best) if job.profile.tokens > 1 else []
    return (*notes, *counted_only([best]))


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
    size = plan.job.profile.parameters * max(per.optimizer, per.weights + per.optimizer - 2)
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
    notes.append(
        f"rule of thumb, 13.3 hours per billion tokens and billion parameters: {show_hours(hours)} A100 80 GB hours"
    )
    return notes
