"""Gradients in fewer bytes, with error feedback: the loss of a rank's message is added to its next gradient."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_3d.axes.group import Group
from lightning_3d.errors import CheckpointError
from lightning_3d.layout import INT8_CHUNK

_TAG = 2
PORTION = 1 << 20
"""Numbers that are encoded while those before them travel."""
AVERAGE = "/average"
"""Suffix of a key: under it a rank remembers the loss of its shard of the average, which it sends to all ranks."""


class Compression(ABC):
    """Averages gradients over the ranks of `collectives`, lossily; all ranks end with the same bits.

    Gradients come with keys (names of parameters) under which what was lost is remembered. That memory is part of the
    training state.
    """

    def __init__(self, collectives: Group) -> None:
        self.collectives = collectives
        self.memory: dict[str, Tensor] = {}

    @abstractmethod
    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        """Average each gradient in place."""

    @abstractmethod
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        """Write this rank's shard of each average. `inputs` are flat, of N equal shards; `widths` elements a row."""

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that this rank has still to add."""
        return {key: value.clone() for key, value in self.memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"the compression state of {key!r} is a {type(value).__name__}, not a tensor.")
        self.memory = {key: value.clone() for key, value in state.items()}

    def recall(self, key: str, values: Tensor) -> None:
        """Add the loss under `key` to `values`, once."""
        lost = self.memory.pop(key, None)
        if lost is not None and lost.numel() == values.numel():
            values.add_(lost.to(values.device).reshape(values.shape))

    def remember(self, key: str, values: Tensor, sent: Tensor) -> None:
        """Keep what `sent` lacks of `values`. Overflow is not kept, or one bad step would spoil all later ones."""
        self.memory[key] = (values - sent).nan_to_num_(0.0, 0.0, 0.0)


class Codec(ABC):
    """Encodes each row of an fp32 matrix by itself. A row can be sent and decoded without the others.

    `widths` are the numbers of a row that belong to each parameter. The encoding of a parameter does not depend on the
    other parameters of the row. Its copies on other tensor ranks or stages are in other rows and must stay equal.
    """

    @abstractmethod
    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        """Rows of the wire's type."""

    @abstractmethod
    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        """fp32 rows. Infinities and NaNs that went in come out as one or the other."""


class Half(Codec):
    """bf16 or fp16. Finite values beyond the type's range become its largest one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.largest = dtype, torch.finfo(dtype).max

    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        return torch.where(rows.isinf(), rows, rows.clamp(-self.largest, self.largest)).to(self.dtype)

    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        return wire.float()


class Int8(Codec):
    """One byte per number and one fp32 scale per `chunk` numbers of a parameter."""

    def __init__(self, chunk: int = INT8_CHUNK) -> None:
        self.chunk = chunk

    def encode(self, rows: Tensor, widths: Sequence[int]) -> Tensor:
        padded = [pad(part, (0, -part.shape[1] % self.chunk)) for part in rows.split(list(widths), dim=1)]
        chunks = torch.cat(padded, dim=1).view(len(rows), -1, self.chunk)
        scales = chunks.abs().amax(dim=2, keepdim=True) / 127
        steps = (chunks / scales.where(scales > 0, torch.ones_like(scales))).round_().nan_to_num_(0).to(torch.int8)
        filled = steps.flatten(1).split([part.shape[1] for part in padded], dim=1)
        sent = [part[:, :width] for part, width in zip(filled, widths, strict=True)]
        return torch.cat([*sent, scales.flatten(1).view(torch.int8)], dim=1)

    def decode(self, wire: Tensor, widths: Sequence[int]) -> Tensor:
        counts = [-(-width // self.chunk) for width in widths]
        steps, scales = wire.split([sum(widths), 4 * sum(counts)], dim=1)
        parts = []
        for part, scale in zip(
            steps.split(list(widths), dim=1),
            scales.clone(memory_format=torch.contiguous_format).view(torch.float32).split(counts, dim=1),  # aligned
            strict=True,
        ):
            parts.append(part * scale.repeat_interleave(self.chunk, dim=1)[:, : part.shape[1]])
        return torch.cat(parts, dim=1)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}
)
"""By the name in `grad_compression`."""


class Elementwise(Compression):
    """Each rank sends part r of its encoded gradient straight to rank r, which decodes and adds in fp32.

    The bytes are those of a ring over the encoded buffer, but every value is encoded once, not once per hop.
    An all-reduce then encodes the averages and gathers them.
    """

    def __init__(self, collectives: Group, codec: Codec) -> None:
        super().__init__(collectives)
        self.codec = codec

    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        parts = _portions([gradient.numel() for gradient in gradients])
        _overlap(self._reduced(gradients[part], keys[part]) for part in parts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        parts = _portions([piece.numel() for piece in inputs])
        _overlap(self._scattered(outputs[part], inputs[part], keys[part]) for part in parts)

    def _reduced(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> Iterator[None]:
        size, rank = self.collectives.size, self.collectives.rank
        flats = [fp32_rows(gradient, size) for gradient in gradients]
        mean = yield from self._average(flats, keys, "all_reduce")
        widths = [flat.shape[1] for flat in flats]
        for key, part in zip(keys, mean.split(widths, dim=1), strict=True):
            self.recall(key + AVERAGE, part)
        own = self.codec.encode(mean, widths)
        for key, part, sent in zip(
            keys, mean.split(widths, 1), self.codec.decode(own, widths).split(widths, 1), strict=True
        ):
            self.remember(key + AVERAGE, part, sent)
        wire = own.new_empty(size, own.shape[1])
        wire[rank] = own[0]
        yield from self._swap([own[0]] * size, wire, "all_reduce")
        averages = self.codec.decode(wire, widths)
        for gradient, average in zip(gradients, averages.split(widths, dim=1), strict=True):
            gradient.copy_(average.reshape(-1)[: gradient.numel()].view(gradient.shape))

    def _scattered(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str]) -> Iterator[None]:
        flats = [fp32_rows(piece, self.collectives.size) for piece in inputs]
        mean = yield from self._average(flats, keys, "reduce_scatter")
        for output, part in zip(outputs, mean[0].split([flat.shape[1] for flat in flats]), strict=True):
            output.copy_(part)

    def _average(self, flats: Sequence[Tensor], keys: Sequence[str], collective: str) -> Generator[None, None, Tensor]:
        """Return the mean of this rank's shards, as one row."""
        for key, flat in zip(keys, flats, strict=True):
            self.recall(key, flat)
        widths = [flat.shape[1] for flat in flats]
        wire = self.codec.encode(torch.cat(list(flats), dim=1), widths)
        for key, flat, part in zip(keys, flats, self.codec.decode(wire, widths).split(widths, dim=1), strict=True):
            self.remember(key, flat, part)
        arrived = torch.empty_like(wire)
        arrived[self.collectives.rank] = wire[self.collectives.rank]
        yield from self._swap(wire.unbind(0), arrived, collective)
        return self.codec.decode(arrived, widths).mean(dim=0, keepdim=True)

    def _swap(self, sends: Sequence[Tensor], arrived: Tensor, collective: str) -> Iterator[None]:
        """Send `sends[r]` to rank r and receive row r of `arrived` from it, for every other rank r.

        It yields where the messages have begun, and ends when they have arrived.
        """
        size, rank = self.collectives.size, self.collectives.rank
        peers = [peer % size for peer in range(rank + 1, rank + size)]
        sent, awaited = {peer: sends[peer] for peer in peers}, {peer: arrived[peer] for peer in peers}
        end = self.collectives.begin_swap(collective, sent, awaited, _TAG)
        yield
        end()


def _portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut a list of tensors of these sizes into portions of `PORTION` numbers or more, but for the last one."""
    begin = gathered = 0
    for index, size in enumerate(sizes, start=1):
        gathered += size
        if gathered >= PORTION or index == len(sizes):
            yield slice(begin, index)
            begin, gathered = index, 0


def _overlap(exchanges: Iterator[Iterator[None]]) -> None:
    """Begin the messages of each exchange before those of earlier ones are awaited."""
    running: list[Iterator[None]] = []
    for exchange in exchanges:
        running = [each for each in (exchange, *running) if next(each, True) is None]
    while running:
        running = [each for each in running if next(each, True) is None]


def fp32_rows(tensor: Tensor, size: int) -> Tensor:
    """An fp32 copy of `tensor` as `size` rows, padded with zeros."""
    flat = tensor.detach().reshape(-1).float()
    return pad(flat, (0, -flat.numel() % size)).view(size, -1).clone()


# PowerSGD (Vogels, Karimireddy, Jaggi 2019): send a gradient matrix as two thin ones.

RIGHT = "/right"
"""Under a key and this, every rank keeps the same subspace, where the next step starts."""


class PowerSGD(Compression):
    """One step of subspace iteration per gradient: an m x n matrix travels as (m + n) * rank numbers.

    What has fewer numbers than that (biases, norms, a rank close to full) is averaged exactly.
    """

    def __init__(self, collectives: Group, rank: int) -> None:
        super().__init__(collectives)
        self.rank = rank

    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        matrices = [each.reshape(each.shape[0] if each.dim() > 1 else 1, -1) for each in gradients]
        for gradient, average in zip(gradients, self._average(matrices, keys), strict=True):
            gradient.copy_(average.view(gradient.shape))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        matrices = [piece.view(-1, width) for piece, width in zip(inputs, widths, strict=True)]
        for output, average in zip(outputs, self._average(matrices, keys), strict=True):
            output.copy_(average.reshape(self.collectives.size, -1)[self.collectives.rank])

    def _average(self, matrices: Sequence[Tensor], keys: Sequence[str]) -> list[Tensor]:
        """Return the approximate mean of each matrix, in fp32."""
        values = {key: matrix.detach().float().clone() for key, matrix in zip(keys, matrices, strict=True)}
        for key, matrix in values.items():
            self.recall(key, matrix)  # also what is sent exactly: another codec may have left something over
        thin = {key: matrix for key, matrix in values.items() if self._pays(matrix)}
        self._together([matrix for key, matrix in values.items() if key not in thin])
        lefts = {key: matrix @ self._right(key, matrix) for key, matrix in thin.items()}
        self._together(list(lefts.values()))
        lefts = {key: torch.linalg.qr(left).Q for key, left in lefts.items()}
        rights = {key: matrix.T @ lefts[key] for key, matrix in thin.items()}
        self._together(list(rights.values()))
        for key, matrix in thin.items():
            values[key] = lefts[key] @ rights[key].T
            self.remember(key, matrix, values[key])
            self.memory[key + RIGHT] = rights[key].nan_to_num(0.0, 0.0, 0.0)
        return list(values.values())

    def _pays(self, matrix: Tensor) -> bool:
        return sum(matrix.shape) * min(self.rank, *matrix.shape) < matrix.numel()

    def _right(self, key: str, matrix: Tensor) -> Tensor:
        """The subspace of the last step, or a random one that is the same on every rank."""
        kept = self.memory.get(key + RIGHT)
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        if kept is not None and kept.shape == shape and kept.any():
            return kept.to(matrix.device)
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(shape, generator=generator).to(matrix.device)

    def _together(self, tensors: Sequence[Tensor]) -> None:
        """Average several tensors in one collective, in place."""
        if not tensors:
            return
        buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.collectives.all_reduce(buffer, average=True)
        for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
