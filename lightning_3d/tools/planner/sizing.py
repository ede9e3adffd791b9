"""The number of devices: the fewest that meet a deadline, the fastest within a budget."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from lightning_3d.errors import PlannerError
from lightning_3d.module.amounts import positive, show_dollars, show_seconds
from lightning_3d.tools.planner.hardware import Accelerator, Cluster
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.priced_layout import Plan

MOST_DEVICES = 65536
ROUND = (2 * 3 * 5 * 7) ** 30
"""A multiple of every size without a prime factor above 7: they divide a batch and a model in many ways."""
NEIGHBOURS = 8
"""Sizes next below an answer that are tried, round or not."""
DENSE = 16
"""Nodes up to which every size is tried."""
PATIENCE = 4
"""Sizes in a row that are no faster, after which the search ends."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A deadline in seconds, a budget in dollars, or both, with at most `most` devices."""

    deadline: float | None = None
    budget: float | None = None
    most: int = MOST_DEVICES

    def __post_init__(self) -> None:
        if self.budget is not None:
            positive(self.budget, "a budget in dollars of")

    def granted(self, plan: Plan) -> bool:
        """Return True if `plan` meets the deadline and the budget."""
        in_time = self.deadline is None or plan.seconds <= self.deadline
        return in_time and (self.budget is None or _dollars(plan) <= self.budget)


@dataclass(frozen=True)
class Sizes:
    """The clusters to choose from: parts of one node, or complete nodes like `node`."""

    node: Cluster
    best_on: Callable[[Cluster, float], Plan | None]
    """The fastest plan on a cluster that fits; one that takes more than so many seconds may be left out."""

    def best(self, devices: int, within: float | None = None) -> Plan | None:
        """The fastest plan on so many devices that fits, if one takes no more than `within` seconds."""
        per_node = min(devices, self.node.devices_per_node)
        cluster = replace(self.node, nodes=devices // per_node, devices_per_node=per_node)
        return self.best_on(cluster, inf if within is None else within)

    def sizes(self, least: int, most: int, *, dense: bool) -> list[int]:
        """Parts of a node, then complete nodes, and `most`.

        Dense sizes are all of few nodes, and round ones of more. Others are powers of two, of nodes also quarters.
        """
        node = self.node.devices_per_node
        if dense:
            parts = list(range(1, node))
            counts = [count for count in range(1, most // node + 1) if count <= DENSE or ROUND % count == 0]
        else:
            parts = [size for size in (1, 2, 4, 8, 16) if size < node]
            counts = [2**power * quarters // 4 for power in range(18) for quarters in (4, 5, 6, 7)]
        return sorted({size for size in (*parts, *(node * count for count in counts), most) if least <= size <= most})

    def below(self, size: int) -> list[int]:
        """The sizes next below `size`, largest first."""
        node = self.node.devices_per_node
        step = node if size > node else 1
        return [less for index in range(1, NEIGHBOURS + 1) if (less := size - index * step) > 0]


def smallest(wish: Wish, node: Cluster, job: Job, best_on: Callable[[Cluster, float], Plan | None]) -> Plan | None:
    """The plan on the fewest devices that meets the wish; without a deadline the fastest within the budget.

    None where no cluster has a layout that fits.
    """
    accelerator, sizes = node.accelerator, Sizes(node, best_on)
    if wish.budget is not None and accelerator.price is None:
        raise PlannerError(f"{accelerator.name} has no price in the catalogue: give --price for --max-cost.")
    least = fewest(wish, job, accelerator)
    if least > wish.most:
        raise PlannerError(
            f"{show_seconds(wish.deadline or 0)} cannot be met with {accelerator.name}: its matrix products alone need"
            f" {least:,} of them, more than {wish.most:,}."
        )
    tried = list(_growing(wish, sizes, least))
    granted = [plan for plan in tried if wish.granted(plan)]
    if not granted:
        in_time = [plan for plan in tried if wish.deadline is None or plan.seconds <= wish.deadline]
        if in_time:
            raise PlannerError(_too_dear(wish, in_time))
        fastest = _fastest(sizes, least, wish.most)
        if fastest is None:
            return None
        raise PlannerError(
            f"{show_seconds(wish.deadline or 0)} cannot be met with {accelerator.name}: the fastest of the clusters"
            f" tried, {_devices(fastest)}, takes {show_seconds(fastest.seconds)}. A larger --batch lets more of them"
            " work."
        )
    if wish.deadline is None:
        return _faster_neighbour(wish, sizes, min(granted, key=lambda plan: plan.seconds))
    return _smaller_neighbour(wish, sizes, granted[0], {plan.cluster.devices for plan in tried})


def fewest(wish: Wish, job: Job, device: Accelerator) -> int:
    """Devices below which the matrix products alone miss the deadline."""
    if wish.deadline is None:
        return 1
    rate = job.sustained or (device.fp8 if job.options.fp8 else device.peak(job.precision)) * device.matrix_share
    return max(1, ceil(job.profile.model_flops(job.samples) / (rate * wish.deadline) * (1 - 1e-9)))


def _growing(wish: Wish, sizes: Sizes, least: int) -> Iterator[Plan]:
    """The best plan of ever larger clusters: to the first that is granted, or until more devices do not help."""
    slower, fastest = 0, float("inf")
    for devices in sizes.sizes(least, wish.most, dense=wish.deadline is not None):
        plan = sizes.best(devices, wish.deadline)
        if plan is None:
            continue
        yield plan
        if wish.deadline is not None and wish.granted(plan):
            return
        slower = slower + 1 if plan.seconds >= fastest and wish.deadline is None else 0
        fastest = min(fastest, plan.seconds)
        dear = wish.budget is not None and _dollars(plan) > 4 * wish.budget
        if slower == PATIENCE or (wish.deadline is None and dear):
            return


def _smaller_neighbour(wish: Wish, sizes: Sizes, plan: Plan, tried: set[int]) -> Plan:
    """The smallest that is granted of `plan` and the sizes next below, again and again, without those `tried`."""
    for devices in sizes.below(plan.cluster.devices):
        fewer = None if devices in tried else sizes.best(devices, wish.deadline)
        if fewer is not None and wish.granted(fewer):
            return _smaller_neighbour(wish, sizes, fewer, tried)
    return plan


def _faster_neighbour(wish: Wish, sizes: Sizes, plan: Plan) -> Plan:
    """The fastest that is granted of `plan` and the sizes around it."""
    node, size = sizes.node.devices_per_node, plan.cluster.devices
    step = node if size >= node else 1
    around = [size + index * step for index in range(1, NEIGHBOURS + 1)] + sizes.below(size)
    others = [sizes.best(devices) for devices in around if devices <= wish.most]
    return min((plan, *(one for one in others if one and wish.granted(one))), key=lambda one: one.seconds)


def _fastest(sizes: Sizes, least: int, most: int) -> Plan | None:
    """The fastest plan on one of few sizes, the largest first: most are the fastest, and then others are not priced."""
    fastest: Plan | None = None
    for devices in reversed(sizes.sizes(least, most, dense=False)):
        plan = sizes.best(devices, fastest.seconds if fastest else None)
        fastest = min((one for one in (fastest, plan) if one), key=lambda one: one.seconds, default=None)
    return fastest


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
