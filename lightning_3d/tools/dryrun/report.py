"""The report of a dry run, for people and for programs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from textwrap import indent
from typing import Any

from lightning_3d.axes.ledger import Row
from lightning_3d.module.amounts import show_bytes, show_count
from lightning_3d.tools.dryrun.user_collectives import UserCall, unmatched
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.plan_report import table


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One simulated rank. Bytes count tensors only: the driver and the allocator need more."""

    rank: int
    where: str = ""
    parameters: int = 0
    """Bytes of parameters between steps."""
    gradients: int = 0
    """Bytes of gradients just before the optimizer's step."""
    optimizer: int = 0
    """Bytes of optimizer states."""
    peak: int = 0
    """Most bytes alive at once in a training step."""
    setup_peak: int = 0
    """Most bytes alive at once before training: a module that `__init__` builds is unsplit until it is sharded."""
    flops: int = 0
    """Of matrix products, convolutions and attention in one optimizer step."""
    offloaded: tuple[str, ...] = ()
    """Kinds of states that are in host memory: `parameters`, `gradients`, `optimizer`. The peak leaves them out."""
    sent: tuple[Row, ...] = ()
    """Messages in one optimizer step."""
    calls: tuple[UserCall, ...] = ()
    """Collectives of the user's own code, in their order."""
    warnings: tuple[str, ...] = ()
    error: str | None = None
    """The error that ended this rank before its first optimizer step."""
    log: str = ""
    """Its output, if it failed."""

    @property
    def activations(self) -> int:
        """Activations and buffers: the peak without parameters, gradients and optimizer states."""
        states = ("parameters", "gradients", "optimizer")
        return max(0, self.peak - sum(getattr(self, kind) for kind in states if kind not in self.offloaded))


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """All simulated ranks of one job."""

    cluster: Cluster
    layout: str
    ranks: tuple[RankReport, ...] = field(default=())
    chosen: str = ""
    """The choice of `layout="auto"` and its reasons; empty for a given layout."""

    @property
    def room(self) -> float:
        """Bytes of one device that are free for tensors."""
        return (self.cluster.accelerator.memory_gb - self.cluster.accelerator.reserved_gb) * 1e9

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors that would end the real job, each once."""
        calls = {rank.rank: rank.calls for rank in self.ranks if rank.error is None}
        found = [error for rank in self.ranks for error in self._errors(rank)]
        return tuple(dict.fromkeys([*found, *unmatched(calls)]))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for rank in self.ranks for text in rank.warnings))

    def _errors(self, rank: RankReport) -> Iterator[str]:
        if rank.error is not None:
            alike = all(rank.error == other.error for other in self.ranks)
            yield rank.error if alike else f"rank {rank.rank} ({rank.where}): {rank.error}"
        for what, needed in (("before training", rank.setup_peak), ("in a training step", rank.peak)):
            if needed > self.room:
                yield (
                    f"rank {rank.rank} ({rank.where}) does not fit: {show_bytes(needed)} {what}, and a"
                    f" {self.cluster.accelerator.name} has {show_bytes(self.room)} for tensors. {_REMEDIES[what]}"
                )

    def data(self) -> dict[str, Any]:
        ranks = [
            {
                **asdict(replace(each, calls=())),
                "sent": [row._asdict() for row in each.sent],
                "activations": each.activations,
            }
            for each in self.ranks
        ]
        return {
            "cluster": str(self.cluster),
            "world_size": self.cluster.devices,
            "layout": self.layout,
            "chosen": self.chosen,
            "memory_bytes": int(self.room),
            "ranks": ranks,
            "warnings": list(self.warnings),
            "errors": list(self.errors),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ranks = [rank for rank in self.ranks if rank.error is None]
        yield f"Dry run on {self.cluster} ({self.cluster.devices} ranks): {self.layout}"
        if self.chosen:
            yield self.chosen
        if ranks:
            yield ""
            yield f"memory per rank (a {self.cluster.accelerator.name} has {show_bytes(self.room)} for tensors)"
            yield indent(table(_MEMORY, [_memory_row(rank) for rank in ranks]), "  ")
            if not self.errors:
                step, before = max(rank.peak for rank in ranks), max(rank.setup_peak for rank in ranks)
                yield f"these ranks fit: at most {show_bytes(step)} in a step, {show_bytes(before)} before training"
            yield ""
            yield "sent per rank in one optimizer step"
            sent = ((rank.rank, row) for rank in ranks for row in rank.sent)
            rows = [(str(rank), x.axis, x.collective, f"{x.calls:,}", show_bytes(x.bytes)) for rank, x in sent]
            yield indent(table(_SENT, rows), "  ")
        for title, texts in (("warnings", self.warnings), ("errors", self.errors)):
            if texts:
                yield ""
                yield f"{title}:"
                yield from (f"  - {text}" for text in texts)


_REMEDIES = {
    "before training": "Of a module that configure_model() builds, a rank builds only its parts, one parameter at a"
    ' time. precision="bf16-true" halves them.',
    "in a training step": "Raise zero_stage, tensor_parallel_size, pipeline_parallel_size or num_microbatches, or use"
    " a smaller batch. `lightning-3d plan` searches for layouts that fit.",
}
_MEMORY = ("rank", "where", "parameters", "gradients", "optimizer", "activations", "peak", "at set-up", "FLOPs a step")
_SENT = ("rank", "axis", "collective", "calls", "bytes")


def _memory_row(rank: RankReport) -> tuple[str, ...]:
    sizes = (rank.parameters, rank.gradients, rank.optimizer, rank.activations, rank.peak, rank.setup_peak)
    return (str(rank.rank), rank.where, *map(show_bytes, sizes), show_count(rank.flops))
