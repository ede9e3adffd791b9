"""Sends tensors between the ranks of one pipeline; errors name the message that a rank waited for."""

import pickle
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import IDLE, Ledger
from lightning_3d.errors import PeerError, RunError
from lightning_3d.faults import flight
from lightning_3d.layout import PIPELINE_AXIS
from lightning_3d.module.torch_private import named_range
from lightning_3d.pipeline.traced_tensor import not_a_view
from lightning_3d.ranks import agreement, talk
from lightning_3d.sandbox.trees import SIMPLE, leaves, map_leaves, tensors_in


class Spec:
    """Shape and type of a tensor to receive. No dataclass: dataclasses count as containers of a batch."""

    dim: int | None = None
    """The dimension of which a rank sends its part alone."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> None:
        self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad
        self.sent = shape
        """Of the message."""

    def __repr__(self) -> str:
        return f"Spec({self.shape}, {self.dtype}, {self.requires_grad}, {self.sent})"

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def divided(self, dim: int, sent: tuple[int, ...]) -> "Spec":
        """The spec of a message with a part of `dim`, of shape `sent`."""
        part = Spec(self.shape, self.dtype, self.requires_grad)
        part.dim, part.sent = dim, sent
        return part

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.sent, dtype=self.dtype, device=device)


class Parts:
    """Results of blocks of which each rank has a part, as another axis divides them. This axis divides none."""

    def sent(self, unit: str, index: int, spec: Spec) -> Spec:
        """The spec of the message with the tensor `index` of the results of `unit`."""
        return spec

    def own(self, tensor: Tensor, spec: Spec) -> Tensor:
        """The part of `tensor` that this rank sends."""
        return tensor

    def joined(self, own: Tensor, spec: Spec) -> Tensor:
        """The tensor of which this rank has received `own`."""
        return own

    def is_part(self, value: Any) -> bool:
        """True for a tensor of which this rank has a part."""
        return False

    def whole(self, value: Any) -> Any:
        return value


@dataclass
class Wire:
    """Sends to a neighbour and shares with all ranks of one pipeline."""

    group: dist.ProcessGroup
    device: torch.device
    ledger: Ledger = field(default_factory=Ledger)
    sending: list[tuple[dist.Work, Tensor, str]] = field(default_factory=list)
    shared: dict[Hashable, tuple[bytes, int]] = field(default_factory=dict)
    """The last header shared at each site, and how many numbers go with it."""
    parts: Parts = field(default_factory=Parts)

    def __post_init__(self) -> None:
        self.peers = Group(self.group, PIPELINE_AXIS, self.ledger, doing=named_range)
        self.rank, self.size = self.peers.rank, self.peers.size

    def send(self, tensors: Sequence[Tensor], to: int, tag: int, what: str) -> None:
        """Start sending; the tensors are kept until they have left, at the latest until `finish`."""
        self.sending = [entry for entry in self.sending if not entry[0].is_completed()]
        for tensor in tensors:
            data = tensor.detach().contiguous()
            with naming(what, to):
                work = self.peers.begin_send(data, to, tag)
            self.sending.append((work, data, what))

    def start_receive(self, specs: Sequence[Spec], source: int, tag: int, what: str) -> "Receipt":
        """Start receiving tensors of `specs`; their memory is allocated now."""
        buffers = [spec.empty(self.device) for spec in specs]
        works = []
        for buffer in buffers:
            with naming(what, source):
                works.append(self.peers.begin_receive(buffer, source, tag))
        return Receipt(buffers, works, what, source, self.ledger.waiting(IDLE))

    def finish(self) -> None:
        for work, _, what in self.sending:
            with naming(what), self.ledger.waiting(PIPELINE_AXIS):
                work.wait()
        self.sending = []

    def share(self, value: Any, source: int, site: Hashable) -> Any:
        """`value` of rank `source` on every rank: any nesting of tensors and plain values.

        Leaves that are neither (caches, modules) arrive as None. Nesting, shapes and strings are sent only when they
        differ from the last value of the same `site`. Else a value costs one message between hosts for all its Python
        numbers, one for all scalar tensors and one per larger tensor. No host waits for a device.
        """
        if self.size == 1:
            return value
        with naming("sharing a result", source), self.ledger.waiting(PIPELINE_AXIS):
            return self._share_mine(value, site) if self.rank == source else self._share_received(source, site)

    def _share_mine(self, value: Any, site: Hashable) -> Any:
        header = talk.pickled(map_leaves(_header, value), _Pickler)
        known, count = self.shared.get(site, (b"", 0))
        numbers = [float(leaf) for leaf in leaves(value) if _is_python_number(leaf)]
        changed = header != known
        self._send_numbers([float(len(header)), *[0.0] * count] if changed else [0.0, *numbers])
        if changed:
            self._send_numbers([*header])
            self._send_numbers(numbers)
            self.shared[site] = (header, len(numbers))
        tensors = [leaf.detach() for leaf in tensors_in(value)]
        if scalars := [tensor.to(self.device, torch.float64) for tensor in tensors if not tensor.ndim]:
            self.peers.broadcast(torch.stack(scalars), self.rank)
        for tensor in tensors:
            if tensor.ndim:
                self.peers.broadcast(tensor.contiguous(), self.rank)
        return value

    def _share_received(self, source: int, site: Hashable) -> Any:
        header, count = self.shared.get(site, (b"", 0))
        length, *numbers = talk.receive_numbers(1 + count, source, self.group)
        if length:
            header = bytes(map(int, talk.receive_numbers(int(length), source, self.group)))
            count = sum(isinstance(leaf, Number) for leaf in leaves(pickle.loads(header)))
            self.shared[site] = (header, count)
            numbers = talk.receive_numbers(count, source, self.group)
        outline, waiting = pickle.loads(header), iter(numbers)
        scalars = sum(isinstance(leaf, Spec) and not leaf.shape for leaf in leaves(outline))
        arrived = iter(self.peers.broadcast(torch.empty(scalars, dtype=torch.float64, device=self.device), source))
        return map_leaves(lambda leaf: self._arrived(leaf, waiting, arrived, source), outline)

    def _arrived(self, leaf: Any, numbers: Iterator[float], scalars: Iterator[Tensor], source: int) -> Any:
        if isinstance(leaf, Number):
            return leaf.kind(next(numbers))
        if not isinstance(leaf, Spec):
            return leaf
        data = self.peers.broadcast(leaf.empty(self.device), source) if leaf.shape else next(scalars).to(leaf.dtype)
        return not_a_view(data.requires_grad_()) if leaf.requires_grad and torch.is_grad_enabled() else data

    def _send_numbers(self, numbers: Sequence[float]) -> None:
        if numbers:
            self.peers.count("broadcast", talk.send_numbers(numbers, self.rank, self.group))

    def agree(self, value: Any) -> list[Any]:
        with naming("comparing results"):
            return talk.gather(value, self.group)

    def meet(self, at: str, error: Exception | None = None) -> None:
        """Return once every rank is `at` the same place. If one has an error, raise the first on all."""
        if self.size > 1 or error is not None:
            with naming("comparing progress", own=error):
                agreement.agree(error, at, self.group)


@dataclass
class Receipt:
    buffers: list[Tensor]
    works: list[Any]
    what: str
    source: int
    waiting: AbstractContextManager[None]
    """Counts the seconds of the wait. It is entered once."""

    def wait(self) -> list[Tensor]:
        with self.waiting:
            for work in self.works:
                with naming(self.what, self.source):
                    work.wait()
        return self.buffers


class naming:
    """Turn an error of the process group into one that names the operation. `own` is this rank's, and stays."""

    def __init__(self, what: str, peer: int | None = None, own: Exception | None = None) -> None:
        self.what, self.peer, self.own = what, peer, own
        self.doing = flight.doing(f"{what} on {PIPELINE_AXIS}")

    def __enter__(self) -> None:
        self.doing.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.doing.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, RunError) and error is not self.own:
            peer = "" if self.peer is None else f" (pipeline rank {self.peer})"
            raise PeerError(
                f"Pipeline: {self.what}{peer} did not end: {str(error).splitlines()[0]}. That rank failed, was stopped,"
                " or took longer than the timeout of the process group; its own log says more."
            ) from error


class Number:
    """A Python number in a header."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class _Pickler(talk.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Build a PackedSequence from its fields: its own `__new__`, which pickle would call, needs tensors."""
        if isinstance(value, PackedSequence):
            return type(value)._make, (tuple(value),)
        return super().reducer_override(value)


def _header(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Spec.of(leaf)
    if _is_python_number(leaf):
        return Number(type(leaf))
    if isinstance(leaf, SIMPLE):
        return leaf
    return leaf if (callable(leaf) or isinstance(leaf, np.ndarray | np.generic)) and _picklable(leaf) else None


def _picklable(leaf: Any) -> bool:
    try:
        pickle.dumps(leaf)
    except Exception:  # any failure to pickle means the same: it is not sent
        return False
    return not isinstance(leaf, nn.Module)


def _is_python_number(leaf: Any) -> bool:
    return type(leaf) in (int, float) and abs(leaf) < 1 << 53
