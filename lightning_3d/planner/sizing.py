"""How many devices: the fewest that keep a deadline, the fastest that stay within a budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from lightning_3d.errors import PlannerError
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.priced_layout import Plan
from lightning_3d.planner.search import Pins, search
from lightning_3d.planner.show import positive, show_dollars, show_seconds

MOST_DEVICES = 65536
LIKELY = 0.95
"""Of the device-seconds of what was tried, the least that another number of devices is thought to come to."""
_LOOKS = 16
"""Sizes between two that are known which are tried at once."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A deadline in seconds, a budget in dollars, or both, with at most `most` devices."""

    deadline: float | None = None
    budget: float | None = None
    most: int = MOST_DEVICES

    def __post_init__(self) -> None:
        if self.budget is not None:
            positive(self.budget, "a budget in dollars of")

    def kept_by(self, plan: Plan) -> bool:
        """Whether `plan` keeps the deadline."""
        return self.deadline is None or plan.seconds <= self.deadline


@dataclass(frozen=True)
class Sizes:
    """The clusters that can be had: parts of one node, or whole nodes like `node`."""

    node: Cluster
    job_on: Callable[[int], Job]
    """The job with a batch that suits so many devices."""
    pins: Pins

    def cluster(self, devices: int) -> Cluster:
        per_node = min(devices, self.node.devices_per_node)
        return Cluster(accelerator=self.node.accelerator, nodes=devices // per_node, devices_per_node=per_node)

    def best(self, devices: int) -> Plan | None:
        """The fastest plan on so many devices that fits."""
        return next(iter(search(self.job_on(devices), self.cluster(devices), self.pins)), None)

    def coarse(self, least: int, most: int) -> list[int]:
        """Parts of a node by powers of two, then nodes in steps of a quarter of a power of two, and `most`."""
        node = self.node.devices_per_node
        parts = [size for size in (1, 2, 4, 8, 16) if size < node]
        nodes = [2**power * quarters // 4 for power in range(18) for quarters in (4, 5, 6, 7)]
        every = sorted({*parts, *(node * count for count in nodes), most})
        return [size for size in every if least <= size <= most]

    def below(self, least: float, end: int) -> list[int]:
        """Every size from `least` to below `end`."""
        node = self.node.devices_per_node
        parts = range(max(1, ceil(least)), min(end, node))
        return [*parts, *range(node * max(1, ceil(least / node)), end, node)]


def smallest(wish: Wish, node: Cluster, job_on: Callable[[int], Job], pins: Pins) -> Plan | None:
    """The smallest cluster of nodes like `node` that keeps the deadline within the budget, without a deadline the
    fastest within the budget; None where no cluster tried has a layout that fits. `job_on(devices)` is the job with a
    batch that suits them."""
    accelerator, sizes = node.accelerator, Sizes(node, job_on, pins)
    if wish.budget is not None and accelerator.price is None:
        raise PlannerError(f"{accelerator.name} has no price in the catalogue: give --price for --max-cost.")
    least = fewest(wish, sizes)
    if least > wish.most:
        raise PlannerError(
            f"{show_seconds(wish.deadline or 0)} cannot be kept with {accelerator.name}: at the full peak rate it would"
            f" take {least:,} of them, more than {wish.most:,}."
        )
    tried = list(_growing(wish, sizes, least))
    if not tried:
        return None
    in_time = [plan for plan in tried if wish.kept_by(plan)]
    if not in_time:
        raise PlannerError(_too_slow(wish, tried))
    if wish.deadline is not None:
        in_time += _shrinking(wish, sizes, tried)
    affordable = [plan for plan in in_time if wish.budget is None or _dollars(plan) <= wish.budget]
    if not affordable:
        raise PlannerError(_too_dear(wish, in_time))
    if wish.deadline is not None:
        return min(affordable, key=lambda plan: plan.cluster.devices)
    return min(affordable, key=lambda plan: plan.seconds)


def fewest(wish: Wish, sizes: Sizes) -> int:
    """Devices below which the deadline cannot be kept even at the peak rate."""
    if wish.deadline is None:
        return 1
    job = sizes.job_on(1)
    rate = job.sustained or sizes.node.accelerator.peak(job.precision)
    return max(1, int(job.profile.model_flops(job.samples) / (rate * wish.deadline)))


def _growing(wish: Wish, sizes: Sizes, least: int) -> Iterator[Plan]:
    """The best plan of ever larger clusters, until one keeps the deadline or four in a row are no faster."""
    slower, fastest = 0, float("inf")
    for devices in sizes.coarse(least, wish.most):
        plan = sizes.best(devices)
        if plan is None:
            continue
        yield plan
        if wish.deadline is not None and plan.seconds <= wish.deadline:
            return
        slower = slower + 1 if plan.seconds >= fastest else 0
        fastest = min(fastest, plan.seconds)
        if slower == 4 or (wish.deadline is None and wish.budget is not None and _dollars(plan) > 4 * wish.budget):
            return


def _shrinking(wish: Wish, sizes: Sizes, tried: Sequence[Plan]) -> Iterator[Plan]:
    """Plans that keep the deadline on fewer devices than the last of `tried`, down to the fewest.

    Sizes that would have to be clearly more efficient than any that was tried are passed over. Of many a sixteenth is
    tried, and then all below the first that keeps it.
    """
    work = min(plan.cluster.devices * plan.seconds for plan in tried)
    least, end = LIKELY * work / (wish.deadline or 1.0), tried[-1].cluster.devices
    while between := sizes.below(least, end):
        stride = ceil(len(between) / _LOOKS)
        looks = between[stride - 1 :: stride]
        found = next(((size, plan) for size in looks if (plan := sizes.best(size)) and wish.kept_by(plan)), None)
        if found is not None:
            end = found[0]
            yield found[1]
        if stride == 1:
            return
        index = looks.index(end) if found is not None else len(looks)
        least = looks[index - 1] + 1 if index else least


def _too_slow(wish: Wish, tried: list[Plan]) -> str:
    fastest = min(tried, key=lambda plan: plan.seconds)
    return (
        f"{show_seconds(wish.deadline or 0)} cannot be kept with {fastest.cluster.accelerator.name}: the fastest of the"
        f" clusters tried, {_devices(fastest)}, takes {show_seconds(fastest.seconds)}. A larger --batch lets more of"
        " them work."
    )


def _too_dear(wish: Wish, in_time: list[Plan]) -> str:
    cheapest = min(in_time, key=_dollars)
    within = "" if wish.deadline is None else f" within {show_seconds(wish.deadline)}"
    return (
        f"{show_dollars(wish.budget or 0)} is too little to train{within} on {cheapest.cluster.accelerator.name}: the"
        f" cheapest plan, {_devices(cheapest)} for {show_seconds(cheapest.seconds)}, costs"
        f" {show_dollars(_dollars(cheapest))}."
    )


def _devices(plan: Plan) -> str:
    count = plan.cluster.devices
    return f"{count:,} device{'' if count == 1 else 's'}"


def _dollars(plan: Plan) -> float:
    assert plan.dollars is not None, "the price is checked before any cost is compared"
    return plan.dollars
