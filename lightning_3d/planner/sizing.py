"""How many devices: the fewest that keep a deadline, the fastest that stay within a budget."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_3d.errors import PlannerError
from lightning_3d.planner.hardware import Accelerator, Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.plan import Plan
from lightning_3d.planner.search import Pins, search
from lightning_3d.planner.units import positive, show_dollars, show_seconds

MOST_DEVICES = 65536


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A deadline in seconds, a budget in dollars, or both, with at most `most` devices."""

    deadline: float | None = None
    budget: float | None = None
    most: int = MOST_DEVICES

    def __post_init__(self) -> None:
        if self.budget is not None:
            positive(self.budget, "a budget in dollars of")


def smallest(wish: Wish, accelerator: Accelerator, job_on: Callable[[int], Job], pins: Pins) -> Plan | None:
    """The smallest cluster that keeps the deadline within the budget, without a deadline the fastest within the budget;
    None where no cluster tried has a layout that fits. `job_on(devices)` is the job with a batch that suits them."""
    if wish.budget is not None and accelerator.price is None:
        raise PlannerError(f"{accelerator.name} has no price in the catalogue: give --price for --max-cost.")
    least = fewest(wish, accelerator, job_on(1))
    if least > wish.most:
        raise PlannerError(
            f"{show_seconds(wish.deadline or 0)} cannot be kept with {accelerator.name}: at the full peak rate it would"
            f" take {least:,} of them, more than {wish.most:,}."
        )
    tried = list(_growing(wish, accelerator, job_on, pins, least))
    if not tried:
        return None
    in_time = [plan for plan in tried if wish.deadline is None or plan.seconds <= wish.deadline]
    if not in_time:
        raise PlannerError(_too_slow(wish, accelerator, tried))
    affordable = [plan for plan in in_time if wish.budget is None or _dollars(plan) <= wish.budget]
    if not affordable:
        raise PlannerError(_too_dear(wish, accelerator, in_time))
    if wish.deadline is not None:
        return min(affordable, key=lambda plan: plan.cluster.devices)
    return min(affordable, key=lambda plan: plan.seconds)


def fewest(wish: Wish, accelerator: Accelerator, job: Job) -> int:
    """Devices below which the deadline cannot be kept even at the peak rate."""
    if wish.deadline is None:
        return 1
    rate = job.sustained or accelerator.peak(job.precision)
    return max(1, int(job.profile.model_flops(job.samples) / (rate * wish.deadline)))


def sizes(accelerator: Accelerator, least: int, most: int) -> Iterator[int]:
    """Device counts worth trying: parts of a node, then nodes in steps of a quarter of a power of two, and `most`."""
    node = accelerator.devices_per_node
    parts = [size for size in (1, 2, 4, 8, 16) if size < node]
    nodes = [2**power * quarters // 4 for power in range(18) for quarters in (4, 5, 6, 7)]
    yield from (size for size in sorted({*parts, *(node * count for count in nodes), most}) if least <= size <= most)


def _growing(
    wish: Wish, accelerator: Accelerator, job_on: Callable[[int], Job], pins: Pins, least: int
) -> Iterator[Plan]:
    """The best plan of ever larger clusters, until one keeps the deadline or four in a row are no faster."""
    slower, fastest = 0, float("inf")
    for devices in sizes(accelerator, least, wish.most):
        plan = next(iter(search(job_on(devices), Cluster.of(accelerator, devices), pins)), None)
        if plan is None:
            continue
        yield plan
        if wish.deadline is not None and plan.seconds <= wish.deadline:
            return
        slower = slower + 1 if plan.seconds >= fastest else 0
        fastest = min(fastest, plan.seconds)
        if slower == 4 or (wish.deadline is None and wish.budget is not None and _dollars(plan) > 4 * wish.budget):
            return


def _too_slow(wish: Wish, accelerator: Accelerator, tried: list[Plan]) -> str:
    fastest = min(tried, key=lambda plan: plan.seconds)
    return (
        f"{show_seconds(wish.deadline or 0)} cannot be kept with {accelerator.name}: the fastest of the clusters tried,"
        f" {_devices(fastest)}, takes {show_seconds(fastest.seconds)}. A larger --batch lets more of them"
        " work."
    )


def _too_dear(wish: Wish, accelerator: Accelerator, in_time: list[Plan]) -> str:
    cheapest = min(in_time, key=_dollars)
    within = "" if wish.deadline is None else f" within {show_seconds(wish.deadline)}"
    return (
        f"{show_dollars(wish.budget or 0)} is too little to train{within} on {accelerator.name}: the cheapest plan,"
        f" {_devices(cheapest)} for {show_seconds(cheapest.seconds)}, costs"
        f" {show_dollars(_dollars(cheapest))}."
    )


def _devices(plan: Plan) -> str:
    count = plan.cluster.devices
    return f"{count:,} device{'' if count == 1 else 's'}"


def _dollars(plan: Plan) -> float:
    assert plan.dollars is not None, "the price is checked before any cost is compared"
    return plan.dollars
