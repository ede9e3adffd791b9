"""The choice of a layout for given devices, for `strategy="3d"` and `layout="auto"`. It needs no process group."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd, prod

from lightning_3d.errors import LayoutError, PlannerError
from lightning_3d.layout import GradCompression, Layout, ZeroStage, not_with_experts
from lightning_3d.module.amounts import divisors, show_bytes, show_count
from lightning_3d.optim.state_bytes import Precision
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job, Options
from lightning_3d.tools.planner.priced_layout import Plan, price_layout
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.search import zero_stages

UNKNOWN_SHARE = 0.6
"""Share of a device that states may fill where activations are not known."""
FULL_SHARE = 0.9
"""Share of a device that states and activations may fill."""
GOOD_ENOUGH = 1.25
"""A simpler layout is taken if a sample takes at most this much more time: estimates are no better than that."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Degrees that the user gave; None leaves one to the planner."""

    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    experts: int | None = None
    zero: ZeroStage | None = None
    shard: int | None = None
    """Data ranks that share one sharded copy."""

    def __str__(self) -> str:
        names = {short: f"{short}_parallel_size" for short in ("data", "tensor", "pipeline", "context")}
        names |= {"experts": "expert_parallel_size", "zero": "zero_stage", "shard": "zero_shard_size"}
        given = {name: getattr(self, short) for short, name in names.items()}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Parallelism that a module allows, and the reasons for its limits."""

    tensor: bool = True
    pipeline: int | None = None
    """Most pipeline ranks that it can be cut over, None for as many as it has blocks."""
    experts: tuple[int, ...] = ()
    """Experts of each mixture to which data ranks can send tokens."""
    context: bool = False
    """True where context ranks may be tried, if nothing fits without them."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Samples of a data rank in one optimizer step."""

    samples: int
    """In one batch of the loader."""
    accumulate: int = 1
    """Batches per optimizer step."""


Pieces = Callable[[int, int], int]
"""(samples in a batch, pipeline ranks) -> microbatches."""


def choose_layout(
    profile: Profile,
    cluster: Cluster,
    *,
    loading: Loading | None = None,
    pieces: Pieces = lambda samples, ranks: min(samples, 4 * ranks),
    base: Layout | None = None,
    fixed: Fixed | None = None,
    ability: Ability | None = None,
    precision: Precision = "32",
    options: Options = Options(),  # noqa: B008
) -> tuple[Layout, str]:
    """A layout of `profile` for every device of `cluster`, and three lines that say what was chosen and why.

    With a measured profile and `loading`, the candidates fit and take at most a quarter longer per sample than the
    fastest. The simplest of them is chosen; plain data parallelism with ZeRO 1 is the simplest of all. A profile that
    was only counted gets the simplest layout whose states leave room for activations.

    `base` and `options` have everything that is not chosen here: schedule, recompute, offload ...
    """
    fixed, ability = fixed or Fixed(), ability or Ability()
    measured = loading is not None and profile.block_flops > 0
    loading = loading or Loading(samples=1)

    def price(layout: Layout) -> Plan:
        """`layout` as the strategy would run it: each data rank has its own batches, a pipeline cuts each."""
        count, given, context = 1, layout.num_microbatches, layout.context_parallel_size
        if layout.pipelined:
            count = pieces(loading.samples, layout.pipeline_parallel_size) if given == "auto" else given
        batch = loading.samples * loading.accumulate * layout.gradient_ranks
        own = replace(options, experts=layout.expert_parallel_size, context=context)
        part = profile.sliced(context)
        job = Job(profile=part, samples=batch, batch=batch, precision=precision, options=own)
        plan = price_layout(job, cluster, among_data(layout), micro=max(1, loading.samples // count))
        return replace(plan, layout=layout)  # a number of microbatches was only assumed

    def priced(context: int) -> list[Plan]:
        only = replace(fixed, context=context)
        return [*map(price, candidates(profile, cluster, base or Layout(), only, ability, options.compression))]

    plans = priced(fixed.context or 1)
    if not plans:
        raise LayoutError(
            f"no layout of {cluster.devices} ranks has {fixed}: leave one of them open, or start another number of"
            " processes."
        )
    found = plans
    if measured and ability.context and fixed.context is None and not _fitting(plans):
        longer = (priced(size) for size in divisors(cluster.devices)[1:])
        found = next(filter(_fitting, longer), plans)
    chosen = _best(found, measured)
    return chosen.layout, _because(chosen, plans[0], fixed, ability, measured)


def among_data(layout: Layout) -> Layout:
    """`layout` as the planner has it: context ranks are data ranks, each with a slice of a sample."""
    shard = layout.zero_shard_size and layout.zero_shard_size * layout.context_parallel_size
    return replace(layout, data_parallel_size=layout.gradient_ranks, context_parallel_size=1, zero_shard_size=shard)


def candidates(
    profile: Profile,
    cluster: Cluster,
    base: Layout,
    fixed: Fixed,
    ability: Ability,
    compression: GradCompression | None = None,
) -> Iterator[Layout]:
    """Layouts to choose from, the simplest first: no split, then tensor inside a node, then a pipeline, then both.

    Each is followed by those in which data ranks share experts.
    """
    context = fixed.context or 1
    devices = 0 if cluster.devices % context else cluster.devices // context
    sizes = [
        (experts, tensor, pipeline)
        for tensor in _tensor_sizes(profile, cluster, devices, fixed, ability)
        for pipeline in _pipeline_sizes(profile, devices // tensor, base, fixed, ability)
        for experts in _expert_sizes(cluster.devices // (tensor * pipeline), tensor, fixed, ability)
    ]
    for experts, tensor, pipeline in sorted(sizes, key=lambda size: (sum(n > 1 for n in size), prod(size), size)):
        data = devices // (tensor * pipeline)
        if fixed.data not in (None, data) or data % (fixed.shard or 1):
            continue
        layout = replace(
            base,
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            context_parallel_size=context,
            expert_parallel_size=experts,
            zero_shard_size=fixed.shard,
        )
        if experts > 1 and fixed.experts is None and not_with_experts(layout, fixed.shard, compression):
            continue
        yield from (replace(layout, zero_stage=stage) for stage in zero_stages(layout, base.offload, fixed.zero))


def _tensor_sizes(profile: Profile, cluster: Cluster, devices: int, fixed: Fixed, ability: Ability) -> list[int]:
    in_node = divisors(cluster.devices_per_node)
    able = [size for size in in_node if size == 1 or (ability.tensor and profile.can_split(size))]
    return [size for size in (able if fixed.tensor is None else [fixed.tensor]) if devices and devices % size == 0]


def _pipeline_sizes(profile: Profile, devices: int, base: Layout, fixed: Fixed, ability: Ability) -> list[int]:
    if fixed.pipeline is not None:
        return [fixed.pipeline] if devices % fixed.pipeline == 0 else []
    most = profile.layers // base.stages_per_rank if ability.pipeline is None else ability.pipeline
    return [size for size in divisors(devices) if size == 1 or (size <= most and base.offload == "none")]


def _expert_sizes(data: int, tensor: int, fixed: Fixed, ability: Ability) -> list[int]:
    if fixed.experts is not None:
        return [fixed.experts] if data % fixed.experts == 0 else []
    able = bool(ability.experts) and tensor == 1  # tensor ranks would all have the experts that data ranks share
    return [size for size in divisors(data) if size == 1 or (able and gcd(*ability.experts) % size == 0)]


def _best(plans: list[Plan], measured: bool) -> Plan:
    if not measured:
        return next((plan for plan in plans if _fills(plan) <= UNKNOWN_SHARE), None) or _leanest(plans)
    fitting = _fitting(plans)
    if not fitting:
        return _leanest(plans)
    fastest = min(map(_sample_seconds, fitting))
    return next(plan for plan in fitting if _sample_seconds(plan) <= GOOD_ENOUGH * fastest)


def _fitting(plans: list[Plan]) -> list[Plan]:
    return [plan for plan in plans if _fills(plan) <= FULL_SHARE]


def _leanest(plans: list[Plan]) -> Plan:
    """The layout that needs least, of those whose states alone fit: activations are an estimate, states are not."""
    memory = plans[0].cluster.accelerator.memory_gb * 1e9
    able = [plan for plan in plans if _states(plan) <= memory]
    plan = min(able or plans, key=_fills)
    if not able:
        raise PlannerError(
            f"{_what(plan)} does not fit on {plan.cluster}: weights, gradients and optimizer states alone need"
            f" {show_bytes(_states(plan))} of the {show_bytes(memory)} of a device in the leanest layout"
            f' ({plan.layout}). Use more or larger devices, or zero_stage=3 with offload="all".'
        )
    return plan


def _states(plan: Plan) -> float:
    return plan.peak.weights + plan.peak.gradients + plan.peak.optimizer


def _fills(plan: Plan) -> float:
    """Share of a device that the fullest rank needs."""
    return plan.peak.total / (plan.cluster.accelerator.memory_gb * 1e9)


def _sample_seconds(plan: Plan) -> float:
    return plan.time.total / plan.job.batch


def _because(plan: Plan, plain: Plan, fixed: Fixed, ability: Ability, measured: bool) -> str:
    what = "states and activations" if measured else "states, before activations,"
    share = f"{show_bytes(plan.peak.total)} of the {show_bytes(plan.cluster.accelerator.memory_gb * 1e9)} of a device"
    reasons = [_reason(plan, plain, measured), *ability.reasons, *([f"{fixed} is fixed"] if str(fixed) else [])]
    return (
        f"layout: {plan.layout} for {_what(plan)} on {plan.cluster}.\nmemory: {what} need {share}.\n"
        f"why: {'; '.join(reasons)}."
    )


def _reason(plan: Plan, plain: Plan, measured: bool) -> str:
    if _fills(plan) > FULL_SHARE:
        return "no layout fits for certain and this one needs least, so it may run out of memory"
    if plan is plain:
        return "it fits, and nothing simpler or clearly faster does"
    if _fills(plain) > (FULL_SHARE if measured else UNKNOWN_SHARE):
        return f"the simplest, {plain.layout}, would need {show_bytes(plain.peak.total)}"
    saved = 1 - _sample_seconds(plan) / _sample_seconds(plain)
    return f"a sample takes {saved:.0%} less time than with the simplest, {plain.layout}"


def _what(plan: Plan) -> str:
    profile = plan.job.profile
    return f"{profile.name} ({show_count(profile.parameters)} parameters)"
