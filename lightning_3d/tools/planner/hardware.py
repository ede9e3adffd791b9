"""`Accelerator` and `Cluster`: the rates and the price of a device, and the number of devices."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, gcd, prod
from types import MappingProxyType

from lightning_3d.errors import PlannerError
from lightning_3d.optim.state_bytes import Precision

_DTYPES = {"32": ("fp32",), "16-mixed": ("fp16", "bf16", "fp32"), "16-true": ("fp16", "bf16", "fp32")}
_BF16 = ("bf16", "fp16", "fp32")
_NAME = re.compile(r"[a-z][\w.-]*|\d{4}[a-z]*", re.IGNORECASE)
MOST_DEVICES = 10_000_000
"""In a cluster: ten times what has ever been built, and few enough to go through the ways to divide them."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars per device and hour: a list price, when it was read, and where."""

    dollars_per_hour: float
    date: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.dollars_per_hour:g} $/h" + (f" ({self.source}, {self.date})" if self.source else "")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device. GB are 1e9 bytes, links are one direction per device; see `conf/hardware/README.md`."""

    name: str
    title: str = ""
    source: str = ""
    """Origin of the numbers, with a date."""
    memory_gb: float
    peak_tflops: MappingProxyType[str, float] = field(hash=False)
    """Dense peak by dtype."""
    sustained_tflops: float | None = None
    """Rate of complete trainings, where published."""
    matrix_share: float = 0.70
    """Share of the peak that the model's matrix products reach. The default is that of an A100."""
    attention_share: float | None = None
    """The same of attention, with pairs counted that a causal mask leaves out; None where it is `matrix_share`."""
    memory_gb_per_s: float
    devices_per_node: int = 1
    link_domain: int = 0
    """Devices that the links of a node join, where they reach further: a rack, a pod."""
    node_link_gb_per_s: float
    cluster_link_gb_per_s: float
    link_share: float = 0.8
    """Share of a link's rate that collectives reach."""
    host_link_gb_per_s: float = 12
    host_memory_gb: float = 64
    """Host memory there is for each device, for offload."""
    disk_gb_per_s: float = 1.0
    """At which a node writes checkpoints."""
    reserved_gb: float = 1.5
    """Memory that the driver, the communication library and fragmentation take."""
    block_launch_us: float = 400
    """Microseconds that the host needs to start the kernels of one block, forward and backward."""
    start_us: float = 8.4
    """Microseconds that a ring takes to start. This and the hops are those of NCCL's model (src/graph/tuning.cc)."""
    node_hop_us: float = 3.4
    """Microseconds from one rank of a ring to the next in a node, however little is sent."""
    network_hop_us: float = 14.0
    """Microseconds from one rank of a ring to the next in another node."""
    tree_hop_us: float = 4.0
    """Microseconds of a hop in a node, in a tree."""
    failure_hours: float = 50_676
    """Hours between failures of one device: 419 in 54 days of 16,384 H100 (Llama 3, section 3.3.4); 0 for never."""
    slow_share: float = 0.005
    """Share of machines that are slow, of which one holds up all: MegaScale (arXiv 2402.15627); 0 for none."""
    step_us: float = 2000
    """Microseconds of a step that the training loop itself takes."""
    watts: float = 0
    runs_here: bool = True
    """False where lightning_3d can price the device and not run on it."""
    price: Price | None = None

    def peak(self, precision: Precision) -> float:
        """FLOP/s of matrix products under `precision` (the nearest dtype that the device has)."""
        return self.peak_tflops[self.rated_dtype(precision)] * 1e12

    @property
    def fp8(self) -> float:
        if "fp8" not in self.peak_tflops:
            raise PlannerError(f"{self.name} has no fp8 rate in the catalogue: leave out --fp8, or use another device.")
        return self.peak_tflops["fp8"] * 1e12

    def rated_dtype(self, precision: Precision) -> str:
        """The dtype whose peak stands for `precision`: its own where the device has one for it."""
        own = (dtype for dtype in _DTYPES.get(precision, _BF16) if dtype in self.peak_tflops)
        return next(own, max(self.peak_tflops, key=lambda dtype: self.peak_tflops[dtype]))

    def lacks(self, precision: Precision) -> str | None:
        """The dtype of `precision` where the device has no peak for it."""
        wanted = _DTYPES.get(precision, _BF16)[0]
        return None if wanted in self.peak_tflops else wanted


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` machines of `devices_per_node` devices."""

    accelerator: Accelerator
    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """Devices that are joined by the links of a node."""
        return min(self.devices, max(self.devices_per_node, self.accelerator.link_domain))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}x{self.accelerator.name}"

    @classmethod
    def of(cls, accelerator: Accelerator, devices: int) -> "Cluster":
        """`devices` devices in nodes as large as the accelerator's own, all of the same size."""
        if devices < 1:
            raise PlannerError(f"a cluster of {devices} devices cannot train anything: give at least 1.")
        nodes = ceil(devices / accelerator.devices_per_node)
        per_node = devices // nodes if devices % nodes == 0 else gcd(devices, accelerator.devices_per_node)
        return cls(accelerator=accelerator, nodes=devices // per_node, devices_per_node=per_node)

    @classmethod
    def shaped(cls, accelerator: Accelerator, nodes: int | None, devices: int | None) -> "Cluster":
        """A cluster of `nodes` of `devices`; without `nodes`, of `devices` (or 1) altogether."""
        if nodes is None:
            return cls.of(accelerator, 1 if devices is None else devices)
        return cls(accelerator=accelerator, nodes=nodes, devices_per_node=devices or 1)


def split_cluster(text: str, known: Collection[str] = ()) -> tuple[int | None, int | None, str]:
    """`"128x8xh100"` as `(128, 8, "h100")`, `"8xh100"` as `(None, 8, "h100")`, `"h100"` as `(None, None, "h100")`.

    Names in `known` may be any text and begin with digits (`7900xtx`); other names must look like one.
    """
    text = text.strip()
    if "+" in text and text.lower() not in known:
        raise PlannerError(
            f"cluster {text!r} has several kinds of devices: every step waits for the slowest rank. Plan all of them as"
            f" the slower kind, or each kind alone: --compare {','.join(part.strip() for part in text.split('+'))}"
        )
    parts = re.split("x", text, flags=re.IGNORECASE)
    digits = next((index for index, part in enumerate(parts[:2]) if not part.isdigit()), 2)
    readings = [(parts[:count], "x".join(parts[count:])) for count in range(min(digits, len(parts) - 1), -1, -1)]
    sizes, name = next((reading for reading in readings if reading[1].lower() in known), readings[0])
    if name.lower() not in known and not _NAME.fullmatch(name):
        raise PlannerError(f"cluster {text!r} is not NODESxDEVICESxNAME, as in 128x8xh100, 8xa100-80g or h100.")
    counts = [int(size) if len(size) <= 12 else MOST_DEVICES + 1 for size in sizes]
    if 0 in counts:
        raise PlannerError(f"cluster {text!r} has no devices: give at least 1x1.")
    if prod(counts) > MOST_DEVICES:
        raise PlannerError(f"cluster {text[:60]!r} is larger than any: give at most {MOST_DEVICES:,} devices.")
    return counts[0] if len(counts) == 2 else None, counts[-1] if counts else None, name
