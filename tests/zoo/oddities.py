"""Modules written in ways that nothing here was designed for. Each class gives its own batches."""

import copy
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.zoo.batchless import tokens, vectors
from tests.zoo.registry import member


class Awkward(LightningModule):
    """Vectors of 6 into 3 classes, SGD with momentum; subclasses say what is computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])

    def batches(self, steps: int) -> list[Any]:
        return [vectors(8, seed) for seed in range(steps)]

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def dense(inputs: int = 8, outputs: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class FourBlocks(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(dense(6, 8), dense(), dense(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class BlocksBetween(Awkward):
    Block: Any = staticmethod(dense)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@member("pipeline", because="A ModuleDict of ModuleLists of ModuleLists, run in an order of its own.")
class Nested(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "late": nn.ModuleList(nn.ModuleList(dense() for _ in range(2)) for _ in range(2)),
                "early": nn.ModuleList([nn.ModuleList([dense(6, 8)]), nn.ModuleList([dense(), dense()])]),
            }
        )
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for group in (*self.parts["early"], *self.parts["late"]):
            for block in group:
                x = block(x)
        return self.out(x)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(dense() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block(x) * self.scale / (index + 1)
        return x


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.body, self.norm = nn.Linear(6, 8), Body(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.entry(x)))


@member("pipeline", because="The chain sits in a submodule of a submodule of a submodule.")
class Deep(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.trunk = Trunk()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model.trunk(x))


@member("pipeline", because="What early blocks give is written into a new tensor, and into one for the next step.")
class Filled(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([dense(6, 8), dense(), dense(), dense()])
        self.head = nn.Linear(8, 3)
        self.center = torch.zeros(8)

    def loss(self, batch: Any) -> Tensor:
        x, every, center = batch["x"], torch.zeros(len(batch["x"]), 4, 8), self.center.clone()
        for index, block in enumerate(self.blocks):
            x = block(x)
            every[:, index] = x
            if index == 0 and self.training:
                self.center.mul_(0.5).add_(x.detach().mean(0))
        self.log("center", self.center.mean())
        return F.cross_entropy(self.head(x + every.mean(1)), batch["y"]) + (x * center).mean()


class Keyed(nn.Module):
    """Takes keyword arguments only and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, hidden: Tensor, bias: Tensor, state: tuple[Tensor, ...] = (), flag: bool = False) -> Any:
        out = torch.tanh(self.mix(hidden) + bias)
        return out, (*state, self.gate(out).mean(-1)), {"penalty": out.square().mean(), "flag": flag}


@member("pipeline", because="What blocks return beside the hidden state is summed up into the loss.")
class KeywordsAndTuples(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Keyed() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(8))

    def loss(self, batch: Any) -> Tensor:
        hidden, state, penalty = self.embed(batch["x"]), (), 0.0
        for layer in self.layers:
            hidden, state, extra = layer(hidden=hidden, bias=self.shift * 2, state=state, flag=True)
            penalty = penalty + extra["penalty"]
        return F.cross_entropy(self.head(hidden), batch["y"]) + 0.1 * penalty + 0.1 * sum(state).square().mean()


@member("pipeline", because="The embedding goes into the head again, and its table is the output matrix.")
class EmbeddingSkip(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.blocks = nn.Sequential(dense(), dense(), dense())
        self.join = nn.Linear(16, 8)

    def batches(self, steps: int) -> list[Any]:
        return [(tokens(8, seed), tokens(8, seed + 50)) for seed in range(steps)]

    def loss(self, batch: Any) -> Tensor:
        first = self.embed(batch[0])
        x = self.join(torch.cat([self.blocks(first), first], dim=-1))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), batch[1].flatten())


@member("pipeline", because="Skips between convolutions, upsampling in between, a mask that is None.")
class ConvUNet(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.up = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)])
        self.out = nn.Conv2d(4, 1, 1)

    def batches(self, steps: int) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        images = [torch.randn(8, 1, 8, 8, generator=generator) for _ in range(steps)]
        return [{"image": image, "mask": None, "target": image.flip(-1)} for image in images]

    def loss(self, batch: Any) -> Tensor:
        x, skips = batch["image"], []
        for block in self.down:
            x = F.relu(block(x))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(block(torch.cat((x, skips.pop()), dim=1)))
        return F.mse_loss(self.out(x), batch["target"])


@member("pipeline", because="Two losses, weighted by learned numbers, both logged, the step returns a dict.")
class TwoHeads(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.classify, self.regress = nn.Linear(8, 3), nn.Linear(8, 1)
        self.weights = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.trunk(batch["x"])
        kind = F.cross_entropy(self.classify(x), batch["y"])
        size = F.mse_loss(self.regress(x).squeeze(-1), batch["x"].sum(1))
        loss = (self.weights.neg().exp() * torch.stack([kind, size])).sum() + self.weights.sum()
        self.log_dict({"kind": kind, "size": size}, on_step=True, on_epoch=True)
        return {"loss": loss, "size": size.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


@member("pipeline", because="Two blocks used in turn, as in ALBERT: a unit stands at several places of the chain.")
class SharedBlocks(BlocksBetween):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2], self.blocks[3] = self.blocks[0], self.blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@member("pipeline", because="One block called three times in a loop.")
class OneBlock(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(6, 8), dense(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


@member("pipeline", because="Convolutions, a reshape in the forward, linears; batch norm in training.")
class Conv(Awkward):
    norm: Any = nn.BatchNorm2d

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), self.norm(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), self.norm(8), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(128, 16), nn.ReLU(True), nn.Linear(16, 3))

    def batches(self, steps: int) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return [{"x": torch.randn(8, 1, 8, 8, generator=generator), "y": torch.arange(8) % 3} for _ in range(steps)]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).reshape(len(x), -1))


@member("pipeline", because="The same without batch statistics, so that microbatches agree.")
class GroupConv(Conv):
    @staticmethod
    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(2, channels)


@dataclass
class Sample:
    x: Tensor
    mask: Tensor | None
    names: list[str]
    y: Tensor


@member("pipeline", because="The batch is a dataclass, the mask sometimes None, attention under it.")
class DataclassBatch(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def batches(self, steps: int) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        masks = [None, torch.arange(5).expand(8, 5) > 3]
        names = [f"row {row}" for row in range(8)]
        return [
            Sample(torch.randn(8, 5, 6, generator=generator), masks[step % 2], names, torch.arange(8) % 3)
            for step in range(steps)
        ]

    def loss(self, batch: Sample) -> Tensor:
        x = self.embed(batch.x)
        for layer in self.layers:
            attended, _ = layer(x, x, x, key_padding_mask=batch.mask, need_weights=False)
            x = x + attended
        assert len(batch.names) == len(x)
        return F.cross_entropy(self.head(x.mean(1)), batch.y)


@member("pipeline", because="Another sequence length at every step, with a causal mask and positions made from it.")
class Lengths(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(31, 8), nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 31)

    def batches(self, steps: int) -> list[Any]:
        return [tokens(8 - step % 3, step, 5 + 3 * step) for step in range(steps)]

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        x = self.embed(inputs) + self.positions.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).transpose(1, 2), targets)


@member("pipeline", because="`self.model(x)`, then metric objects logged on the epoch, one reset by hand.")
class Metrics(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(dense(6, 8), dense(), nn.Linear(8, 3))
        self.accuracy, self.mean = MulticlassAccuracy(3, average="micro"), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.accuracy(logits.softmax(-1), batch["y"])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
        self.mean.update(loss, len(logits))
        self.log("seen", float(len(batch["x"])), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look, self.feed = nn.MultiheadAttention(8, 2, batch_first=True), dense()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.feed(x + self.look(x, memory, memory, attn_mask=mask, need_weights=False)[0])


@member("pipeline", because="Every decoder block reads the encoder's output; one embedding for both and the head.")
class EncoderDecoder(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.decoder = nn.ModuleList(Cross() for _ in range(2))
        self.encoder = nn.ModuleList(Cross() for _ in range(2))
        self.head = nn.Linear(8, 31)
        self.head.weight = self.embed.weight

    def batches(self, steps: int) -> list[Any]:
        return [{"source": tokens(8, seed, 7), "target": tokens(8, seed + 9, 5)} for seed in range(steps)]

    def loss(self, batch: Any) -> Tensor:
        memory = self.embed(batch["source"])
        for block in self.encoder:
            memory = block(memory, memory)
        x = self.embed(batch["target"][:, :-1])
        for block in self.decoder:
            x = block(x, memory=memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["target"][:, 1:].flatten())


@member("pipeline", because="`nn.Transformer` as torch has it.")
class TorchTransformer(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 31)

    def batches(self, steps: int) -> list[Any]:
        return [(tokens(8, seed, 7), tokens(8, seed + 9, 5)) for seed in range(steps)]

    def loss(self, batch: Any) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(4)
        x = self.transformer(self.embed(batch[0]), self.embed(batch[1][:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1][:, 1:].flatten())


@member("pipeline", because="Two towers of blocks, each over its own part of the batch, joined at the end.")
class TwoChains(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([dense(3, 8), dense(), dense()])
        self.right = nn.Sequential(dense(3, 8), dense())
        self.join = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        for block in self.left:
            left = block(left)
        return self.join(left, self.right(right))


class Reverse(torch.autograd.Function):
    """Gradients with the other sign, as in domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -ctx.scale * grad, None


@member("pipeline", because="A function of autograd between blocks.")
class Adversary(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList([dense(6, 8), dense(), dense()])
        self.classify, self.domain = nn.Linear(8, 3), nn.Sequential(dense(), nn.Linear(8, 2))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.features:
            x = block(x)
        reversed_x = Reverse.apply(x, 0.3)
        domain = F.cross_entropy(self.domain(reversed_x), (batch["x"][:, 0] > 0).long())
        return F.cross_entropy(self.classify(x), batch["y"]) + domain


reverse = Reverse.apply


@member("pipeline", because="The same, by a name of the module's import; the result crosses the cut.")
class KeptFunction(Adversary):
    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.features:
            x = reverse(block(x), -0.5)
        domain = F.cross_entropy(self.domain(reverse(x, 0.3)), (batch["x"][:, 0] > 0).long())
        return F.cross_entropy(self.classify(x), batch["y"]) + domain


@member("pipeline", because="A straight-through estimate and a stopped gradient between blocks.")
class Quantized(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.ModuleList([dense(6, 8), dense()])
        self.codes = nn.Embedding(5, 8)
        self.decode = nn.ModuleList([dense(), nn.Linear(8, 6)])

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.encode:
            x = block(x)
        nearest = torch.cdist(x, self.codes.weight).argmin(-1)
        codes = self.codes(nearest)
        commit = F.mse_loss(x, codes.detach()) + F.mse_loss(codes, x.detach())
        x = x + (codes - x).detach()
        for block in self.decode:
            x = block(x)
        return F.mse_loss(x, batch["x"]) + commit


@member("pipeline", because="A frozen backbone without gradients and in eval mode, a trained head.")
class Frozen(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(dense(6, 8), nn.Dropout(0.5), dense(), dense()).requires_grad_(False)
        self.head = nn.Sequential(dense(), nn.Linear(8, 3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone.eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)


@member("pipeline", because="The first blocks are frozen until the third batch, as finetuning callbacks do.")
class Thawed(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[:2].requires_grad_(batch_idx >= 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@member("pipeline", because="LSTMs, whose outputs are tuples of tuples, and packed lengths.")
class Recurrent(Awkward):
    layer, depth = nn.LSTM, 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(self.layer(8, 8, batch_first=True) for _ in range(self.depth))
        self.head = nn.Linear(8, 3)

    def batches(self, steps: int) -> list[Any]:
        return [{"x": tokens(8, seed, 6), "y": torch.arange(8) % 3} for seed in range(steps)]

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.embed(x), None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(state[0][-1])


@member("pipeline", because="Recurrent layers hand each other a packed sequence.")
class Packed(Recurrent):
    layer, depth = nn.GRU, 4

    def batches(self, steps: int) -> list[Any]:
        lengths = torch.tensor([3, 6, 6, 3, 3, 6, 6, 3])  # as many steps in each microbatch
        return [{"x": tokens(8, seed, 6), "lengths": lengths, "y": torch.arange(8) % 3} for seed in range(steps)]

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["x"])
        x = rnn.pack_padded_sequence(x, batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            x, _ = layer(x)
        x, _ = rnn.pad_packed_sequence(x, batch_first=True, total_length=6)
        return F.cross_entropy(self.head(x.sum(1)), batch["y"])


@member("pipeline", because="Drops padding, so that shapes depend on values.")
class Selected(Packed):
    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["x"])[batch["x"] % 3 > 0]
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x).square().sum() / batch["x"].numel()


@member("pipeline", because="Losses on features taken on the way, by index, and normalized weights (parametrized).")
class Pyramid(Awkward):
    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.blocks = nn.ModuleList([normed(nn.Linear(6, 8)), *(normed(nn.Linear(8, 8)) for _ in range(3))])
        self.heads = nn.ModuleDict({str(at): nn.Linear(8, 3) for at in (1, 3)})

    def loss(self, batch: Any) -> Tensor:
        x, total = batch["x"], 0.0
        for index, block in enumerate(self.blocks):
            x = torch.relu(block(x))
            if str(index) in self.heads:
                total = total + F.cross_entropy(self.heads[str(index)](x), batch["y"])
        return total


@member("pipeline", because="Recomputes two blocks at a time: the cut falls inside a checkpointed region.")
class Chunked(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([dense(6, 8), *(dense() for _ in range(4)), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for start in range(0, 6, 3):
            x = checkpoint(self.chunk, x, start, use_reentrant=False)
        return x

    def chunk(self, x: Tensor, start: int) -> Tensor:
        for block in self.blocks[start : start + 3]:
            x = block(x)
        return x


@member("pipeline", because="Blocks recompute a part by the older checkpoint, which allows no `autograd.grad`.")
class Reentrant(FourBlocks):
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.enter, self.inner = nn.Linear(width, 8), nn.Sequential(dense(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            return x + checkpoint(self.inner, x, use_reentrant=True)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(6), *(self.Block(8) for _ in range(3)), nn.Linear(8, 3))


@member("pipeline", because="Takes activations with forward hooks, as feature extractors do, and hooks gradients.")
class Hooked(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for index in (0, 2):
            self.blocks[index].register_forward_hook(self.keep(str(index)))
        self.blocks[3].register_forward_pre_hook(lambda _, args: (args[0] * 2,))

    def keep(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            self.kept[name] = output

        return hook

    def loss(self, batch: Any) -> Tensor:
        logits = self.blocks(batch["x"])
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad * 2)
        return F.cross_entropy(logits, batch["y"]) + sum(value.square().mean() for value in self.kept.values())


@member("pipeline", because="Blocks change a tensor of their own in place, and code between them what they return.")
class InPlace(BlocksBetween):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.inner(x)) + x
            y *= 0.9
            return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
            x[:, 0] = 0.0
            x.add_(0.1)
        return self.head(x)


@member("pipeline", because="A target network that follows the trained one, updated after each batch.")
class Teacher(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(dense(6, 8), dense(), nn.Linear(8, 3))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.target(batch["x"].flip(-1))
        return F.mse_loss(self.net(batch["x"]), target) + 0.1 * self.net[-1].bias.square().sum()


@member("pipeline", because="The batch is a tensor of 7 rows, and the step takes nothing else.")
class OnlyTensor(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(dense(6, 8), dense(), nn.Linear(8, 6))

    def batches(self, steps: int) -> list[Any]:
        return [vectors(7, seed)["x"] for seed in range(steps)]

    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.blocks(batch), batch)


@member("pipeline", because="Reads block parameters in the loss: weight decay written by hand.")
class Outside(FourBlocks):
    def loss(self, batch: Any) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in self.blocks.parameters())
        return F.cross_entropy(self.blocks(batch["x"]), batch["y"]) + 0.01 * decay


@member("pipeline", because="Stochastic depth in the loop: which blocks run is drawn, and seldom another choice.")
class SkippedBlocks(BlocksBetween):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.training and self.skips():
                continue
            x = x + block(x)
        return self.head(x)

    def skips(self) -> bool:
        return bool(torch.rand(()) < 0.02)


@member("pipeline", because="numpy draws which blocks run.")
class SkippedByNumpy(SkippedBlocks):
    def skips(self) -> bool:
        return np.random.rand() < 0.3


@member("pipeline", because="A block leaves a tensor on the module, which a later block reads.")
class Stateful(BlocksBetween):
    class Reader(nn.Module):
        def __init__(self, notes: dict[str, Tensor]) -> None:
            super().__init__()
            self.inner, self.notes = nn.Linear(8, 8), notes

        def forward(self, x: Tensor) -> Tensor:
            out = torch.tanh(self.inner(x)) + self.notes.get("last", 0.0)
            self.notes["last"] = out
            return out

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Tensor] = {}
        self.blocks = nn.ModuleList(Stateful.Reader(self.notes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        return super().forward(x)


@member("pipeline", because="A norm of time series keeps a scale for its second call, behind the last block.")
class Reversible(FourBlocks):
    class Norm(nn.Linear):
        scale = torch.ones(())

        def forward(self, x: Tensor, back: bool = False) -> Tensor:
            self.scale = self.scale if back else x.std(-1, keepdim=True)
            return x * self.scale if back else super().forward(x / self.scale)

    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible.Norm(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.norm(x)), back=True)


@member("pipeline", because="Each block leaves a loss on itself, as routers of experts do, and the step adds them up.")
class Balanced(BlocksBetween):
    class Block(InPlace.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            self.penalty = x.square().mean()
            return torch.tanh(x)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(block.penalty for block in self.blocks)


@member("pipeline", because="Cannot be run before training begins: it learns its temperature when it does.")
class Late(Deep):
    def on_train_start(self) -> None:
        self.heat = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]) / self.heat, batch["y"])


class Stream(IterableDataset[Any]):
    """Gives every item once, whoever asks."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        while self.items:
            yield self.items.pop(0)


@member("pipeline", because="Batches that cannot be read ahead.")
class Streamed(Deep):
    def batches(self, steps: int) -> Any:
        return Stream(super().batches(steps))


@member("pipeline", because="Buffers of the module, changed before and behind blocks, and norms without parameters.")
class Statistics(Awkward):
    def __init__(self) -> None:
        super().__init__()
        whiten = [nn.BatchNorm1d(8, affine=False) for _ in range(2)]
        self.blocks = nn.Sequential(dense(6, 8), whiten[0], dense(), whiten[1], dense(), nn.Linear(8, 3))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        logits = self.blocks(x - self.mean)
        if self.training:
            self.centre = self.centre * 0.9 + logits.detach().mean(0) * 0.1
            self.count += 1
        return logits - self.centre


@member("pipeline", because="A module without parameters keeps what it saw between blocks.")
class Noted(FourBlocks):
    class Note(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(x.detach().mean(0))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Noted.Note())


@member("pipeline", because="The same, as another tensor each time.")
class Replaced(Noted):
    class Note(Noted.Note):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach().mean(0)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Note()


@member("pipeline", because="A hook deep inside a block takes an activation for the loss.")
class InnerHook(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []
        self.blocks[0][0].register_forward_hook(lambda _, args, output: self.taken.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.taken.clear()
        logits = self.blocks(batch["x"])
        return F.cross_entropy(logits, batch["y"]) + sum(value.square().mean() for value in self.taken)


@member("pipeline", because="So small a part of the loss that it is not seen there.")
class SmallHook(InnerHook):
    def loss(self, batch: Any) -> Tensor:
        self.taken.clear()
        logits = self.blocks(batch["x"])
        terms = [value.square().mean() for value in self.taken]
        return F.cross_entropy(logits, batch["y"]) + 0.02 * sum(term - term.detach() for term in terms)


@member("pipeline", because="The hook that takes an activation also changes it.")
class ChangingHook(SmallHook):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].register_forward_hook(lambda _, args, output: 0.5 * output)


@member("pipeline", because="Two views of the batch through the same chain.")
class Twice(FourBlocks):
    def loss(self, batch: Any) -> Tensor:
        return (self.blocks(batch["x"]) - self.blocks(batch["x"].flip(-1) + 0.1)).square().mean()


@member("pipeline", because="Hooks on gradients of what blocks return.")
class GradHooks(FourBlocks):
    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
            self.hook(x)
        return F.cross_entropy(x, batch["y"])

    def hook(self, x: Tensor) -> None:
        x.register_hook(lambda grad: 2 * grad)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.blocks(batch["x"]), batch["y"])


@member("pipeline", because="Hooks on the nodes of the graph itself, which no operation shows.")
class GraphHooks(GradHooks):
    def hook(self, x: Tensor) -> None:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda grads: (2 * grads[0],))


@member("pipeline", because="A block that the first steps never call, and an output dictionary.")
class Uncalled(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([dense(6, 8), dense(), dense(), dense()])
        self.spare, self.head = dense(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"logits": self.head(states[-1]), "states": states, "note": "text"}

    def loss(self, batch: Any) -> Tensor:
        out = self(batch["x"])
        return F.cross_entropy(out["logits"], batch["y"]) + 0.1 * out["states"][1].abs().mean()


@member("pipeline", because="Activations of an early block are kept for a hook between steps.")
class Kept(FourBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
            if block is self.blocks[0]:
                self.early = x.detach()
                self.means.append(x.detach().mean())
        return F.cross_entropy(x, batch["y"])

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("early", self.early.square().mean() + self.means[-1])


class Caching(nn.Module):
    """Keeps a table in a buffer that is empty until the block runs, and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[-1]:
            self.table = torch.arange(x.shape[-1]) / 10
        return self.net(x + self.table)


@member("pipeline", because="Buffers change their shapes while training.")
class Cached(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.blocks, self.out = nn.Linear(6, 8), nn.Sequential(*(Caching() for _ in range(4))), dense(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.entry(x)))


@member("pipeline", because="A term of the loss comes in with the third batch; it is of an early block.")
class Warmed(FourBlocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = early = self.blocks[0](batch["x"])
        for block in self.blocks[1:]:
            x = block(x)
        loss = F.cross_entropy(x, batch["y"])
        return loss if batch_idx < 2 else loss + early.square().mean()


@member("pipeline", because="Leaves the third batch out.")
class Skipping(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


@member("pipeline", because="Words of all samples in one tensor, and where each begins: only one microbatch has a 0.")
class Bags(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.blocks = nn.EmbeddingBag(9, 6, mode="sum"), nn.Sequential(*(dense(6, 6) for _ in range(4)))
        self.out = nn.Linear(6, 3)

    def batches(self, steps: int) -> list[Any]:
        return [
            vectors(8, seed) | {"words": torch.arange(20) % 9, "begin": torch.arange(8) * 2} for seed in range(steps)
        ]

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"] + self.bags(batch["words"], batch["begin"])
        return F.cross_entropy(self.out(self.blocks(x)), batch["y"])


class Capturing(nn.Module):
    """Records hidden states with hooks that it registers at the first call, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(dense() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states: list[Tensor] = []
        if not hasattr(self, "hooked"):
            for block in self.blocks:
                block.register_forward_hook(self.record)
            self.hooked = True
        self.states = states
        for block in self.blocks:
            x = block(x)
        return x, states

    def record(self, block: nn.Module, args: Any, output: Tensor) -> None:
        if not self.states:
            self.states.append(args[0])
        self.states.append(output)


@member("pipeline", "tensor", because="Hidden states from hooks that are registered at the first call.")
class HiddenStates(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.body = Capturing()
        self.out = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        x, states = self.body(self.embed(batch["x"]))
        extra = sum((place + 1) * state.pow(2).mean() for place, state in enumerate(states))
        return F.cross_entropy(self.out(x), batch["y"]) + 0.1 * extra


@member("pipeline", because="A weight of one unit is the argument of another, as DeBERTa's relative positions.")
class WeightAsArgument(BlocksBetween):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm = nn.Embedding(5, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.norm(self.positions.weight).mean(0))


@member("pipeline", because="Rejection sampling: a draw is repeated until it fits, which a constant never does.")
class Rejecting(WeightAsArgument):
    def forward(self, x: Tensor) -> Tensor:
        while torch.rand(()) > 0.9:
            pass
        return super().forward(x)


def build(name: str, steps: int = 5) -> tuple[Any, list[Any]]:
    """A seeded module of this file, and its batches."""
    torch.manual_seed(1)
    module = globals()[name]()
    return module, module.batches(steps)


class Annotated(nn.Sequential):
    def forward(self, hidden: "Tensor") -> "Tensor":
        return super().forward(hidden)


@member("pipeline", because="It calls forward of some blocks, of all in evaluations, with the arguments that it names.")
class CallsForward(BlocksBetween):
    Block: Any = staticmethod(lambda: Annotated(nn.Linear(8, 8), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = {"hidden": self.embed(x)}
        for number, block in enumerate(self.blocks):
            if self.training and number != 2:
                hidden["hidden"] = block(**hidden)
            else:
                taken = get_type_hints(block.forward).keys() - {"return"}
                hidden["hidden"] = block.forward(**{name: hidden[name] for name in taken})
        return self.head(hidden["hidden"])
