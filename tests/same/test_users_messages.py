"""The user's own messages between ranks: without a group they go to the data ranks, as under Lightning's DDP.

The reference is Lightning's DDP on as many data ranks: it shares no code with what is tested.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import distributed as dist
from torch import nn
from torch.distributed import all_gather, get_world_size
from torch.distributed.nn.functional import all_gather as gathered
from torch.distributed.nn.functional import all_reduce as summed
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.errors import PeerError
from tests.parity import QUIET, in_turn, long, make_trainer
from tests.workers import WorkerError, on_ranks, run

ROWS, DATA = 32, 2


class Blocks(LightningModule):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 5)
        self.register_buffer("center", torch.zeros(5))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Dino(Blocks):
    """A centre of outputs over all samples of a step, like that of lightly's DINO loss."""

    def training_step(self, batch, index):
        output = self(batch[0])
        loss = -(F.softmax((output.detach() - self.center) / 0.5, -1) * F.log_softmax(output, -1)).sum(-1).mean()
        mean = output.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        self.center.mul_(0.5).add_(mean, alpha=0.5)
        return loss


class Gather(torch.autograd.Function):
    """All outputs of all ranks, with a gradient for those of this rank: what contrastive losses of libraries use."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.rows = len(tensor)
        parts = [torch.zeros_like(tensor) for _ in range(get_world_size())]
        all_gather(parts, tensor)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=dist.group.WORLD)
        at = dist.get_rank() * ctx.rows
        return grad[at : at + ctx.rows]


class Contrastive(Blocks):
    def training_step(self, batch, index):
        output = F.normalize(self(batch[0]), dim=-1)
        every = Gather.apply(output) if dist.is_initialized() else output
        at = (dist.get_rank() if dist.is_initialized() else 0) * len(output)
        return F.cross_entropy(output @ every.T / 0.2, at + torch.arange(len(output)))


class Gathered(Blocks):
    """Lightning's own gathering, with gradients, and without for a mean of all samples."""

    def training_step(self, batch, index):
        output = F.normalize(self(batch[0]), dim=-1)
        every = self.all_gather(output, sync_grads=True).flatten(0, 1)
        spread = (every @ every.T).square().sum() / len(every) ** 2
        return spread - output.sum(1).mean() * self.all_gather(output.detach()).sum(0).mean()


class Summed(Blocks):
    """torch's own differentiable sum, a broadcast from the first rank, and a list of objects."""

    def training_step(self, batch, index):
        output = self(batch[0])
        scale = torch.full((1,), 1.0 + dist.get_rank())
        dist.broadcast(scale, src=1)
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, dist.get_rank())
        assert names == list(range(dist.get_world_size()))
        dist.barrier()
        return scale.item() * (summed(output.mean(0)) ** 2).mean()


class Between(Blocks):
    """A sum between two blocks of different stages, in place, of a tensor that the loss uses as well."""

    def training_step(self, batch, index):
        x = self.enter(batch[0])
        early = x.detach() * 1.0
        dist.all_reduce(early)
        for at, block in enumerate(self.blocks):
            x = x + block(x)
            if at == 1:
                middle = x.detach().mean(0)
                dist.all_reduce(middle)
                x = x + 0.1 * middle / dist.get_world_size()
        late = early * 1.0
        dist.all_reduce(early)
        return F.mse_loss(self.head(x), early[:, :5] - late[:, :5])


MODULES = {"dino": Dino, "contrastive": Contrastive, "gathered": Gathered, "summed": Summed, "between": Between}
ONE = {"num_microbatches": 1}
"""For modules that use a statistic of the batch before the last block: a pipeline takes that of a microbatch."""


def fitted(name, strategy, world, scope=None):
    seed_everything(3, verbose=False)
    torch.manual_seed(5)
    module = MODULES[name]()
    data = TensorDataset(torch.randn(ROWS, 6))
    chosen = "ddp" if strategy is None else Strategy3D(quiet=True, timeout=40, **strategy)
    flags = {**QUIET, "use_distributed_sampler": True, "devices": world, "max_epochs": 2}
    made = Trainer(strategy=chosen, **flags)
    made.fit(module, DataLoader(data, batch_size=8))
    assert dist.get_world_size() == world
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return state, float(made.callback_metrics.get("loss", 0.0))


LAYOUTS = {
    "zero": (2, {"zero_stage": 1}),
    "tensor": (4, {"tensor_parallel_size": 2, "zero_stage": 0}),
    "pipeline": (4, {"pipeline_parallel_size": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", in_turn(MODULES, 3))
def test_messages_without_a_group_go_to_the_data_ranks(layout, name):
    world, strategy = LAYOUTS[layout]
    strategy = strategy | ONE if "pipeline" in layout and name in ("dino", "between") else strategy
    wanted, _ = run(fitted, name, None, DATA, world=DATA)[0]
    for got, _ in run(fitted, name, strategy, world, world=world):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(
                got[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )


class InHooks(Blocks):
    """Messages of hooks and callbacks: its own and those through Lightning go to the data ranks."""

    def training_step(self, batch, index):
        return F.mse_loss(self(batch[0]), batch[0][:, :5])

    def on_train_batch_end(self, *_):
        mean = self.center + dist.get_rank()
        dist.all_reduce(mean)
        self.center.add_(mean / dist.get_world_size())

    def on_train_end(self):
        mine = torch.tensor(dist.get_rank())
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        self.seen = {
            "own": torch.stack(every).tolist(),
            "module": self.all_gather(mine).tolist(),
            "strategy": self.trainer.strategy.all_gather(mine).tolist(),
            "differentiable": [int(value) for value in gathered(mine)],
        }


def seen_in_hooks(strategy, world):
    module = InHooks()
    made = make_trainer(world, {"timeout": 40, **strategy}, quiet=True, max_steps=2)
    seed_everything(3, verbose=False)
    made.fit(module, DataLoader(TensorDataset(torch.randn(ROWS, 6)), batch_size=8))
    return module.seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_hooks(layout):
    world, strategy = LAYOUTS[layout]
    data = list(range(DATA))
    for seen in run(seen_in_hooks, strategy, world, world=world):
        assert seen == {"own": data, "module": data, "strategy": data, "differentiable": data}


class MakesAGroup(Blocks):
    def training_step(self, batch, index):
        dist.new_group([0])
        return self(batch[0]).mean()


@pytest.mark.parametrize("strategy", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_group_of_the_user_is_refused_with_its_place(strategy):
    with pytest.raises(WorkerError, match=r"training_step \(.*test_users_messages.py:\d+\) makes a process group"):
        run(refused, strategy, world=2)
    run(refused, {"zero_stage": 3}, world=2)  # the remedy


def refused(strategy):
    module = MakesAGroup()
    made = make_trainer(2, strategy, quiet=True, max_steps=1)
    made.fit(module, DataLoader(TensorDataset(torch.randn(ROWS, 6)), batch_size=8))


_seen = SimpleNamespace(sizes=[])
"""With the sizes of the default group in each call of a step. A trial would put a list of this file back."""


class Counts(Blocks):
    def training_step(self, batch, index):
        _seen.sizes.append(dist.get_world_size())
        mean = self(batch[0]).mean(0)
        dist.all_reduce(mean)
        return mean.square().sum()


@pytest.mark.parametrize("given", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {}])
@on_ranks(2, group=False)
def test_each_rank_is_alone_while_the_layout_is_chosen(given):
    _seen.sizes.clear()
    made = make_trainer(2, {"timeout": 40, "layout": "auto", **given}, quiet=True, max_steps=2, max_epochs=1)
    made.fit(Counts(), DataLoader(TensorDataset(torch.ones(ROWS, 6)), batch_size=8))
    assert _seen.sizes[0] == 1
    assert _seen.sizes[-2:] == [made.strategy.data_parallel_size] * 2


class OnOneRank(Blocks):
    """One data rank calls a collective that the other does not."""

    waits = False

    def training_step(self, batch, index):
        mean = self(batch[0]).mean()
        if dist.get_rank() == 0 and index == 1:
            work = dist.all_reduce(mean.detach(), async_op=self.waits)
            if self.waits:
                work.wait()
        return mean.square()


def wait_alone(strategy, waits, folder):
    module = OnOneRank()
    module.waits = waits
    made = make_trainer(2, {"timeout": 3, **strategy}, quiet=True, max_steps=3, max_epochs=1, default_root_dir=folder)
    try:
        made.fit(module, DataLoader(TensorDataset(torch.randn(ROWS, 6)), batch_size=8))
    except PeerError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("strategy", "waits"), [({"zero_stage": 1}, False), long({"zero_stage": 1}, True)])
def test_a_collective_that_only_one_rank_calls_is_named_with_its_line(strategy, waits, tmp_path):
    said = run(wait_alone, strategy, waits, str(tmp_path), world=2, fresh=True, timeout=60)[0]
    where = r"\S+test_users_messages.py:\d+ \(training_step\)"
    assert re.search(
        rf"training_step of batch 1, in {where}" if waits else rf"in all_reduce.*, called at {where}", said
    )
