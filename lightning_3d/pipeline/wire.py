"""Tensors between the ranks of one pipeline, with errors that say what was being waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import PeerError
from lightning_3d.pipeline.microbatch import _SIMPLE, leaves, map_leaves
from lightning_3d.pipeline.traced import not_a_view


class Spec:
    """What one needs to know to receive a tensor. No dataclass: those count as containers of a batch."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> None:
        self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad

    def __repr__(self) -> str:
        return f"Spec({self.shape}, {self.dtype}, {self.requires_grad})"

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass
class Wire:
    """The ranks of one pipeline: sends to a neighbour, shares with all."""

    group: dist.ProcessGroup
    device: torch.device
    sending: list[tuple[dist.Work, Tensor, str]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, what: str) -> None:
        """Start sending; the tensors are kept until `finish`, or until a later send finds them gone."""
        self.sending = [entry for entry in self.sending if not entry[0].is_completed()]
        for tensor in tensors:
            data = tensor.detach().contiguous()
            with _naming(what, to):
                work = dist.isend(data, group=self.group, group_dst=to, tag=tag)
            assert work is not None
            self.sending.append((work, data, what))

    def start_receive(self, specs: Sequence[Spec], source: int, tag: int, what: str) -> "Receipt":
        """Start receiving tensors of `specs`; their memory is taken now."""
        buffers = [spec.empty(self.device) for spec in specs]
        works = []
        for buffer in buffers:
            with _naming(what, source):
                works.append(dist.irecv(buffer, group=self.group, group_src=source, tag=tag))
        return Receipt(buffers, works, what, source)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _, what in self.sending:
            with _naming(what, None):
                work.wait()
        self.sending = []

    def share(self, value: Any, source: int) -> Any:
        """`value` of rank `source` on every rank: any nesting, tensors sent as they are, other leaves pickled.

        Leaves that are neither tensors nor plain values (caches, modules) arrive as None.
        """
        if self.size == 1:
            return value
        mine = self.rank == source
        header = [map_leaves(_header, value) if mine else None]
        with _naming("sharing a result", source):
            dist.broadcast_object_list(header, group=self.group, group_src=source, device=self.device)
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)] if mine else []
        received: list[Tensor] = []
        for index, spec in enumerate(leaf for leaf in leaves(header[0]) if isinstance(leaf, Spec)):
            data = tensors[index].detach().contiguous() if mine else spec.empty(self.device)
            with _naming("sharing a result", source):
                dist.broadcast(data, group=self.group, group_src=source)
            if not mine:
                received.append(not_a_view(data.requires_grad_(spec.requires_grad and torch.is_grad_enabled())))
        if mine:
            return value
        incoming = iter(received)
        return map_leaves(lambda leaf: next(incoming) if isinstance(leaf, Spec) else leaf, header[0])

    def naming(self, what: str) -> "_naming":
        """Errors of the process group inside say `what` was being done."""
        return _naming(what, None)

    def agree(self, value: Any) -> list[Any]:
        """`value` of every rank."""
        gathered: list[Any] = [None] * self.size
        with _naming("comparing notes", None):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered


@dataclass
class Receipt:
    """Tensors on their way."""

    buffers: list[Tensor]
    works: list[Any]
    what: str
    source: int

    def wait(self) -> list[Tensor]:
        for work in self.works:
            with _naming(self.what, self.source):
                work.wait()
        return self.buffers


class _naming:
    """Turn an error of the process group into one that says what was being done."""

    def __init__(self, what: str, peer: int | None) -> None:
        self.what, self.peer = what, peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerError):
            peer = "" if self.peer is None else f" (pipeline rank {self.peer})"
            raise PeerError(
                f"Pipeline: {self.what}{peer} did not end: {str(error).splitlines()[0]}. That rank failed, was stopped,"
                " or took longer than the timeout of the process group; its own log says more."
            ) from error


def _header(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Spec.of(leaf)
    return leaf if isinstance(leaf, _SIMPLE) else None
