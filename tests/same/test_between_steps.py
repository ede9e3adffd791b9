"""Hooks between steps that compute with weights: as on one device, or refused with the name of the hook."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lightning_3d import Strategy3D
from lightning_3d.ranks import talk
from tests.parity import (
    QUIET,
    assert_parity,
    assert_same,
    in_turn,
    long,
    make_trainer,
    reference,
    refused_by_both,
    train,
)
from tests.workers import WorkerError, run
from tests.zoo.base import Base
from tests.zoo.language import GPT, UntiedGPT
from tests.zoo.plain import MLP


class Follower(Base):
    """A target network that follows, by `.data` as many do; weights are clamped."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def tensors(self):
        return (torch.randn(self.samples, 8, generator=torch.Generator().manual_seed(1)),)

    def loss(self, batch):
        with torch.no_grad():
            target = self.target(batch[0].flip(-1))
        return F.mse_loss(self.net(batch[0]), target)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.follow()
        for weight in self.net.parameters():
            weight.clamp_(-0.3, 0.3)

    def follow(self):
        for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mine.data = 0.5 * mine.data + 0.5 * theirs.data


class Still(Follower):
    def follow(self):
        pass


class Merged(Still):
    """Adds a product of weights that no tensor ranks divide to one that they do, as LoRA is merged."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.full((2, 8), 0.1)), nn.Parameter(torch.full((16, 2), 0.1))

    def loss(self, batch):
        return super().loss(batch) + (self.up @ self.down).square().mean()

    def follow(self):
        self.net[0][0].weight.data += self.up @ self.down


class InPlace(Follower):
    """Adding a tensor on meta to a real one, in place, is no error of torch's."""

    def follow(self):
        for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)


class ByOptimizer(Still):
    add = False

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            (InPlace if self.add else Follower).follow(self)


class Adaptive(Still):
    """Clips gradients by norms of rows, as timm's `adaptive_clip_grad` does."""

    def on_before_optimizer_step(self, optimizer):
        for weight in self.net.parameters():
            if weight.ndim > 1:
                largest = weight.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3).mul_(0.01)
                norm = weight.grad.norm(dim=1, keepdim=True)
                clipped = weight.grad * (largest / norm.clamp(min=1e-6))
                weight.grad.detach().copy_(torch.where(norm < largest, weight.grad, clipped))


class ByState(Follower):
    """Follows by the tensors of states, as timm's `ModelEmaV3` does."""

    @torch.no_grad()
    def follow(self):
        mine, theirs = (list(each.state_dict().values()) for each in (self.target, self.net))
        torch._foreach_lerp_(mine[1:], theirs[1:], 0.5)
        mine[0].data.lerp_(theirs[0].data, 0.5)


class ByStateInside(ByState):
    def training_step(self, batch, batch_idx):
        self.follow()
        return super().training_step(batch, batch_idx)


class ByStates(ByState):
    """Each state has copies of its own: the second would not have what the first was given."""

    def follow(self):
        for _ in range(2):
            super().follow()


class Breaks(Follower):
    """Its step fails, and its callback then puts weights back by `.data`."""

    def training_step(self, batch, batch_idx):
        raise ValueError("mine")

    def configure_callbacks(self):
        return LambdaCallback(on_exception=lambda trainer, module, error: module.follow())


class Alone(Follower):
    """What follows and what is followed are on one stage."""

    def __init__(self):
        super().__init__()
        self.head, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        del self.target

    def loss(self, batch):
        x = self.net(batch[0])
        return F.mse_loss(self.head(x), self.slow(x.detach()))

    def follow(self):
        torch._foreach_lerp_([*self.slow.parameters()], [*self.head.parameters()], 0.5)


class Inside(Still):
    """Follows at the start of the step, as lightly's `update_momentum` does."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            Follower.follow(self)
        return super().training_step(batch, batch_idx)


class Within(Still):
    """Follows in the step, and changes its weights there too."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            InPlace.follow(self)
            self.net[0][0].weight.clamp_(-0.3, 0.3)
        return super().training_step(batch, batch_idx)


WRITES = {
    "row": lambda weight: weight[0].mul_(0.5),
    "listed": lambda weight: torch._foreach_mul_([weight[0]], 0.5),
    "array": lambda weight: weight.detach().numpy().fill(0.5),  # torch counts no writes of it
    "data": lambda weight: weight[0].data.mul_(0.5),  # counts its own
    "turned": lambda weight: weight.detach().T.data.mul_(0.5),
    "assigned": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


class Rows(Still):
    """Changes a row of a weight, which another rank may have, from a step on."""

    since, at, by_state, by = 0, "training_step", False, "row"

    @torch.no_grad()
    def change(self, at):
        if at == self.at and self.global_step >= self.since:
            weight = self.net[0].state_dict()["0.weight"] if self.by_state else self.net[0][0].weight
            WRITES[self.by](weight)

    def training_step(self, batch, batch_idx):
        self.change("training_step")
        output = super().training_step(batch, batch_idx)
        self.change("behind")
        return output

    def validation_step(self, batch, batch_idx):
        self.change("validation_step")
        self.loss(batch)
        self.change("evaluated")

    def on_train_batch_start(self, batch, batch_idx):
        self.change("on_train_batch_start")


class RowsOfStates(Rows):
    at, by_state = "on_train_batch_start", True


class Keeps(Still):
    """Takes tensors of a state, or of a gathered weight, and uses them at once or elsewhere."""

    keeps, at, kept = "", "", ()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

    @torch.no_grad()
    def use(self, at):
        for kept in self.kept if at == self.at else ():
            self.log("size", kept.norm()) if self.keeps == "weight" else kept.mul_(0.5)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.keeps == "adam":
            self.kept = [entry["exp_avg"] for entry in self.optimizers().optimizer.state_dict()["state"].values()]
        elif batch_idx == 1 and self.keeps == "state":
            self.kept = [*self.net.state_dict().values()]
        self.use(f"start {batch_idx}")

    def training_step(self, batch, batch_idx):
        self.use(f"step {batch_idx}")
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.keeps == "weight":
            self.kept = [self.net[0][0].weight.detach()]
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.use(f"end {batch_idx}")


class Hoards(Keeps):
    """A block keeps a view of its weight, long after the first steps."""

    keeps = "weight"

    def __init__(self):
        super().__init__()
        self.net[0][0].register_forward_hook(self.hoard)

    def hoard(self, layer, args, output):
        self.kept = [layer.weight.t()] if self.global_step == 3 and self.training else self.kept

    def validation_step(self, batch, batch_idx):
        self.use("validation")


class Limited(Base):
    """An embedding that shortens the rows that it looks up."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, max_norm=0.5)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))

    def tensors(self):
        return (torch.randint(0, 16, (self.samples,), generator=torch.Generator().manual_seed(1)),)

    def loss(self, batch):
        return (self.net(self.embedding(batch[0])) - 1).square().mean()


class Residual(Follower):
    """Differentiates by itself, which takes gradients, also ahead of training."""

    def loss(self, batch):
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.square().mean()


class Synced(Follower):
    """`load_state_dict` takes any error, and raises one of its own."""

    def follow(self):
        self.target.load_state_dict(self.net.state_dict())


class Unit(Follower):
    """Assigns to a weight in the step. A tensor rank has all of it, and shards of its target."""

    def training_step(self, batch, batch_idx):
        self.net[0][0].weight.data = F.normalize(self.net[0][0].weight.data, dim=1)
        return super().training_step(batch, batch_idx)


class SyncedWithin(Synced):
    def training_step(self, batch, batch_idx):
        Synced.follow(self)
        return super().training_step(batch, batch_idx)

    def follow(self):
        pass


class Normed(Follower):
    def follow(self):
        self.log("norm", self.target[-1][-1].weight.data.norm())


class Restored(Follower):
    """Puts other weights in place and the own ones back, as averages for a validation are, without a copy of these."""

    def follow(self):
        own = {weight: weight.data for weight in self.net.parameters()}
        for weight in own:
            weight.data = 2 * weight.data
        for weight, values in own.items():
            weight.data = values


class Penalized(Still):
    """A penalty on an early weight comes in with the third batch."""

    def loss(self, batch):
        late = self.target[0][0].weight.square().sum() if self.trainer.global_step > 1 else 0.0
        return super().loss(batch) + late


class Following(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        InPlace.follow(module)


def by_callback():
    module = Follower()
    module.follow, module.configure_callbacks = lambda: None, Following
    return module


class Scaled(Follower):
    """Weights are assigned before training begins, and by the norm of one after each step."""

    def on_fit_start(self):
        for weight in self.net.parameters():
            weight.data = weight.data * 0.5

    def follow(self):
        with torch.no_grad():
            self.net[1][0].weight.div_(1 + float(self.net[1][0].weight.norm()))


class Averaged(Callback):
    """Validates with averaged weights, swapped in and out by copying."""

    def on_train_start(self, trainer, module):
        self.average = [weight.detach().clone() for weight in module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for mine, weight in zip(self.average, module.parameters(), strict=True):
            mine.lerp_(weight.detach(), 0.5)

    @torch.no_grad()
    def on_validation_start(self, trainer, module):
        self.trained = [weight.detach().clone() for weight in module.parameters()]
        for mine, weight in zip(self.average, module.parameters(), strict=True):
            weight.copy_(mine)

    @torch.no_grad()
    def on_validation_end(self, trainer, module):
        for mine, weight in zip(self.trained, module.parameters(), strict=True):
            weight.copy_(mine)


class Validated(Follower):
    def validation_step(self, batch, batch_idx):
        self.log("validated", self.loss(batch), sync_dist=True)

    def val_dataloader(self):
        return self.train_dataloader()

    def on_validation_epoch_end(self):
        for weight in self.net.parameters():
            weight.data = weight.data * 0.9


class Whole(Still):
    """Writes full tensors into weights by operations of several kinds, of which torch takes some shards wrongly."""

    def on_fit_start(self):
        self.net[0][0].weight.data.mul_(torch.ones(16, 8).triu())
        self.kept = [
            0.1 * torch.sin(torch.arange(1.0 + each.numel())[1:]).view(each.shape) for each in self.parameters()
        ]

    def follow(self):
        one = torch.tensor([1])
        for weight, kept in zip(self.parameters(), self.kept, strict=True):
            weight.lerp_(kept, 0.1).mul_(kept > -0.09).masked_fill_(kept > 0.099, 0).add_(
                0.01 * torch.randn(kept.shape)
            )
            weight.data[1] = 0.01
            weight[kept > 0.095] = 0.02
            weight.index_fill_(0, one, 0.03).index_add_(0, one, kept[:1]).scatter_(0, one.view([1] * weight.ndim), 0)
            weight.sub_(0.01 * weight.quantile(0.5))
        torch._foreach_add_(list(self.parameters()), self.kept, alpha=0.01)


class Joined(MLP):  # one rank has one of the three rows of its last weight
    def on_fit_start(self):
        nn.utils.parameters_to_vector(self.parameters())


class Noisy(GPT):
    """Weights are drawn anew and disturbed; numbers go on after it as on one device."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        torch.manual_seed(batch_idx)
        nn.init.xavier_uniform_(self.blocks[1].c_attn.weight)
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(1e-2 * torch.randn_like(weight))
            self.norm.bias.add_(1e-2 * torch.rand(()))


class NoisyGradients(GPT):
    def on_after_backward(self):
        torch.manual_seed(5)
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.add_(1e-2 * torch.randn_like(weight.grad))


class Truncated(GPT):
    def on_train_start(self):
        nn.init.trunc_normal_(self.blocks[0].c_attn.weight, std=0.1)
        nn.init.trunc_normal_(self.blocks[-1].c_attn.weight, std=0.1)


class Drawn(GPT):
    def on_train_start(self):
        torch.bernoulli(self.blocks[0].c_attn.weight.abs().clamp(max=1))


class SlicedRows(GPT):
    """A slice is a view on one device: of a matrix's first rows, of a fused one's queries."""

    where = "mlp.0"

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.blocks[1].get_submodule(self.where).weight[:5].mul_(0.5)


class Listed(GPT):
    """Numbers of a fused matrix, whose rows tensor ranks hold in another order."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        rows = self.blocks[1].c_attn.weight.tolist()
        with torch.no_grad():
            self.norm.bias.mul_(1 + rows[20][0])


class ReadByOne(GPT):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        talk.PATIENCE = 2.0
        if self.trainer.is_global_zero:
            float(self.blocks[1].mlp[0].weight.norm())


class Grown(GPT):
    """Gives the optimizer parameters that were not there when the module was placed."""

    def on_train_epoch_start(self):
        self.more = nn.Linear(16, 16)
        self.optimizers().add_param_group({"params": self.more.parameters()})


class Renewed(Grown):
    """Begins with a new head, and an optimizer that has it."""

    def on_train_epoch_start(self):
        self.head = nn.Linear(16, self.head.out_features, bias=False)
        self.trainer.strategy.setup_optimizers(self.trainer)


class Switched(GPT):
    set_up, late = True, None

    def configure_optimizers(self):
        return self.late or super().configure_optimizers()

    def on_train_epoch_start(self):
        self.late = torch.optim.Adam(self.parameters(), eps=1e-3)
        if self.set_up:
            self.trainer.strategy.setup_optimizers(self.trainer)
        else:
            self.trainer.optimizers = [self.late]


class Turned(GPT):
    def on_train_start(self):
        for weight in (each for each in self.parameters() if each.dim() == 2):
            nn.init.orthogonal_(weight)


class Thawed(GPT):
    def configure_optimizers(self):
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        if not self.current_epoch:
            self.optimizers().add_param_group({"params": self.norm.parameters()})


HALVES = [{"tensor_parallel_size": 2}, {"zero_stage": 1}]
STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(
        [
            *(("Noisy", layout) for layout in [*HALVES, STAGES]),
            ("NoisyGradients", HALVES[1]),
            ("Listed", HALVES[0]),
            *(("Switched", layout) for layout in [*HALVES, STAGES]),
        ],
        2,
    ),
)
def test_random_numbers_and_lists_are_those_of_whole_weights(name, layout):
    assert_parity(f"tests.same.test_between_steps:{name}", 2, layout, trainer={"max_epochs": 1}, steps=4)


@pytest.mark.parametrize(
    ("name", "layout", "said", "attributes"),
    [
        *in_turn(
            [
                ("NoisyGradients", STAGES, "on_after_backward draws random numbers for a gradient", {}),
                ("Truncated", STAGES, r"on_train_start initialises a tensor .* by trunc_normal_", {}),
                ("Drawn", HALVES[1], r"on_train_start draws random numbers \(bernoulli\) by the values of a", {}),
                ("SlicedRows", HALVES[0], "on_train_batch_end writes into a slice of a sharded tensor", {}),
                ("SlicedRows", HALVES[1], "on_train_batch_end writes into a slice of a sharded tensor", {}),
                ("Listed", STAGES, "on_train_batch_end reads numbers of a weight that another stage", {}),
                ("Grown", HALVES[1], r"was given 2 parameters \(shape \(16, 16\)", {}),
                ("Grown", {"zero_stage": 0}, "was given 2 parameters", {}),
                ("ByStates", {"zero_stage": 3}, "ByStates.on_train_batch_end changes a tensor of state_d", {}),
            ],
            2,
        ),
        ("SlicedRows", HALVES[0], r"takes a slice of a fused matrix \(shape \(48, 16\)", {"where": "c_attn"}),
        ("Joined", {"zero_stage": 1}, "Joined.on_fit_start computes something with parameters", {}),
        ("ByOptimizer", STAGES, "ByOptimizer.optimizer_step computes with a tensor of this rank", {"add": True}),
        ("Residual", STAGES, "training_step takes derivatives by itself", {}),
        ("Penalized", STAGES, "stage 1, microbatch 0: the step reads a weight or buffer of a block", {}),
        ("Follower", STAGES, "Follower.on_train_batch_end computes with a tensor of this rank", {}),
        long("InPlace", STAGES, "InPlace.on_train_batch_end computes with a tensor of this rank", {}),
        ("Synced", STAGES, "Synced.on_train_batch_end computes with a tensor of this rank", {}),
        long("by_callback", STAGES, "Following.on_train_batch_start computes with a tensor of this rank", {}),
        ("Renewed", HALVES[1], "was given 1 parameters .* begins anew keeps its parameters", {}),
        ("Switched", STAGES, "trainer.optimizers was set to another optimizer .Adam", {"set_up": False}),
        ("Turned", HALVES[0], "Turned.on_train_start changes the shape of a sharded tensor in place .t_", {}),
    ],
)
def test_what_would_be_lost_or_drawn_otherwise_is_refused(name, layout, said, attributes):
    with pytest.raises(WorkerError, match=f"(Unsupported|PipelineSplit)Error: .*{said}"):
        assert_parity(f"{__name__}:{name}", 2, layout, attributes=attributes, trainer={"max_epochs": 1})


def test_a_rank_that_reads_weights_alone_is_told():
    said = r"PeerError: reading a weight in ReadByOne.on_train_batch_end \(line \d+\)"
    if torch.__version__ >= "2.14":  # gloo ends a process there that gets a message of another size
        said = "PeerError: Rank 0 .* does not answer any more"
    with pytest.raises(WorkerError, match=said):
        assert_parity("tests.same.test_between_steps:ReadByOne", 2, {"zero_stage": 1}, trainer={"max_epochs": 1})


class CalledByOne(MLP):
    """Writes samples at the end of an epoch. One device runs it."""

    def on_train_epoch_end(self):
        talk.PATIENCE = 2.0
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.net(torch.ones(2, 8))


@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"tensor_parallel_size": 2}])
def test_a_rank_that_calls_a_module_alone_is_named(layout):
    """It waited for the others, whose next step met its messages, until the timeout of the process group."""
    said = r"PeerError: \w+ in CalledByOne.on_train_epoch_end was called on rank 0 but not on rank 1"
    with pytest.raises(WorkerError, match=said):
        assert_parity(f"{__name__}:CalledByOne", 2, layout, trainer={"max_epochs": 2})


@pytest.mark.parametrize("layout", in_turn([*HALVES, {"zero_stage": 3}], 3, 2), ids=str)
@pytest.mark.parametrize("window", [long(1), 2])
def test_averaged_weights_are_swapped_in_for_validation(layout, window):
    """Hooks after a validation, and those within a window of accumulation, see shards as the others do."""
    trainer = {"limit_val_batches": 1.0, "val_check_interval": 1, "callbacks": [Averaged]}
    trainer |= {"accumulate_grad_batches": window, "max_epochs": 2}
    assert_parity("tests.same.test_between_steps:Validated", 2, layout, trainer=trainer)


class Counted(Follower):
    """Reads weights in hooks of batches, which most modules and callbacks have. They gather nothing in a window."""

    def on_train_batch_start(self, batch, batch_idx):
        self.before = self._sent()
        self.norm = float(self.net[0][0].weight.detach().norm())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        Base.on_train_batch_end(self, outputs, batch, batch_idx)
        if batch_idx == 2:  # the third of a window of four
            assert self._sent() == self.before

    def _sent(self):
        strategy = self.trainer.strategy
        return strategy.data_axis.ledger.rows() if isinstance(strategy, Strategy3D) else None


READ = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "train_dataloader",
    "val_dataloader", "on_validation_model_eval", "on_validation_model_train", "on_validation_batch_start",
    "on_validation_batch_end", "on_before_backward", "optimizer_zero_grad", "on_save_checkpoint",
)  # fmt: skip


graphs = []
doubled = torch.compile(lambda x: 2 * x, backend=lambda graph, _: graphs.append(graph) or graph.forward)


def _reads(name):
    def hook(self, *args, **kwargs):
        compiled, ours = len(graphs), isinstance(self.trainer.strategy, Strategy3D)
        doubled(torch.ones(2))
        assert not ours or len(graphs) == compiled  # torch would compile our rules with it
        self.seen += [float(part[0].weight.detach().norm()) for part in self.net]
        for states in [each.state for each in self.trainer.optimizers]:
            weight = self.net[0][0].weight
            assert weight.is_meta or not states or (weight in states and states[weight] and states.get(weight))
        return getattr(super(Read, self), name)(*args, **kwargs)

    return hook


class Saved(Still):
    @torch.no_grad()
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["net.0.0.weight"][0].mul_(0.5)  # the weight's own memory on one device


class Read(Saved):
    """Reads weights in each hook of batches, loaders, evaluations and checkpoints, and changes one in the last."""


for _name in READ:
    setattr(Read, _name, _reads(_name))


@pytest.mark.parametrize(
    "layout", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"zero_stage": 1}]
)
def test_weights_are_read_in_hooks_of_batches_loaders_and_checkpoints(layout, tmp_path):
    trainer = {"limit_val_batches": 2, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    trainer |= {"enable_checkpointing": True, "callbacks": [partial(ModelCheckpoint, tmp_path)]}
    assert_parity("tests.same.test_between_steps:Read", 2, layout, trainer=trainer)


class SavedOnOne(Saved):
    def on_save_checkpoint(self, checkpoint):
        if self.trainer.is_global_zero:
            super().on_save_checkpoint(checkpoint)


class CopiedOnOne(Saved):
    def on_save_checkpoint(self, checkpoint):
        if self.trainer.is_global_zero:
            checkpoint["state_dict"] = {name: value * 0.5 for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("layout", [{"zero_stage": 0}, {"zero_stage": 1}, {"pipeline_parallel_size": 2}])
def test_a_state_that_one_rank_alone_changes_is_refused_and_a_copy_is_not(layout, tmp_path):
    trainer = {"enable_checkpointing": True, "callbacks": [partial(ModelCheckpoint, tmp_path)]}
    with refused_by_both(r"in place on some ranks alone \('net.0.0.weight'\)"):
        assert_parity(f"{__name__}:SavedOnOne", 2, layout, trainer=trainer)
    assert_parity(f"{__name__}:CopiedOnOne", 2, layout, trainer=trainer)


class Looked(Follower):
    """Looks at gradients where a validation begins within a window; changes no weights there."""

    on_train_batch_end = Base.on_train_batch_end

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_validation_start(self):
        if self.trainer.fit_loop.batch_idx == 0:
            assert all(weight.grad is not None for weight in self.net.parameters())


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("Thawed", {"max_epochs": 2}),
        ("Counted", {"accumulate_grad_batches": 4}),
        ("Looked", {"limit_val_batches": 1, "val_check_interval": 1, "accumulate_grad_batches": 4}),
    ],
)
def test_hooks_see_windows_and_late_parameters_as_on_one_device(name, trainer):
    assert_parity(f"{__name__}:{name}", 2, {"zero_stage": 1}, trainer=trainer)


class Copied(Follower):
    def on_before_optimizer_step(self, optimizer):
        weight, copied = self.net[0][0].bias, copy.deepcopy(self).net[0][0].bias
        assert copied.grad is None
        self.norms = [float(each.norm()) for each in (weight, copied, weight.grad, copy.deepcopy(weight.grad))]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        copy.deepcopy(self)
        self.seen += self.norms


class CallsCopy(Follower):
    copies = True

    def on_train_epoch_end(self):
        block = copy.deepcopy(self.net[0]) if self.copies else Follower().net[0]
        block.load_state_dict(self.net[0].state_dict())
        self.seen.append(float(block(torch.ones(1, 8)).sum()))


def test_a_copied_block_of_shards_is_not_called():
    with pytest.raises(WorkerError, match="A copy of a module is called, with weights that are shards of ZeRO"):
        run(train, f"{__name__}:CallsCopy", 4, {"zero_stage": 3, "tensor_parallel_size": 2}, {}, {}, world=4)
    assert_parity(
        f"{__name__}:CallsCopy", 4, {"zero_stage": 3, "tensor_parallel_size": 2}, attributes={"copies": False}
    )  # the remedy


class Swapped(Follower):
    """Weights are assigned for a test, and back."""

    def test_step(self, batch, batch_idx):
        self.log("tested", self.loss(batch), sync_dist=True)

    def test_dataloader(self):
        return self.train_dataloader()

    def on_test_start(self):
        self.before = [weight.detach().clone() for weight in self.net.parameters()]
        for weight in self.net.parameters():
            weight.data = weight.data * 0.5

    def on_test_end(self):
        for weight, before in zip(self.net.parameters(), self.before, strict=True):
            weight.data = before


def swap(strategy):
    seed_everything(7, verbose=False)
    module = Swapped()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = make_trainer(2 if strategy else 1, strategy)
    (metrics,) = trainer.test(module, verbose=False)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return metrics


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"zero_stage": 3}], ids=str)
def test_weights_are_swapped_for_a_test_without_training(layout):
    (whole,) = run(swap, None, world=1)
    for metrics in run(swap, layout, world=2):
        assert metrics == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("layout", in_turn([HALVES[1], {"zero_stage": 3}, HALVES[0], STAGES], 4, 2), ids=str)
def test_full_tensors_meet_weights_in_hooks(layout):
    """They are masks, first values and noise, which each rank has in full."""
    trainer = {"accumulate_grad_batches": 2}
    assert_parity("tests.same.test_between_steps:Whole", 2, layout, tolerance=1e-4, trainer=trainer)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *in_turn([("ByOptimizer", {"zero_stage": 1}), ("ByOptimizer", HALVES[0])], 2),
        *in_turn([("ByState", {"zero_stage": 3}), ("ByState", HALVES[0])], 2),
        *in_turn([("Restored", {"zero_stage": 3}), ("Restored", HALVES[0])], 2),
        ("Adaptive", HALVES[0]),
        ("Within", HALVES[0]),
        long("Within", {"zero_stage": 3}),
        long("Alone", STAGES),
        *(("RowsOfStates", layout) for layout in (HALVES[0], {"zero_stage": 1}, {"zero_stage": 3})),
        *(("Follower", layout) for layout in (HALVES[0], {"zero_stage": 1}, {"zero_stage": 3})),
        *(("Scaled", layout) for layout in HALVES),
        *in_turn([("Inside", HALVES[0]), ("Inside", {"zero_stage": 3})], 2),
        *in_turn([("Filled", layout) for layout in ({"zero_stage": 3}, HALVES[0], STAGES)], 2),
        *(("Limited", layout) for layout in (HALVES[0], STAGES)),
        ("Normed", STAGES),
        ("Copied", {"zero_stage": 1}),
        long("Copied", {"zero_stage": 3}),
        ("ConstrainedTable", {"zero_stage": 1}),
        long("ConstrainedTable", {"zero_stage": 2}),
        ("Constrained", {"zero_stage": 0}),
        long("Unit", HALVES[0]),
    ],
    ids=str,
)
def test_weights_change_as_on_one_device(name, layout):
    assert_parity(f"{__name__}:{name}", 2, layout)


def broken(strategy):
    with pytest.raises(ValueError, match="mine"):
        make_trainer(2, strategy, quiet=True, max_steps=2).fit(Breaks())


def test_a_step_that_has_failed_is_over():
    run(broken, {"zero_stage": 1}, world=2)


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        *((name, STAGES, "'target.* every microbatch would do") for name in ("Within", "Inside", "SyncedWithin")),
        *((name, {"zero_stage": 1}, ".* which is lost with the copies of weights") for name in ("Within", "Inside")),
        *(("Limited", {"zero_stage": stage}, ".* each data rank would shorten the rows") for stage in (1, 3)),
        ("ByStateInside", {"zero_stage": 3}, r"'target.* by state_dict\(\)"),
        ("Unit", {"zero_stage": 3}, "'net.0.0.weight'"),
    ],
)
def test_weights_changed_in_the_step_are_refused(name, layout, said):
    with pytest.raises(WorkerError, match=f"WritesError: The step changes {said}"):
        assert_parity(f"{__name__}:{name}", 2, layout)


class Early(Limited):
    def on_fit_start(self):
        raise AssertionError("set-up is over")


@pytest.mark.parametrize("stage", [0, 3])
def test_an_embedding_with_max_norm_is_refused_before_training(stage):
    with refused_by_both(r"WritesError: The step changes 'embedding.weight' .* max_norm=0.5"):
        run(train, "tests.same.test_between_steps:Early", 2, {"zero_stage": stage}, {}, {}, world=2)
    (wanted,) = run(train, f"{__name__}:Limited", 1, None, {}, {}, world=1)
    got = run(train, f"{__name__}:Shortened", 2, {"zero_stage": stage}, {}, {}, world=2)[0]["losses"]
    torch.testing.assert_close(got, wanted["losses"], rtol=1e-5, atol=1e-5)


class Shortened(Limited):
    def __init__(self):
        super().__init__()
        self.embedding.max_norm = None

    def on_train_batch_start(self, batch, index):
        weight = self.embedding.weight.data
        weight.mul_((0.5 / weight.norm(dim=1, keepdim=True)).clamp(max=1))


class Filled(Base):
    """Weights are filled again when training begins, by functions that torch calls in different ways."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))

    tensors, loss = Limited.tensors, Limited.loss

    def on_train_start(self):
        nn.init.eye_(self.net[1][0].weight)
        nn.init.constant_(self.net[2][0].bias, 0.1)

    def embedding(self, indices):
        return F.one_hot(indices, 16)[:, :8].float()


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ({}, {"zero_stage": 3}),
        ({"since": 3}, {"zero_stage": 3}),
        ({"since": 3, "by": "listed"}, {"zero_stage": 3}),
        ({"automatic_optimization": False}, {"zero_stage": 3}),
        ({"since": 3}, {"tensor_parallel_size": 2}),
        ({"automatic_optimization": False, "by": "listed"}, {"tensor_parallel_size": 2}),
        ({"at": "validation_step"}, {"tensor_parallel_size": 2}),
        ({"at": "validation_step"}, {"zero_stage": 1}),
        ({"at": "on_train_batch_start", "by": "listed"}, {"zero_stage": 1}),
        ({"since": 3, "by": "array"}, {"zero_stage": 3}),
        ({"since": 3, "by": "array"}, {"zero_stage": 1}),
        ({"at": "on_train_batch_start", "by": "array"}, {"tensor_parallel_size": 2}),
        ({"at": "on_train_batch_start", "by": "array", "by_state": True}, {"zero_stage": 3}),
        ({"at": "behind", "since": 3, "by": "data"}, {"zero_stage": 1}),
        ({"at": "behind", "since": 3, "by": "turned"}, {"zero_stage": 1}),
        ({"since": 3, "by": "data"}, {"pipeline_parallel_size": 2}),
        ({"at": "evaluated", "by": "data"}, {"zero_stage": 1}),
        ({"at": "evaluated", "by": "assigned"}, {"zero_stage": 1}),
        ({"at": "validation_step", "by_state": True}, {"zero_stage": 3}),
    ],
)
def test_a_part_of_a_shard_is_not_written(how, layout):
    """It may be a copy, and the change was lost without a word. `RowsOfStates` is the remedy."""
    said = f"{how.get('at', 'training_step')} writes into a slice of a sharded tensor|WritesError: The step changes|into an array"
    with refused_by_both(said):
        run(train, "tests.same.test_between_steps:Rows", 2, layout, how, {"limit_val_batches": 1}, world=2)


def test_weights_of_other_meshes_are_added_in_hooks():
    assert_parity(f"{__name__}:Merged", 4, {"zero_stage": 3, "tensor_parallel_size": 2})


@pytest.mark.parametrize("layout", [HALVES[0], {"zero_stage": 1}, {"zero_stage": 3}])
def test_states_of_optimizers_change_in_hooks_as_on_one_device(layout):
    assert_parity(f"{__name__}:Keeps", 2, layout, attributes={"keeps": "adam", "at": "start 1"})


@pytest.mark.parametrize(
    ("keeps", "at", "said"),
    [
        ("state", "end 2", r"on_train_batch_end changes a tensor of state_dict\(\) that .* has kept"),
        ("adam", "step 2", "WritesError: The step changes"),
        ("weight", "end 1", "on_train_batch_end uses a tensor that code has kept of a gathered weight"),
        ("weight", "step 2", "training_step uses a tensor that code has kept of a gathered weight"),
    ],
)
def test_what_code_has_kept_is_not_used_elsewhere(keeps, at, said):
    """Writes were lost, and a use of freed memory ended the process, or read what was not yet there."""
    how = {"keeps": keeps, "at": at}
    with refused_by_both(said):
        run(train, f"{__name__}:Keeps", 2, {"zero_stage": 1}, how, {}, world=2)


@pytest.mark.parametrize(("at", "tensor"), [("step 4", 1), ("validation", 1), ("step 4", 2)])
def test_what_a_block_has_kept_is_refused_in_later_steps(at, tensor):
    """The use of freed memory ended the process."""
    layout = {"zero_stage": 3, "tensor_parallel_size": tensor}
    with pytest.raises(WorkerError, match="uses a tensor that code has kept of a gathered weight"):
        run(train, f"{__name__}:Hoards", 2 * tensor, layout, {"at": at}, {"limit_val_batches": 1}, world=2 * tensor)


def after_fit(strategy):
    seed_everything(7, verbose=False)
    module = Follower()
    trainer = make_trainer(2, strategy, max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    return [optimizer.step.__func__.__module__ for optimizer in trainer.optimizers]


def test_an_optimizer_steps_by_itself_after_fit():
    """What was put around its step is taken off, the last first."""
    for steps in run(after_fit, {"zero_stage": 1}, world=2):
        assert [step.partition(".")[0] for step in steps] == ["torch"]


class Reading(UntiedGPT):
    """Its steps read numbers of weights. Torch gives those of one rank's part, without a word."""

    seen: list

    def read(self):
        every = [each.detach() for each in self.parameters()]
        weight = self.blocks[1].mlp[0].weight.detach()
        parts = torch.stack([weight.norm(), weight.amax()]).sum(), weight.norm(dim=0).sum(), (weight > 0).sum()
        self.seen += [weight.norm().item(), weight.tolist()[3][1], float(weight.abs().sum() > 70), *map(float, parts)]
        self.seen.append(float(torch.nn.utils.get_total_norm(every)))

    def training_step(self, batch, batch_idx):
        self.read()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.read()
        return super().validation_step(batch, batch_idx)


def hooked_on_objects(world, strategy):
    """Norms of a weight that hooks read which were set on the objects: a LambdaCallback's, and the module's."""
    seed_everything(7, verbose=False)
    module = Reading()
    module.seen = seen = []
    module.on_train_batch_end = lambda *_: seen.append(float(module.head.weight.norm()))
    callback = LambdaCallback(on_train_batch_start=lambda *_: seen.append(float(module.head.weight.norm())))
    flags = {"devices": world, "max_steps": 2, "num_sanity_val_steps": 0, "val_check_interval": 2}
    strategy = Strategy3D(**strategy, quiet=True) if strategy else "auto"
    Trainer(**{**QUIET, **flags}, limit_val_batches=1, callbacks=[callback], strategy=strategy).fit(module)
    return seen


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"zero_stage": 1}])
def test_hooks_that_are_set_on_objects_and_steps_read_full_weights(strategy):
    (wanted,) = run(hooked_on_objects, 1, None, world=1)
    assert len(wanted) == 4 + 3 * 7
    for got in run(hooked_on_objects, 2, strategy, world=2):
        assert got == pytest.approx(wanted, rel=1e-5)


class Swapping(MLP):
    """Evaluates, and puts weights back that it took before, of which the gathered copies would know nothing."""

    def validation_step(self, batch, batch_idx):
        before = [each.data for each in self.parameters()]
        super().validation_step(batch, batch_idx)
        for each, value in zip(self.parameters(), before, strict=True):
            each.data = value


def test_weights_that_are_gathered_are_not_swapped_in_an_evaluation():
    with pytest.raises(WorkerError, match=r"The step changes .* in place"):
        flags = {"limit_val_batches": 2}
        run(train, "tests.same.test_between_steps:Swapping", 2, {"zero_stage": 1}, {}, flags, world=2)


class Constrained(MLP):
    """Constrains its weights where pykeen does, after each forward."""

    hook = "on_before_zero_grad"
    by = "data"

    def constrain(self):
        for name, parameter in self.named_parameters():
            if self.by == "freezing":
                parameter.requires_grad_(self.trainer.global_step % 2 == 1 or "bias" in name)
            elif name.endswith("weight") and self.by == "clamp":
                parameter.data.clamp_(-0.2, 0.2)
            elif name.endswith("weight"):
                parameter.data = nn.functional.normalize(parameter.data, dim=-1)

    def on_before_zero_grad(self, optimizer):
        if self.hook == "on_before_zero_grad":
            self.constrain()

    def on_train_batch_start(self, batch, batch_idx):
        if self.hook == "on_train_batch_start":
            self.constrain()


class ConstrainedTable(Constrained):
    """Its embedding alone: no backward uses the weight of one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 8)

    def loss(self, batch):
        x, y = batch
        return super().loss((x + self.table((x[:, 0] > 0).long()), y))

    def constrain(self):
        self.table.weight.data = nn.functional.normalize(self.table.weight.data, dim=-1)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "by"),
    [
        ({"zero_stage": 3}, 1, "data"),
        ({"zero_stage": 1}, 2, "data"),
        ({"zero_stage": 1}, 1, "clamp"),  # its memory is gathered, and old
        ({"zero_stage": 3}, 1, "clamp"),
        ({"pipeline_parallel_size": 2}, 1, "clamp"),  # its backward has been
        ({"pipeline_parallel_size": 2}, 1, "data"),
        ({"tensor_parallel_size": 2}, 1, "data"),
        ({"pipeline_parallel_size": 2}, 1, "freezing"),
        ({"zero_stage": 1}, 1, "data"),
    ],
)
def test_weights_that_a_backward_gathers_again_do_not_change_before_it(strategy, accumulate, by):
    trainer, name = {"accumulate_grad_batches": accumulate}, f"{__name__}:Constrained"
    with refused_by_both("between the forward and the backward of a batch"):
        run(train, name, 2, strategy, {"by": by}, trainer, world=2)
    attributes = {"hook": "on_train_batch_start", "by": by}  # the remedy
    assert_parity(name, 2, strategy, attributes=attributes, trainer=trainer, steps=3)


class TiesLate(UntiedGPT):
    hook = "on_train_start"

    def tie(self, hook):
        if hook == self.hook:
            self.head.weight = self.embed.weight

    def setup(self, stage):
        self.tie("setup")

    def on_train_start(self):
        self.tie("on_train_start")


def test_weights_are_tied_before_stages_are_made():
    """One stage had both, and the other waited for it."""
    with refused_by_both("TiesLate.on_train_start puts 'embed.weight' in the place of 'head.weight'"):
        run(train, f"{__name__}:TiesLate", 2, {"pipeline_parallel_size": 2}, {}, {}, world=2)
    assert_parity(f"{__name__}:TiesLate", 2, {"pipeline_parallel_size": 2}, attributes={"hook": "setup"})  # the remedy


class Prunes(MLP):
    def setup(self, stage):
        prune.random_unstructured(self.net[2], "weight", 0.3)

    def on_train_end(self):
        prune.remove(self.net[2], "weight")


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_module_is_whole_after_a_hook_has_renamed_a_weight(layout):
    assert_parity(f"{__name__}:Prunes", 2, layout)


class Searches(LearningRateFinder):
    """A search in each epoch, as in Lightning's documentation, and a validation before the first one."""

    def on_fit_start(self, *_):
        pass

    def on_train_epoch_start(self, trainer, module):
        self.lr_find(trainer, module)

    def on_train_start(self, trainer, *_):
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True


@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2}, {"zero_stage": 3}])
def test_hooks_run_loops_of_lightning(layout):
    """Their steps ran by the rules of the hook, with shards in the modules."""
    searches = partial(Searches, num_training_steps=2, update_attr=False)
    assert_parity(f"{__name__}:MLP", 2, layout, trainer={"callbacks": [searches], "limit_val_batches": 1})


class Exemplary(MLP):
    example_input_array = torch.ones(2, 8)

    def forward(self, x):
        return self.net(x)


def test_a_summary_runs_no_example_under_a_pipeline():
    """Its forward met blocks of another stage, and training did not begin."""
    trainer = {"enable_model_summary": True}
    assert_parity(f"{__name__}:Exemplary", 2, {"pipeline_parallel_size": 2}, trainer=trainer)


class LogsGraph(DummyLogger):
    """As TensorBoard's logger with `log_graph=True`."""

    @rank_zero_only
    def log_graph(self, model, input_array=None):
        model(model.example_input_array if input_array is None else input_array)


def train_with_a_graph(layout):
    said = []
    with mock.patch("lightning_3d.usercode.hooks.rank_zero_warn", said.append):
        return train(f"{__name__}:Exemplary", 2, layout, {}, {"logger": LogsGraph()}), said


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"zero_stage": 3}])
def test_a_logger_runs_no_example_on_rank_0_alone(layout):
    """It waited for the other tensor rank for ever, met blocks of another stage, or gathered alone."""
    results = run(train_with_a_graph, layout, world=2)
    assert_same([got for got, _ in results], reference(f"{__name__}:Exemplary", {}, {}), 1e-5)
    assert [len(said) for _, said in results] == [1, 0]
    assert "no graph is logged. Log it ahead of Trainer.fit" in results[0][1][0]
