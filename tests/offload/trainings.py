"""A module whose weights are large enough for a disk, and its training."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_3d import Strategy3D
from tests.parity import QUIET

WIDTH = 136
"""Matrices of 74 kB, their shards on two ranks too large for memory with `SMALL` set to a fourth."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(LightningModule):
    """Args: optimizer: makes one of parameters."""

    def __init__(self, optimizer="adamw"):
        super().__init__()
        self.optimizer, self.seen, self.stream = optimizer, [], []
        self.embedding = nn.Embedding(150, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 150, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.roll(1, 1).flatten())
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten()), sync_dist=True)

    def train_dataloader(self):
        batches = torch.randint(0, 150, (16, 6), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(batches, batch_size=4)

    def val_dataloader(self):
        return self.train_dataloader()

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Clipped(torch.optim.Optimizer):
    """Of a user's own: it computes a norm over all gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            norm = sum(p.grad.norm() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / norm)
        return loss


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], 1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
    "clipped": Clipped,
}


class Small:
    """Puts tensors of 16 kB on the disk too, so that shards of a small module are there."""

    def __enter__(self):
        for file in _users():
            file.SMALL = 2**14

    def __exit__(self, *_):
        for file in _users():
            file.SMALL = 2**16


def _users():
    from lightning_3d.optim import step_from_disk
    from lightning_3d.zero import shards_on_disk

    return step_from_disk, shards_on_disk


def placed(offload, folder):
    return {kind: f"nvme:{folder}" if where == "disk" else where for kind, where in offload.items()}


class After(Callback):
    """The full states of the optimizer, and the bytes that went from and to the disk, at the end of training."""

    def on_train_end(self, trainer, module):
        state = trainer.optimizers[0].state_dict()["state"]
        self.states = {
            f"{key}.{name}": torch.as_tensor(value).clone() for key in state for name, value in state[key].items()
        }
        disk = trainer.strategy._parallel.disk
        self.moved = 0 if disk is None else disk.moved


def train(world, strategy, offload, folder, optimizer="adamw", callbacks=(), ckpt_path=None, **trainer):
    """Fit; returns losses, weights, the states of the optimizer, and bytes that went from or to the disk."""
    seed_everything(5, verbose=False)
    module, chosen, after = Net(optimizer), dict(strategy), After()
    if offload:
        chosen["offload"] = placed(offload, folder)
        chosen["offload_budget"] = "2MB" if "disk" in offload.values() else None
    flags = {**QUIET, "limit_val_batches": 1, "max_epochs": 2, "gradient_clip_val": 0.5, **trainer}
    flags["use_distributed_sampler"] = True  # each data rank has other batches
    flags["callbacks"] = [after, *(make() for make in callbacks)]
    fit = Trainer(devices=world, strategy=Strategy3D(quiet=True, **chosen), **flags)
    with Small():
        fit.fit(module, ckpt_path=ckpt_path)
    return {
        "losses": module.seen,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "states": after.states,
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
        "moved": after.moved,
    }


def both(world, strategy, offload, folder, *optimizer, **training):
    """The results of a training with `offload` and of one without, on this rank."""
    one = train(world, strategy, offload, folder, *optimizer, **training)
    return one, train(world, strategy, None, folder, *optimizer, **training)


def assert_equal(one, other):
    """Two results are the same, bit for bit."""
    assert len(set(other["losses"])) > 2
    assert min(other["losses"]) > 0.1
    for key in ("losses", "metrics"):
        assert one[key] == other[key], key
    for key in ("weights", "states"):
        assert one[key].keys() == other[key].keys()
        for name, value in other[key].items():
            assert torch.equal(one[key][name], value), f"{key} {name}"
