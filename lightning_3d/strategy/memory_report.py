"""The memory of each rank, counted from its tensors, next to the plan of the start of `fit`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.module.host_memory import peak_bytes
from lightning_3d.module.show import show_bytes
from lightning_3d.optim.states import StateBytes
from lightning_3d.ranks.shards import local

_COLUMNS = ("weights", "gradients", "states", "buffers", "disk", "rest", "peak")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank after an optimizer step, and its peak."""

    weights: int
    gradients: int
    states: int
    """Of the optimizers."""
    buffers: int
    disk: int
    """Weights and states on a disk, which the other numbers leave out."""
    rest: int | None
    """At the peak: activations, gathered weights and messages. None on a CPU, which counts no allocations."""
    peak: int
    """Allocated on the GPU since training began; on a CPU the peak of the process since it began."""
    planned: StateBytes
    """In a step, by the ZeRO table: weights and gradients are gathered there up to stage 1 or 2."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all ranks. `str()` is a table."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> int:
        """The rank with the highest peak."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].peak)

    @property
    def line(self) -> str:
        """One line about the fullest rank."""
        rank = self.ranks[self.fullest]
        sizes = {name: getattr(rank, name) for name in _COLUMNS[:4]}
        on_disk = f" (and {show_bytes(rank.disk)} on the disk)" if rank.disk else ""
        counted = " + ".join(f"{show_bytes(size)} {name}" for name, size in sizes.items() if size)
        at_peak = "" if rank.rest is None else f", of which {show_bytes(rank.rest)} activations and gathered tensors"
        return (
            f"memory after the first epoch, rank {self.fullest}: {counted}{on_disk} after a step (planned in it:"
            f" {show_bytes(rank.planned.total)}), peak {show_bytes(rank.peak)}{at_peak}"
        )

    def __str__(self) -> str:
        heads = ["rank", *_COLUMNS, "planned"]
        rows = [heads]
        for number, rank in enumerate(self.ranks):
            sizes = [getattr(rank, name) for name in _COLUMNS]
            shown = ["-" if size is None else show_bytes(size) for size in sizes]
            rows.append([str(number), *shown, show_bytes(rank.planned.total)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def rank_memory(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    gradients: int,
    planned: StateBytes,
    device: torch.device,
    on_disk: Callable[[Tensor], bool],
) -> RankMemory:
    """The memory of this rank, with nothing gathered."""
    kinds = {
        "weights": _tensors(module.parameters()),
        "states": _tensors(value for each in optimizers for state in each.state.values() for value in state.values()),
        "buffers": _tensors(module.buffers()),
    }
    disk = sum(tensor.nbytes for tensors in kinds.values() for tensor in tensors if on_disk(tensor))
    kinds = {name: [tensor for tensor in tensors if not on_disk(tensor)] for name, tensors in kinds.items()}
    counted = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in kinds.items()}
    peak = peak_bytes(device)
    on_device = sum(tensor.nbytes for tensors in kinds.values() for tensor in tensors if tensor.device == device)
    rest = max(0, peak - on_device - gradients) if device.type == "cuda" else None
    return RankMemory(**counted, disk=disk, gradients=gradients, rest=rest, peak=peak, planned=planned)


def gradient_bytes(module: nn.Module) -> int:
    """The gradients that this rank has now."""
    return sum(tensor.nbytes for tensor in _tensors(parameter.grad for parameter in module.parameters()))


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors that take memory of this rank, each once."""
    here = [local(value) for value in values if isinstance(value, Tensor) and not value.is_meta]
    return list({id(tensor): tensor for tensor in here}.values())
