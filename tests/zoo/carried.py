"""Modules whose step carries a state from batch to batch (a queue, a centre, a count), or chooses its own samples.

On one device all rows of a batch see the state from before it.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.oddities import Awkward, dense
from tests.zoo.registry import member


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


class Chain(Awkward):
    """Five blocks; subclasses compute the loss from what they give."""

    buffers_at_start: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(dense(6, 8), dense(), dense(), dense(), nn.Linear(8, 3))
        for name, value in self.buffers_at_start.items():
            self.register_buffer(name, value.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@member("pipeline", because="MoCo: a queue of earlier keys is what the loss compares with.")
class Queue(Chain):
    buffers_at_start: ClassVar = {"queue": F.normalize(drawn(12, 3), dim=1)}

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self(batch["x"]), dim=1)
        logits = torch.cat([(z * F.normalize(batch["x"][:, :3], dim=1)).sum(1, keepdim=True), z @ self.queue.T], 1)
        if self.training:
            self.queue = torch.cat([z.detach(), self.queue])[:12]
        return F.cross_entropy(logits / 0.2, torch.zeros(len(z), dtype=torch.long))


@member("pipeline", because="The same queue behind batch norms, which normalize over a microbatch.")
class QueueNorms(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


@member("pipeline", because="The same queue as a plain attribute.")
class QueueAttribute(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.queue = self._buffers.pop("queue")


@member("pipeline", because="It counts its blocks in an attribute: four in a batch, as in each microbatch.")
class Counted(Chain):
    number = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * (1 + self.number / 50))
            self.number += self.training
        return x


@member("pipeline", because="A memory bank in a list, whose first batch has nothing to read.")
class Bank(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"])
        loss = F.cross_entropy(z, batch["y"])
        if self.bank:
            loss = loss + (z @ torch.cat(self.bank[-2:]).T).logsumexp(1).mean()
        if self.training:
            self.bank.append(z.detach())
        return loss


@member("pipeline", because="DINO: a centre of outputs is taken off, in a module of the loss.")
class Centre(Chain):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(1, 3))

        def forward(self, z: Tensor, target: Tensor) -> Tensor:
            wanted = F.softmax((target - self.centre) / 0.1, dim=-1)
            self.centre = self.centre * 0.9 + target.mean(0, keepdim=True) * 0.1
            return -(wanted * F.log_softmax(z, dim=-1)).sum(1).mean()

    def __init__(self) -> None:
        super().__init__()
        self.criterion = self.Loss()

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"])
        return self.criterion(z, z.detach() + batch["x"][:, :3])


class Codebook(nn.Module):
    """A VQ-VAE's: codes follow the vectors that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        codes = drawn(4, 8)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        chosen = F.one_hot(torch.cdist(x, self.codes).argmin(1), 4).float()
        nearest = chosen @ self.codes
        if self.training:
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None].clamp(min=1e-3))
        return nearest * 0.5 + x * 0.5


@member("pipeline", because="A VQ-VAE's codebook that follows by moving averages, in an early block.")
class CodebookInside(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Codebook()


@member("pipeline", because="The same codebook as the last block.")
class CodebookLast(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4] = Codebook()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :3]


@member(
    "pipeline", because="Codes between blocks, written by `.data`, which torch does not count; a branch on a gradient."
)
class CodebookBetween(Chain):
    buffers_at_start: ClassVar = {"codes": drawn(5, 8)}

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = self.coded(block(x)) if at == 1 else block(x)
        return x

    def coded(self, x: Tensor) -> Tensor:
        one_hot = F.one_hot(torch.cdist(x, self.codes).argmin(1), 5).to(x.dtype)
        nearest = one_hot @ self.codes
        if self.training:
            means = one_hot.T @ x.detach() / one_hot.sum(0).clamp(min=1)[:, None]
            self.codes.data.lerp_(torch.where(one_hot.any(0)[:, None], means, self.codes), 0.5)
        return x + (nearest - x).detach() if x.requires_grad else nearest


@member("pipeline", because="A running maximum scales the logits.")
class Maximum(Chain):
    buffers_at_start: ClassVar = {"largest": torch.tensor(0.01)}

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(x)
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, z.detach().abs().max()))
        return z / self.largest


@member("pipeline", because="The maximum as a number on the module, read before it is written.")
class MaximumAttribute(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(x) / self.largest
        if self.training:
            self.largest = max(self.largest, 3 * float(z.detach().abs().max()))
        return z


@member("pipeline", because="Prototypes that are used from the second batch on.")
class Prototypes(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.zeros(3, 3))
        self.initialized = False

    def loss(self, batch: Any) -> Tensor:
        z, y = self(batch["x"]), batch["y"]
        loss = F.cross_entropy(z, y)
        if self.initialized:
            loss = loss + (z - self.prototypes[y]).square().mean()
        if self.training:
            means = F.one_hot(y, 3).float().T @ z.detach() / len(z)
            self.prototypes.copy_(0.7 * self.prototypes + 0.3 * means)
            self.initialized = True
        return loss


@member("pipeline", because="A queue in a parameter without a gradient.")
class QueueParameter(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.queue = nn.Parameter(self._buffers.pop("queue"), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"])
        if self.training:
            loss = F.cross_entropy(z @ self.queue.T, batch["y"])
            self.queue = nn.Parameter(torch.cat([z.detach(), self.queue])[:12], requires_grad=False)
            return loss
        return F.cross_entropy(z, batch["y"])


class Scale:
    """An object that is no module."""

    def __init__(self) -> None:
        self.value = torch.ones(())

    def __call__(self, z: Tensor) -> Tensor:
        scaled = z / self.value
        self.value = 0.5 * self.value + 0.5 * z.detach().abs().max()
        return scaled


@member("pipeline", because="A state in an object of a class of the user.")
class ObjectState(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.blocks(x))


@member("pipeline", because="The same in a namespace.")
class NamespaceState(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(scale=torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(x)
        scale, self.kept.scale = self.kept.scale, 0.5 * self.kept.scale + 0.5 * z.detach().abs().max()
        return z / scale


class Fading(nn.Linear):
    """Grows with the calls of all blocks of its class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Fading.calls += 1
        return super().forward(x) * min(1.0, Fading.calls / 20)


@member("pipeline", because="A count of the class of two blocks, with which both compute.")
class ClassState(Chain):
    def __init__(self) -> None:
        super().__init__()
        Fading.calls = 0
        self.blocks = nn.Sequential(dense(6, 8), Fading(8, 8), dense(), Fading(8, 8), nn.Linear(8, 3))


_LARGEST = {"of the batches": torch.tensor(0.01)}


@member("pipeline", because="A running maximum in a dict of the file.")
class FileState(Chain):
    def __init__(self) -> None:
        super().__init__()
        _LARGEST["of the batches"] = torch.tensor(0.01)

    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(x)
        _LARGEST["of the batches"] = torch.maximum(_LARGEST["of the batches"], z.detach().abs().max())
        return z / _LARGEST["of the batches"]


@member("pipeline", because="A buffer that the first step registers.")
class LateBuffer(Chain):
    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks(x)
        if not hasattr(self, "centre"):
            self.register_buffer("centre", torch.zeros(3))
        centre, self.centre = self.centre, 0.5 * self.centre + z.detach().mean(0)
        return z - centre


@member("pipeline", because="The state of the batch before goes into the first block.")
class Recurrence(Chain):
    buffers_at_start: ClassVar = {"memory": torch.zeros(6)}

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"] + self.memory)
        if self.training:
            self.memory = F.pad(z.detach().mean(0), (0, 3))
        return F.cross_entropy(z, batch["y"])


def seeded(module: Any, batch: Any) -> torch.Generator | None:
    """A generator that draws the same in each layout, if the module is to be compared with one device."""
    return torch.Generator().manual_seed(int(batch["y"].sum())) if module.seeded else None


@member("pipeline", because="A hidden state with a row for each sample.")
class Hidden(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[:4](x)
        x = x if self.hidden is None else x + self.hidden
        self.hidden = x.detach() if self.training else None
        return self.blocks[4](x)


@member("pipeline", because="Parts of a batch fail by themselves, not for what the step keeps.")
class Starts(Chain):
    def batches(self, steps: int) -> list[Any]:
        return [{**batch, "first": torch.arange(8)} for batch in super().batches(steps)]

    def loss(self, batch: Any) -> Tensor:
        self.kept = getattr(self, "kept", 0.0) + batch["x"].detach().mean()
        assert batch["first"][0] == 0, "offsets begin with 0"
        return F.cross_entropy(self(batch["x"]), batch["y"])


@member("pipeline", because="Each step takes windows of its batch at random.")
class Windows(Chain):
    seeded = False
    copies, draws = 4, 8

    def loss(self, batch: Any) -> Tensor:
        windows = batch["x"].repeat_interleave(self.copies, 0)
        chosen = torch.randperm(len(windows), generator=seeded(self, batch))[: self.draws]
        return F.cross_entropy(self(windows[chosen]), batch["y"].repeat_interleave(self.copies, 0)[chosen])


@member("pipeline", because="A step draws more samples than a microbatch has.")
class FewWindows(Windows):
    copies, draws = 1, 4


@member(
    "pipeline", because="Points that are drawn in the step, as many for each batch (a physics loss, negative samples)."
)
class Points(Chain):
    seeded = False

    def loss(self, batch: Any) -> Tensor:
        points = self(torch.rand(16, 6, generator=seeded(self, batch))).square().mean()
        return points + 0 * batch["x"].sum()


@member("pipeline", because="Uses the first rows of its batch only.")
class FirstRows(Chain):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"][:4]), batch["y"][:4])


@member("pipeline", because="Noise that is an input and the target as well, drawn before the batch is cut.")
class NoiseBefore(Chain):
    seeded = True

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "noise": torch.randn(len(batch["x"]), 3, generator=seeded(self, batch))}

    def loss(self, batch: Any) -> Tensor:
        noise = batch["noise"]
        return F.mse_loss(self(batch["x"] + F.pad(noise, (0, 3))), noise) * len(noise) ** 0.5


@member("pipeline", because="A mean over the batch, taken between blocks of an early stage and used by the loss.")
class EarlyMean(Chain):
    def loss(self, batch: Any) -> Tensor:
        x = self.blocks[1](self.blocks[0](batch["x"]))
        mean = x.mean(0)[:3]
        return F.cross_entropy(self.blocks[2:](x) * mean, batch["y"])


@member("pipeline", because="Counts its steps and its rows, and keeps losses and outputs.")
class Counting(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.rows, self.losses, self.outputs = 0, 0, [], []
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"])
        loss = F.cross_entropy(z, batch["y"]) * min(1.0, 0.5 + 0.1 * self.steps)
        if self.training:
            self.steps += 1
            self.rows += len(z)
            self.losses.append(loss.item())
            self.outputs.append(z.detach())
            self.count += 1
        return loss


@member("pipeline", because="A moving average of outputs that is only logged.")
class Logged(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.average = 0.0

    def loss(self, batch: Any) -> Tensor:
        z = self(batch["x"])
        loss = F.cross_entropy(z, batch["y"])
        if self.training:
            self.mean.lerp_(z.detach().mean(0), 0.1)
            self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss


@member("pipeline", because="A table of positions that a block makes at its first call.")
class Table(Chain):
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(x.shape[1]).cos()
            return self.layer(x + self.table)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Positions()


@member(
    "pipeline", because="Weights are divided by their largest singular value, which an iteration in a buffer follows."
)
class Spectral(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


@member("pipeline", because="Performer: a count of calls, by which blocks compute otherwise from some step on.")
class Redrawn(Chain):
    class Projected(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(super().forward(x)) * (1 if self.calls < 5 else 2)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Projected(8, 8)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) if self.count < 5 else 2 * super().forward(x)


@member("pipeline", because="Performer again: blocks draw a buffer anew in place, from some call on.")
class RedrawnInPlace(Chain):
    class Projected(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls >= 5:
                self.draw.mul_(1.1)
            return torch.tanh(super().forward(x) * self.draw)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Projected(8, 8)
        self.blocks[1].register_buffer("draw", torch.ones(8))


@member("pipeline", because="An average that follows after each batch, by no value of it.")
class Averaged(Chain):
    buffers_at_start: ClassVar = {"average": torch.zeros(())}

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(torch.tensor(float(self.global_step)), 0.1)


@member("pipeline", because="As many features as four rows for each sample of a microbatch.")
class Following(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[:4](x)
        z: Tensor = self.blocks[4](h - self.mean)
        if self.training:
            self.mean = self.mean.lerp(h.detach().mean(0), 0.5)
        return z


@member("pipeline", because="Code between two stages makes a tensor, and fills it in part, then behind the next block.")
class Filled(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[:2](x)
        filled = torch.zeros_like(y)
        filled[:, 0] = y[:, 0]
        filled += self.blocks[2:4](y)
        z: Tensor = self.blocks[4](filled)
        return z
