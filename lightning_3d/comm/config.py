"""`CommConfig`: the user's choices about gradient communication, and the objects that they name."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.comm.compression import CODECS, Compression, Elementwise, PowerSGD
from lightning_3d.comm.hierarchical import BetweenNodes, Hierarchical
from lightning_3d.errors import ConfigurationError, check_one_of
from lightning_3d.faults import flight
from lightning_3d.layout import POWERSGD_RANK
from lightning_3d.layout import GradCompression as GradCompression

GradSync = Literal["ring", "native", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """The way that gradients (and sharded parameters) are sent along the data axis."""

    grad_sync: GradSync = "ring"
    """Our ring, the library's own collectives, or a ring inside each node and one between nodes."""
    grad_compression: GradCompression | None = None
    """Send gradients in fewer bytes. Each is lossy; the loss is added to the next step's gradient."""
    error_feedback: bool = True
    """Keep the loss of compression and add it to the next gradient. Costs one fp32 copy of the gradients."""
    powersgd_rank: int = POWERSGD_RANK
    """Columns kept of each gradient matrix by "powersgd"."""
    ranks_per_node: int | None = None
    """Ranks of the data axis in one node, for "hierarchical"."""
    bucket_mb: float = 25.0
    """Gradients travel together in buckets of this size (stage 0)."""

    def __post_init__(self) -> None:
        check_one_of("grad_sync", self.grad_sync, get_args(GradSync))
        check_one_of("grad_compression", self.grad_compression, (None, *get_args(GradCompression)))
        if not isinstance(self.powersgd_rank, int) or self.powersgd_rank < 1:
            raise ConfigurationError(f"powersgd_rank={self.powersgd_rank!r} must be a whole number of at least 1.")
        if not self.bucket_mb > 0:
            raise ConfigurationError(f"bucket_mb={self.bucket_mb!r} must be larger than 0.")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"ranks_per_node={self.ranks_per_node!r} must be at least 1.")


def build_collectives(config: CommConfig, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> Group:
    """Return the collectives of `config.grad_sync` over `group`, all of whose ranks must call this."""
    if config.grad_sync == "native":
        return Group(group, axis, ledger, doing=flight.doing)
    if config.grad_sync == "ring":
        return Group(group, axis, ledger, RingWire(group), flight.doing)
    if config.ranks_per_node is None:
        raise ConfigurationError('grad_sync="hierarchical" needs ranks_per_node, the data ranks in each node.')
    return Hierarchical(group, ledger, axis, config.ranks_per_node)


def build_compression(config: CommConfig, collectives: Group) -> Compression | None:
    """Return the compression that `config.grad_compression` names, with a memory of its own."""
    name, feedback = config.grad_compression, config.error_feedback
    if name is None:
        return None
    if name == "powersgd":
        return PowerSGD(collectives, config.powersgd_rank, error_feedback=feedback)
    if isinstance(collectives, Hierarchical) and 1 < collectives.nodes < collectives.size:
        return BetweenNodes(collectives, CODECS[name], error_feedback=feedback)
    return Elementwise(collectives, CODECS[name], error_feedback=feedback)
