"""The questions people ask of a plan, answered: this cluster, this deadline, this budget, which accelerator."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_3d.errors import PlannerError
from lightning_3d.planner.advice import explain_misfit
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.duration import rule_of_thumb_hours, training_seconds
from lightning_3d.planner.hardware import Accelerator, Cluster
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.question import (
    TOKENS_PER_PARAMETER,
    accelerator_of,
    catalogue_of,
    cluster_of,
    job_of,
    pins_of,
    profile_of,
)
from lightning_3d.planner.report import job_lines, memory_table, plans_table, table, time_line
from lightning_3d.planner.search import distinct, search
from lightning_3d.planner.units import parse_duration, show_dollars, show_seconds

MOST_DEVICES = 65536


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Plans, best first, with what a reader should know beside them."""

    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    text: str


def answer(args: Namespace) -> Answer:
    """The answer to the question that `args` ask."""
    profile, catalogue = profile_of(args), catalogue_of(args)
    if args.compare:
        return _answer_compare(args, profile, catalogue)
    plans = _plans_for(args, profile, catalogue, _asked_cluster(args, catalogue))
    best = plans[0]
    notes = _notes(args, best)
    lines = [*job_lines(best.job), _cluster_line(best.cluster), "", plans_table(plans), "", memory_table(best)]
    lines += [
        f"of {best.cluster.accelerator.memory_gb:g} GB per device",
        f"time of a step: {time_line(best)}",
        "",
        *notes,
    ]
    return Answer(plans=tuple(plans), notes=notes, text="\n".join(lines))


def plan_cluster(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    """The best plans on `cluster`, or an error that says what would fit."""
    job = job_of(args, profile, cluster.devices)
    plans = search(job, cluster, pins_of(args))
    if not plans:
        raise PlannerError(explain_misfit(job, cluster, pins_of(args), catalogue))
    return distinct(plans, args.top)


def _plans_for(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    if args.gpus_for is None and args.max_cost is None:
        return plan_cluster(args, profile, catalogue, cluster)
    deadline = None if args.gpus_for is None else parse_duration(args.gpus_for)
    if args.max_cost is not None and args.max_cost <= 0:
        raise PlannerError(f"--max-cost {args.max_cost:g} must be above 0.")
    plan = _sized(args, profile, catalogue, cluster.accelerator, deadline)
    return plan_cluster(args, profile, catalogue, plan.cluster)


def _sized(
    args: Namespace, profile: Profile, catalogue: Catalogue, accelerator: Accelerator, deadline: float | None
) -> Plan:
    """The smallest cluster that keeps the deadline, else the fastest within the budget."""
    budget = args.max_cost
    if budget is not None and accelerator.price is None:
        raise PlannerError(f"{accelerator.name} has no price in the catalogue: give --price for --max-cost.")
    tried = list(_growing(args, profile, accelerator, until=deadline, within=budget))
    if not tried:
        plan_cluster(args, profile, catalogue, Cluster.of(accelerator, MOST_DEVICES))
        raise PlannerError(f"no number of {accelerator.name} up to {MOST_DEVICES} divides this model and batch.")
    in_time = [plan for plan in tried if deadline is None or plan.seconds <= deadline]
    if not in_time:
        fastest = min(tried, key=lambda plan: plan.seconds)
        raise PlannerError(
            f"{args.gpus_for!r} cannot be kept with {accelerator.name}: the fastest of the clusters tried,"
            f" {fastest.cluster.devices} devices, takes"
            f" {show_seconds(fastest.seconds)}. A larger --batch lets more devices work."
        )
    affordable = [plan for plan in in_time if budget is None or _dollars(plan) <= budget]
    if not affordable:
        cheapest = min(in_time, key=_dollars)
        within = f" within {args.gpus_for}" if deadline is not None else ""
        raise PlannerError(
            f"{show_dollars(budget)} is too little{within} on {accelerator.name}: the cheapest plan,"
            f" {cheapest.cluster.devices} devices for {show_seconds(cheapest.seconds)}, costs"
            f" {show_dollars(_dollars(cheapest))}."
        )
    if deadline is not None:
        return min(affordable, key=lambda plan: plan.cluster.devices)
    return min(affordable, key=lambda plan: plan.seconds)


def _growing(
    args: Namespace, profile: Profile, accelerator: Accelerator, *, until: float | None, within: float | None
) -> Iterator[Plan]:
    """The best plan of ever larger clusters, until one keeps the deadline or none has become faster for a while."""
    slower, fastest = 0, float("inf")
    for devices in _sizes(accelerator, _floor(args, profile, accelerator, until)):
        plans = search(job_of(args, profile, devices), Cluster.of(accelerator, devices), pins_of(args))
        if not plans:
            continue
        yield plans[0]
        if until is not None and plans[0].seconds <= until:
            return
        slower = slower + 1 if plans[0].seconds >= fastest else 0
        fastest = min(fastest, plans[0].seconds)
        if slower == 4 or (until is None and within is not None and _dollars(plans[0]) > 4 * within):
            return


def _floor(args: Namespace, profile: Profile, accelerator: Accelerator, until: float | None) -> int:
    """Devices below which the deadline cannot be kept even at the peak rate."""
    if until is None:
        return 1
    job = job_of(args, profile, 1)
    rate = job.sustained or accelerator.peak(job.precision)
    return max(1, int(job.profile.model_flops(job.samples) / (rate * until)))


def _sizes(accelerator: Accelerator, least: int) -> Iterator[int]:
    """Device counts worth trying: parts of a node, then 1, 1.25, 1.5 and 1.75 times a power of two nodes."""
    node = accelerator.devices_per_node
    parts = [size for size in (1, 2, 4, 8, 16) if size < node]
    nodes = [(2**power * quarter) // 4 for power in range(2, 18) for quarter in (4, 5, 6, 7)]
    wholes = [node * count // 4 for count in nodes if count % 4 == 0]
    yield from (size for size in sorted({*parts, *wholes}) if least <= size <= MOST_DEVICES)


def _answer_compare(args: Namespace, profile: Profile, catalogue: Catalogue) -> Answer:
    plans, missing = [], []
    for name in args.compare.split(","):
        accelerator = accelerator_of(args, catalogue, name.strip())
        cluster = Cluster.of(accelerator, _compared_devices(args, catalogue))
        try:
            plans.append(_plans_for(args, profile, catalogue, cluster)[0])
        except PlannerError as error:
            missing.append(f"{accelerator.name}: {error}")
    if not plans:
        raise PlannerError("; ".join(missing))
    plans.sort(key=lambda plan: (plan.dollars is None, plan.dollars or plan.seconds))
    notes = (*missing, *_notes(args, plans[0]))
    shown = _named_rows(plans)
    return Answer(plans=tuple(plans), notes=notes, text="\n".join([*job_lines(plans[0].job), "", shown, "", *notes]))


def _named_rows(plans: list[Plan]) -> str:
    from lightning_3d.planner.report import HEADER, RESULTS, layout_cells, result_cells

    rows = [
        (plan.cluster.accelerator.name, f"{plan.cluster.devices}", *layout_cells(plan), *result_cells(plan))
        for plan in plans
    ]
    return table(("accelerator", "devices", *HEADER, *RESULTS), rows)


def _compared_devices(args: Namespace, catalogue: Catalogue) -> int:
    return cluster_of(args, catalogue, args.cluster).devices if args.cluster else 8


def _asked_cluster(args: Namespace, catalogue: Catalogue) -> Cluster:
    if args.cluster and args.accelerator:
        raise PlannerError("--cluster and --accelerator both name the hardware: give one.")
    if not (args.cluster or args.accelerator):
        raise PlannerError(
            'on what? Give --cluster 16x8xh100, or --accelerator h100 with --gpus-for "30 days" or --max-cost.'
        )
    if args.accelerator and args.gpus_for is None and args.max_cost is None:
        raise PlannerError(f'how many {args.accelerator}? Give --cluster, --gpus-for "30 days" or --max-cost 50000.')
    return cluster_of(args, catalogue, args.cluster or args.accelerator)


def _cluster_line(cluster: Cluster) -> str:
    device = cluster.accelerator
    price = "no list price: give --price" if device.price is None else str(device.price)
    return f"{cluster}: {cluster.devices} x {device.title or device.name}, {price}"


def _notes(args: Namespace, best: Plan) -> tuple[str, ...]:
    job, device = best.job, best.cluster.accelerator
    notes = []
    if args.tokens is None and args.samples is None:
        notes.append(f"assumed: {TOKENS_PER_PARAMETER} tokens per parameter (--tokens)")
    if args.batch is None:
        notes.append(f"assumed: {job.batch} samples per step (--batch)")
    notes.append(f"{best.device_hours:,.0f} device-hours, {best.kwh:,.0f} kWh")
    notes += by_hand(best) if job.profile.tokens > 1 else []
    if not device.runs_here:
        notes.append(f"{device.name} is priced and counted only: lightning_3d does not run on it.")
    return tuple(notes)


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
        f"rule of thumb, 13.3 A100-hours per billion tokens and billion parameters: {hours:,.0f} A100 80 GB hours"
    )
    return notes


def _dollars(plan: Plan) -> float:
    assert plan.dollars is not None, "checked before any cost is compared"
    return plan.dollars
