"""Questions of `lightning-3d plan` read into a job and a cluster, and their answers.

A question is for a cluster, a deadline, a budget, or several accelerators.
"""

from argparse import Namespace
from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from math import gcd, inf
from pathlib import Path
from typing import Any, get_args

from lightning_3d.errors import PlannerError
from lightning_3d.module.amounts import divisors, parse_count, parse_duration, positive, show_count
from lightning_3d.tools.planner import plan_report
from lightning_3d.tools.planner.advice import counted_only, explain_misfit, notes_on, old_price, other_rates
from lightning_3d.tools.planner.catalogue import Catalogue, apply_overrides, number
from lightning_3d.tools.planner.hardware import Accelerator, Cluster, Price
from lightning_3d.tools.planner.job import TOKENS_PER_PARAMETER, Job, Offloaded, Options, usual_batch
from lightning_3d.tools.planner.known_models import named_model, read_config
from lightning_3d.tools.planner.priced_layout import Plan, elapsed
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.search import Pins, leaders, leanest
from lightning_3d.tools.planner.sizing import MOST_DEVICES, Wish, fewest, smallest
from lightning_3d.tools.planner.transformer import MOST_SIZE, Transformer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Plans, best first, with notes and the text to print."""

    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    text: str
    profile: Profile


def answer(args: Namespace) -> Answer:
    catalogue = catalogue_of(args)
    sizes = ("model", "layers", "hidden", "heads", "vocabulary")
    if args.run_for is not None and all(getattr(args, name) is None for name in sizes):
        args = _with(args, model=_largest_for(args, catalogue))
    profile = profile_of(args)
    if args.compare is not None:
        return _answer_compare(args, profile, catalogue)
    plans = _lasting(args, _plans_for(args, profile, catalogue, _asked_cluster(args, catalogue)))
    best = plans[0]
    notes, device = notes_on(args, best), best.cluster.accelerator
    where = f"{best.cluster}: {best.cluster.devices} x {device.title or device.name}"
    where += f", {device.price or 'no list price: give --price'}"
    lines = [
        *plan_report.job_lines(best.job),
        where,
        "",
        plan_report.plans_table(plans, plan_report.COLUMNS),
        "",
        plan_report.memory_table(best),
        f"of {device.memory_gb:g} GB per device; {plan_report.sent_line(best)}",
        plan_report.setup_line(best),
        f"time of a step: {plan_report.time_line(best)}",
        *plan_report.strategy_block(best),
        "",
        *notes,
    ]
    return Answer(plans=tuple(plans), notes=notes, text="\n".join(lines), profile=profile)


def plan_cluster(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    """The best plans on `cluster`. Raise with advice if no layout fits."""
    plans = _fitting(args, profile, cluster)
    if not plans:
        job, pins = job_of(args, profile, cluster.devices), pins_of(args)
        lean = leanest(job, cluster, replace(pins, recompute=pins.recompute or "none")) if args.sustained else None
        if lean is None:
            raise PlannerError(explain_misfit(job, cluster, pins, catalogue))
        return [lean]  # with a known rate the time is an answer, also where the memory is not
    return plans


def _fitting(args: Namespace, profile: Profile, cluster: Cluster, within: float | None = None) -> list[Plan]:
    """The best plans that fit, with expert ranks, context ranks and offload where they decide and none is given.

    A search of many clusters, for plans `within` so many seconds, leaves out the last two.
    """

    def best(*choices: dict[str, Any]) -> list[Plan]:
        jobs = (job_of(_with(args, **choice), profile, cluster.devices) for choice in choices)
        most = [(job, inf if within is None else within / elapsed(job, cluster)) for job in jobs]
        found = [plan for job, limit in most for plan in leaders(job, cluster, pins_of(args), args.top, within=limit)]
        return sorted(found, key=lambda plan: plan.time.total / plan.job.batch * plan.job.options.context)[: args.top]

    plans = best(*({"expert_parallel": size} for size in _experts(args, profile, cluster)))
    if within is not None:
        return plans
    if not plans and args.context_parallel == 1 and profile.tokens > 1:  # a sample too long for one rank is shared
        sizes = (2**power for power in range(1, cluster.devices.bit_length()) if profile.tokens % 2**power == 0)
        plans = next(filter(None, (best({"context_parallel": size}) for size in sizes)), [])
    whole = not plans or plans[0].job.options.context == 1
    if whole and args.offload is None and args.recompute is None and (not plans or plans[0].layout.recompute == "full"):
        moved = best({"offload": "activations"})
        if moved and (not plans or moved[0].seconds < plans[0].seconds):
            plans = [*moved, *plans][: args.top]
    return plans


def _experts(args: Namespace, profile: Profile, cluster: Cluster) -> list[int]:
    """Sizes of the expert axis to try: no more than each of a few, and each a divisor of devices and experts."""
    if args.expert_parallel is not None:
        return [args.expert_parallel]
    sizes = divisors(gcd(cluster.devices, profile.experts)) if profile.experts else [1]
    return sorted({max(size for size in sizes if size <= most) for most in EXPERT_SIZES})


EXPERT_SIZES = (1, 8, 32)


def _with(args: Namespace, **changes: Any) -> Namespace:
    return Namespace(**{**vars(args), **changes})


def _lasting(args: Namespace, plans: list[Plan]) -> list[Plan]:
    """`plans` with as much data as they train on in the time of `--for`."""
    if args.run_for is None:
        return plans
    seconds = parse_duration(args.run_for)
    return [replace(plan, job=replace(plan.job, samples=plan.job.samples * seconds / plan.seconds)) for plan in plans]


def _largest_for(args: Namespace, catalogue: Catalogue) -> str:
    """The largest GPT that trains on 20 tokens for each parameter within the time of `--for`, as a size."""
    cluster, seconds = _asked_cluster(args, catalogue), parse_duration(args.run_for)
    sizes = [f"{round(100 * 1.25**power)}m" for power in range(43)]

    def in_time(size: str) -> bool:
        asked = _with(args, model=size)
        plans = _fitting(asked, profile_of(asked), cluster)
        return bool(plans) and plans[0].seconds <= seconds

    fits = bisect_left(sizes, True, key=lambda size: not in_time(size))
    if not fits:
        raise PlannerError(
            f"--for {args.run_for!r} trains no GPT of {sizes[0]} on 20 tokens a parameter: name a model."
        )
    return sizes[fits - 1]


def _plans_for(args: Namespace, profile: Profile, catalogue: Catalogue, cluster: Cluster) -> list[Plan]:
    if args.gpus_for is None and args.max_cost is None:
        return plan_cluster(args, profile, catalogue, cluster)
    if args.cluster is None:
        cluster = Cluster.of(cluster.accelerator, MOST_DEVICES)
    try:
        fit = _smallest(args, profile, cluster)
    except PlannerError as error:
        raise PlannerError(f"{error}{_met_with(args, catalogue, cluster)}") from None
    return plan_cluster(args, profile, catalogue, cluster if fit is None else fit.cluster)


def _smallest(args: Namespace, profile: Profile, cluster: Cluster) -> Plan | None:
    wish = Wish(deadline=deadline_of(args), budget=args.max_cost, most=cluster.devices)
    one = _with(args, top=1)
    return smallest(
        wish,
        replace(cluster, nodes=1),
        job_of(args, profile, 1),
        lambda where, within: next(iter(_fitting(one, profile, where, within)), None),
    )


def _met_with(args: Namespace, catalogue: Catalogue, cluster: Cluster) -> str:
    """The flags with which the wish is met, where kernels that save less meet it; empty where they do not."""
    if shape_of(args) is None or args.kernels is not None or (args.max_cost and cluster.accelerator.price is None):
        return ""
    wish = Wish(deadline=deadline_of(args), budget=args.max_cost, most=cluster.devices)
    for changes in ({"kernels": "fused"}, {"kernels": "fused", "precision": "bf16-true"}):
        asked = _with(args, **changes, top=1)
        profile, device = profile_of(asked), accelerator_of(asked, catalogue, cluster.accelerator.name)
        least = fewest(wish, job_of(asked, profile, 1), device)
        sizes = (2**power for power in range(least.bit_length(), wish.most.bit_length()))
        tried = (_fitting(asked, profile, Cluster.of(device, size), wish.deadline or inf) for size in sizes)
        fit = next((plans[0] for plans in tried if plans and wish.granted(plans[0])), None)
        if fit is not None:
            flags = " ".join(f"--{name} {value}" for name, value in changes.items())
            return f" With {flags} {fit.cluster.devices:,} of them do."
    return ""


def deadline_of(args: Namespace) -> float | None:
    return None if args.gpus_for is None else parse_duration(args.gpus_for)


def _answer_compare(args: Namespace, profile: Profile, catalogue: Catalogue) -> Answer:
    plans, missing = [], []
    for name in filter(None, (name.strip() for name in args.compare.split(","))):
        nodes, count, label = catalogue.split(name)
        accelerator = accelerator_of(args, catalogue, label)
        devices = cluster_of(args, catalogue, args.cluster).devices if args.cluster else 8
        cluster = Cluster.shaped(accelerator, nodes, count) if count else Cluster.of(accelerator, devices)
        try:
            plans.append(_lasting(args, _plans_for(args, profile, catalogue, cluster))[0])
        except PlannerError as error:
            missing.append(f"{accelerator.name}: {error}")
    if not plans:
        raise PlannerError("; ".join(missing) or "--compare names nothing: write a100-80g,h100,tpu-v4.")
    plans.sort(key=lambda plan: (plan.dollars is None, plan.dollars or plan.seconds))
    dates = [note for plan in plans for note in old_price(plan)]
    notes = (*missing, *dict.fromkeys([*notes_on(args, plans[0]), *dates, *other_rates(plans), *counted_only(plans)]))
    text = "\n".join(
        [*plan_report.job_lines(plans[0].job), "", plan_report.plans_table(plans, plan_report.COMPARED), "", *notes]
    )
    return Answer(plans=tuple(plans), notes=notes, text=text, profile=profile)


def _asked_cluster(args: Namespace, catalogue: Catalogue) -> Cluster:
    if args.cluster and args.accelerator:
        raise PlannerError("--cluster and --accelerator both name the hardware: give one.")
    if not (args.cluster or args.accelerator):
        if args.compare:
            raise PlannerError("--compare tells a model's plans on each cluster: name a model, or give one --cluster.")
        raise PlannerError(
            'on what? Give --cluster 16x8xh100, or --accelerator h100 with --gpus-for "30 days" or --max-cost.'
        )
    if args.accelerator and args.gpus_for is None and args.max_cost is None:
        raise PlannerError(f'how many {args.accelerator}? Give --cluster, --gpus-for "30 days" or --max-cost 50000.')
    return cluster_of(args, catalogue, args.cluster or args.accelerator)


def profile_of(args: Namespace) -> Profile:
    if args.sequence is not None and not 1 <= args.sequence <= MOST_SIZE:
        raise PlannerError(f"--sequence {args.sequence} must be at least 1 and at most {MOST_SIZE:g} tokens.")
    shape = shape_of(args)
    if shape is None:
        from lightning_3d.tools.planner.profile_module import profile_module

        for flag in ("attention", "kernels"):
            if getattr(args, flag) is not None:
                raise PlannerError(f"--{flag} is for models that the planner knows by their sizes, not {args.model}.")
        return profile_module(
            args.model, args.arg,
            precision=args.precision, tokens=args.sequence, inputs=args.inputs, frozen_bits=args.frozen_bits,
        )  # fmt: skip
    if args.arg or args.inputs is not None or args.frozen_bits is not None:
        raise PlannerError(f"--arg, --inputs and --frozen-bits are for a module.Class, and {args.model!r} is not one.")
    if args.sequence is not None:
        shape = shape.with_sequence(args.sequence)
    kinds: dict[str, Any] = {"attention": args.attention or "flash", "kernels": args.kernels or "eager"}
    return shape.profile(precision=args.precision, fp8=args.fp8, **kinds)


def job_of(args: Namespace, profile: Profile, devices: int) -> Job:
    """The training that `args` describe, in batches that suit `devices` unless the batch is given."""
    data = devices // (args.tensor * args.pipeline) if args.tensor and args.pipeline else 1
    batch = usual_batch(profile, devices, args.micro or 1, data) if args.batch is None else args.batch
    options = options_of(args)
    if options.experts > 1 and not profile.expert_parameters:
        raise PlannerError(f"--expert-parallel {options.experts}: {profile.name} has no experts. Leave it out.")
    if profile.experts % options.experts:
        raise PlannerError(
            f"--expert-parallel {options.experts} does not divide the {profile.experts} experts of {profile.name}."
        )
    if profile.tokens % options.context:
        raise PlannerError(
            f"--context-parallel {options.context} does not divide the {profile.tokens} tokens of a sample."
        )
    slices = options.context  # of each sample; context ranks take one each
    job = Job(
        profile=profile.sliced(slices),
        samples=_samples(args, profile) * slices,
        batch=batch * slices,
        options=options,
        precision=args.precision,
        optimizer=args.optimizer,
        sustained=None if args.sustained is None else positive(args.sustained, "--sustained") * 1e12,
    )
    if job.steps < 1:
        of = f" of {profile.tokens:,} tokens" if profile.tokens > 1 else ""
        raise PlannerError(
            f"{show_count(job.samples)} samples{of} are less than one step of {batch:,} samples: give more --tokens or"
            " --samples, or a smaller --batch."
        )
    return job


def options_of(args: Namespace) -> Options:
    _check_sizes(args, "context_parallel", "expert_parallel", "imbalance")
    return Options(
        compression=args.compression,
        offload=args.offload if args.offload in get_args(Offloaded) else None,
        fp8=args.fp8,
        context=args.context_parallel,
        experts=args.expert_parallel or 1,
        imbalance=args.imbalance,
    )


def pins_of(args: Namespace) -> Pins:
    _check_sizes(args, "tensor", "pipeline", "micro", "stages_per_rank", "shard")
    given = {field.name: getattr(args, field.name) for field in fields(Pins)}
    return Pins(**{**given, "offload": "none" if args.offload in get_args(Offloaded) else args.offload})


def _check_sizes(args: Namespace, *names: str) -> None:
    for name in names:
        size = getattr(args, name)
        if size is not None and size < 1:
            raise PlannerError(f"--{name.replace('_', '-')} {size} must be at least 1.")


def catalogue_of(args: Namespace) -> Catalogue:
    return Catalogue.load(*(Path(path) for path in args.hardware))


def accelerator_of(args: Namespace, catalogue: Catalogue, name: str) -> Accelerator:
    own = {"attention_share": None} if args.kernels == "fused" else {}  # attention that was written for the device
    accelerator = apply_overrides(catalogue.find(name, **own), args.set)
    if args.price is not None:
        accelerator = replace(accelerator, price=Price(dollars_per_hour=number("price", args.price, "--price")))
    peak = accelerator.peak(args.precision) / 1e12
    if args.sustained is not None and args.sustained > peak:
        raise PlannerError(
            f"--sustained {args.sustained:g} is above the peak of {accelerator.name}, {peak:g} TFLOP/s at"
            f" {args.precision}: give what a device sustains, or its true peak with --set peak_tflops=."
        )
    return accelerator


def cluster_of(args: Namespace, catalogue: Catalogue, text: str) -> Cluster:
    nodes, devices, name = catalogue.split(text)
    return Cluster.shaped(accelerator_of(args, catalogue, name), nodes, devices)


def refuse_ignored(args: Namespace) -> None:
    """Raise if a flag would have no effect with the others: it is a slip of the hand."""
    pipeless = [name for name in ("schedule", "stages_per_rank") if getattr(args, name) is not None]
    if args.pipeline == 1 and pipeless:
        raise PlannerError(f"--{pipeless[0].replace('_', '-')} has no effect with --pipeline 1: leave one out.")
    if args.epochs is not None and args.tokens is None and args.samples is None:
        raise PlannerError("--epochs multiplies --tokens or --samples: give one of them too.")
    if args.run_for is not None and (args.tokens or args.samples or args.gpus_for or args.max_cost):
        raise PlannerError(
            "--for asks for the amount of data: leave out --tokens, --samples, --gpus-for and --max-cost."
        )
    if args.accelerator is not None and args.compare is not None:
        raise PlannerError("--accelerator and --compare both name the hardware: give one.")
    if args.price is not None and any(text.partition("=")[0].startswith("price") for text in args.set):
        raise PlannerError("--price and --set price= both set the price of a device: give one.")
    for name in ("plot", "html"):
        if getattr(args, name) == "":
            raise PlannerError(f"--{name} '' names no file: write --{name} plan.{name}.")


def shape_of(args: Namespace) -> Transformer | None:
    """The transformer that `args` name, or None where they name a `module.Class`."""
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "vocabulary")}
    if args.model is None or args.model.strip() in ("", "custom"):
        return _custom(sizes, args.sequence)
    given = [name for name, size in sizes.items() if size is not None]
    if given:
        raise PlannerError(f"--{given[0]} describes a model of your own: leave out {args.model!r} or the flag.")
    path = Path(args.model)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path / "config.json" if path.is_dir() else path)
    head, _, tail = args.model.rpartition(".")
    if head and all(part.isidentifier() for part in (*head.split("."), tail)):
        return None
    return named_model(args.model)


def _custom(sizes: dict[str, int | None], sequence: int | None) -> Transformer:
    missing = [name for name, size in {**sizes, "sequence": sequence}.items() if size is None]
    if missing:
        raise PlannerError(
            f"which model? Give a name (llama-7b), a size (7b), a config.json, a module.Class, or all of --layers"
            f" --hidden --heads --vocabulary --sequence (missing: {', '.join(missing)})."
        )
    known: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return Transformer(**known, sequence=sequence or 1, positions=sequence or 1)


def _samples(args: Namespace, profile: Profile) -> float:
    if args.tokens is not None and args.samples is not None:
        raise PlannerError("--tokens and --samples both set the amount of data: give one.")
    epochs = 1.0 if args.epochs is None else positive(args.epochs, "--epochs")
    if args.samples is not None:
        return positive(parse_count(args.samples, "--samples") * epochs, "--samples x --epochs,")
    if args.tokens is not None:
        return positive(parse_count(args.tokens, "--tokens") * epochs, "--tokens x --epochs,") / profile.tokens
    return TOKENS_PER_PARAMETER * profile.parameters / profile.tokens
