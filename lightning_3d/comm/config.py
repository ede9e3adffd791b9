"""What the user chooses about gradient communication."""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_3d.errors import ConfigurationError

GradSync = Literal["ring", "native", "hierarchical"]
GradCompression = Literal["bf16", "fp16", "int8", "powersgd"]


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How gradients (and sharded parameters) travel along the data axis."""

    grad_sync: GradSync = "ring"
    """Our ring, the library's own collectives, or a ring inside each node and one between nodes."""
    grad_compression: GradCompression | None = None
    """Send gradients in fewer bytes. Each is lossy; what is lost is added to the next step's gradient."""
    error_feedback: bool = True
    """Keep what compression lost and add it to the next gradient. Costs one fp32 copy of the gradients."""
    powersgd_rank: int = 4
    """Columns kept of each gradient matrix by "powersgd"."""
    ranks_per_node: int | None = None
    """Ranks of the data axis in one node, for "hierarchical"."""
    bucket_mb: float = 25.0
    """Gradients travel together in buckets of this size (stage 0)."""

    def __post_init__(self) -> None:
        if self.grad_sync not in get_args(GradSync):
            raise ConfigurationError(f"grad_sync={self.grad_sync!r} is not one of {_names(GradSync)}.")
        if self.grad_compression not in (None, *get_args(GradCompression)):
            raise ConfigurationError(
                f"grad_compression={self.grad_compression!r} is not None or one of {_names(GradCompression)}."
            )
        if not isinstance(self.powersgd_rank, int) or self.powersgd_rank < 1:
            raise ConfigurationError(f"powersgd_rank={self.powersgd_rank!r} must be a whole number of at least 1.")
        if not self.bucket_mb > 0:
            raise ConfigurationError(f"bucket_mb={self.bucket_mb!r} must be larger than 0.")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"ranks_per_node={self.ranks_per_node!r} must be at least 1.")


def _names(choices: object) -> str:
    return ", ".join(map(repr, get_args(choices)))
