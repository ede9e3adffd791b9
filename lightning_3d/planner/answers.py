"""Answers of `lightning-3d plan`: for a cluster, a deadline, a budget, or several accelerators."""

from argparse import Namespace
from dataclasses import dataclass, replace

from lightning_3d.errors import PlannerError
from lightning_3d.planner.advice import counted_only, explain_misfit, notes_on, other_rates
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.plan_report import (
    HEADER,
    RESULTS,
    job_lines,
    layout_cells,
    memory_table,
    plans_table,
    result_cells,
    sent_line,
    setup_line,
    strategy_line,
    table,
    time_line,
)
from lightning_3d.planner.priced_layout import Plan
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.question import accelerator_of, catalogue_of, cluster_of, job_of, pins_of, profile_of
from lightning_3d.planner.search import distinct, leanest, search
from lightning_3d.planner.show import parse_duration
from lightning_3d.planner.sizing import MOST_DEVICES, Wish, smallest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Plans, best first, with notes and the text to print."""

    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    text: str


def answer(args: Namespace) -> Answer:
    """The answer to the question that `args` ask."""
    profile, catalogue = profile_of(args), catalogue_of(args)
    if args.compare is not None:
        return _answer_compare(args, profile, catalogue)
    plans = _plans_for(args, profile, catalogue, _asked_cluster(args, catalogue))
    best = plans[0]
    notes = notes_on(args, best)
    lines = [*job_lines(best.job), _cluster_line(best.cluster), "", plans_table(plans), "", memory_table(best)]
    lines += [
        f"of {best.cluster.accelerator.memory_gb:g} GB per device; {sent_line(best)}",
        setup_line(best),
        f"time of a step: {time_line(best)}",
        f"to train so: {strategy_line(best)}",
        "",
        *notes,
    ]
    return Answer(plans=tuple(plans), notes=notes, text="\n".join(lines))


def plan_cluster(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    """The best plans on `cluster`. Raise with advice if no layout fits."""
    job = job_of(args, profile, cluster.devices)
    plans = search(job, cluster, pins_of(args))
    if not plans:
        pins = pins_of(args)
        lean = leanest(job, cluster, replace(pins, recompute=pins.recompute or "none")) if args.sustained else None
        if lean is None:
            raise PlannerError(explain_misfit(job, cluster, pins, catalogue))
        return [lean]  # with a known rate the time is an answer, also where the memory is not
    return distinct(plans, args.top)


def _plans_for(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    if args.gpus_for is None and args.max_cost is None:
        return plan_cluster(args, profile, catalogue, cluster)
    deadline = None if args.gpus_for is None else parse_duration(args.gpus_for)
    if args.cluster is None:
        most, node = MOST_DEVICES, cluster.accelerator.devices_per_node
        cluster = Cluster.of(cluster.accelerator, most)
    else:
        most, node = cluster.devices, cluster.devices_per_node
    wish = Wish(deadline=deadline, budget=args.max_cost, most=most)
    machine = replace(cluster, nodes=1, devices_per_node=node)
    fit = smallest(wish, machine, lambda devices: job_of(args, profile, devices), pins_of(args))
    return plan_cluster(args, profile, catalogue, cluster if fit is None else fit.cluster)


def _answer_compare(args: Namespace, profile: Profile, catalogue: Catalogue) -> Answer:
    plans, missing = [], []
    for name in filter(None, (name.strip() for name in args.compare.split(","))):
        accelerator = accelerator_of(args, catalogue, name)
        cluster = Cluster.of(accelerator, _compared_devices(args, catalogue))
        try:
            plans.append(_plans_for(args, profile, catalogue, cluster)[0])
        except PlannerError as error:
            missing.append(f"{accelerator.name}: {error}")
    if not plans:
        raise PlannerError("; ".join(missing) or "--compare names nothing: write a100-80g,h100,tpu-v4.")
    plans.sort(key=lambda plan: (plan.dollars is None, plan.dollars or plan.seconds))
    notes = (*missing, *dict.fromkeys([*notes_on(args, plans[0]), *other_rates(plans), *counted_only(plans)]))
    shown = _named_rows(plans)
    return Answer(plans=tuple(plans), notes=notes, text="\n".join([*job_lines(plans[0].job), "", shown, "", *notes]))


def _named_rows(plans: list[Plan]) -> str:
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
