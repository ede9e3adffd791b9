"""Devices that serve a model: weights and the cache of keys and values in memory, both read once for each token.

The formulas are those of Pope et al., "Efficiently Scaling Transformer Inference" (2022). Rates are those of the data
sheet, so that tokens per second are an upper bound.
"""

from dataclasses import dataclass
from math import ceil

from lightning_3d.errors import PlannerError
from lightning_3d.module.show import positive, show_bytes, show_dollars
from lightning_3d.optim.states import Precision, number_bytes
from lightning_3d.tools.planner.hardware import Accelerator
from lightning_3d.tools.planner.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A model, its users at one time, and the tokens that each of them has and gets."""

    model: Transformer
    device: Accelerator
    precision: Precision
    users: int
    context: int
    """Tokens of each user in the cache."""
    rate: float
    """Tokens per second for each user."""

    def __post_init__(self) -> None:
        for name in ("users", "context", "rate"):
            positive(getattr(self, name), f"--{name}")

    @property
    def number(self) -> int:
        """Bytes of a weight, a key or a value."""
        return number_bytes(self.precision).product

    @property
    def weights(self) -> float:
        return self.model.parameters * self.number

    @property
    def cache(self) -> float:
        """Bytes of keys and values of one user."""
        return 2 * self.model.layers * self.model.key_width * self.number * self.context

    def fitting(self, group: int) -> int:
        """Users whose caches fit next to the weights on `group` devices."""
        room = group * (self.device.memory_gb - self.device.reserved_gb) * 1e9 - self.weights
        return max(0, int(room / self.cache))

    def tokens_per_second(self, group: int, users: int) -> float:
        """Tokens per second of `group` devices for `users` at once: bound by memory or by products."""
        read = (self.weights + users * self.cache) / (group * self.device.memory_gb_per_s * 1e9)
        core = 4 * self.context * self.model.query_width * self.model.layers
        compute = users * (2 * self.model.parameters + core) / (group * self.device.peak(self.precision))
        return users / max(read, compute)

    def groups(self) -> list[int]:
        """Devices that may share one copy: those of a node that divide the heads."""
        most = max(self.device.devices_per_node, self.device.link_domain)
        heads = self.model.kv_heads or self.model.heads
        return [size for size in range(1, most + 1) if heads % size == 0 and self.fitting(size)]

    def users_of(self, group: int) -> int:
        """Most users of a copy on `group` devices who each get the rate; 0 where not even one does."""
        users = min(self.fitting(group), self.users)
        while users and self.tokens_per_second(group, users) < users * self.rate:
            users -= max(1, users // 50)
        return users

    def answer(self) -> tuple[int, int, int]:
        """(devices of a copy, users of a copy, copies) with the fewest devices."""
        able = [(size, users) for size in self.groups() if (users := self.users_of(size))]
        if not able:
            raise PlannerError(
                f"{self.model.name} cannot be served with {self.device.name}: no group of devices that shares its heads"
                f" has room for {show_bytes(self.weights)} of weights and {show_bytes(self.cache)} for each user at"
                f" {self.rate:g} tokens per second. Use a larger device, a shorter --context or a lower --rate."
            )
        size, users = min(able, key=lambda both: (both[0] * ceil(self.users / both[1]), both[0]))
        return size, users, ceil(self.users / users)

    def lines(self) -> list[str]:
        """The answer with its formulas, for people."""
        size, users, copies = self.answer()
        devices, speed = size * copies, self.tokens_per_second(size, users)
        by_hand = self.rate * self.users * size / speed
        price = self.device.price
        cost = f", {show_dollars(devices * price.dollars_per_hour)} an hour" if price else ""
        return [
            f"{self.model.name} for {self.users:,} users of {self.context:,} tokens at {self.rate:g} tokens per second",
            f"{devices:,} x {self.device.title or self.device.name}: {copies} copies on {size} each{cost}",
            f"weights: {self.model.parameters:,} x {self.number} bytes = {show_bytes(self.weights)}",
            f"cache of a user: 2 x {self.model.layers} layers x {self.model.key_width} x {self.number} bytes x"
            f" {self.context:,} tokens = {show_bytes(self.cache)}; {self.fitting(size):,} fit on a copy",
            f"at most {speed:,.0f} tokens per second of a copy: all weights and caches are read for each token of all",
            f"by hand, tokens per request / tokens per second x requests per minute / 60: {by_hand:.1f} devices; the"
            " difference is the memory, and copies are complete",
            "rates are those of the data sheet: an upper bound. lightning_3d trains; serve with an inference engine",
        ]
