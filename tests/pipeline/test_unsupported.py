"""What goes wrong is said: before training where it can be, by name where it cannot."""

from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import PipelineSplitError, UnsupportedError
from lightning_3d.pipeline.cut_module import check_automatic, check_supported
from lightning_3d.pipeline.split import plan_split
from lightning_3d.pipeline.step_runs import StateWatch
from tests.parity import check, fit_with, make_trainer, refused_by_both
from tests.pipeline.loop import cut
from tests.pipeline.test_means import fresh
from tests.workers import WorkerError, run
from tests.zoo.batchless import MLP, vectors
from tests.zoo.carried import Chain


class Twice(MLP):
    def training_step(self, batch, batch_idx):
        return self(batch["x"]).mean() + self(2 * batch["x"]).mean()


class Branch(MLP):
    def forward(self, x):
        x = self.first(x)
        if x.mean() > 0:
            x = x + 1
        return self.head(self.third(self.second(x)))


def refused(cls):
    cut(cls(), num_microbatches=4).training_step(vectors(), 0)


@pytest.mark.parametrize(
    ("cls", "message"),
    [(Twice, r"UnsupportedError: The step calls 'first' .* twice"), (Branch, r"PipelineSplitError: .*`__bool__`")],
)
def test_a_step_that_cannot_be_cut_is_refused_on_every_rank(cls, message):
    with pytest.raises(WorkerError, match=message) as error:
        run(refused, cls, world=2, group=True)
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)


class Returns(LightningModule):
    """Two linears, and an output of `training_step` that the test chooses."""

    def __init__(self, output):
        super().__init__()
        self.net, self.output = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), output

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        return MappingProxyType({"loss": loss}) if self.output == "mapping" else self.output

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_that_returns(output):
    trainer = make_trainer(2, {"pipeline_parallel_size": 2}, quiet=True, max_steps=2, max_epochs=1)
    try:
        trainer.fit(Returns(output), torch.utils.data.DataLoader(torch.ones(8, 6), batch_size=4))
    except MisconfigurationException as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize(
    ("output", "message"),
    [(5.0, "must return a Tensor, a dict, or None"), ({"a": 5}, "the 'loss' key needs to be present")],
)
def test_an_invalid_output_of_a_step_raises_lightnings_own_error_on_every_rank(output, message):
    for said in run(fit_that_returns, output, world=2):
        assert message in said


def test_any_mapping_with_a_loss_is_an_output():
    assert run(fit_that_returns, "mapping", world=2) == [2, 2]


class ByView(nn.Module):
    """Changes an activation in place through a view, which the rehearsal cannot follow."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def training_step(self, batch, batch_idx):
        x = self.first(batch["x"])
        part = x[:, :3]
        part.mul_(0.5)
        return self.second(x).square().mean()


class Outside(ByView):
    """Keeps an activation outside of torch, and uses it on a later stage."""

    def training_step(self, batch, batch_idx):
        x = self.first(batch["x"])
        kept = torch.tensor(x.tolist())
        return (self.second(x) + kept).square().mean()


class Unseen(ByView):
    """What reaches the second block depends on who runs the first one."""

    def training_step(self, batch, batch_idx):
        x = self.first(batch["x"])
        return self.second(x * (1.0 + dist.get_rank())).square().mean()


@pytest.mark.parametrize(
    ("cls", "message"),
    [(ByView, "gets other inputs than in the uncut step"), (Outside, "`tolist`"), (Unseen, "gets other inputs")],
)
def test_what_would_be_computed_wrongly_is_found_before_training(cls, message):
    with pytest.raises(WorkerError, match=message) as error:
        run(refused, cls, world=2, group=True)
    assert str(error.value).count("PipelineSplitError") >= 2


class Recomputed(Chain):
    """Checkpoints around blocks: a stage that gets the input of a block within has no gradient for it."""

    reentrant = True

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class NotReentrant(Recomputed):
    reentrant = False


class Sparse(Chain):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(8, 6, sparse=True)

    def forward(self, x):
        return super().forward(x + self.embedding((x[:, :2] > 0).long()))


class Dense(Sparse):
    def __init__(self):
        super().__init__()
        self.embedding.sparse = False


class Frequent(Dense):
    def __init__(self):
        super().__init__()
        self.embedding.scale_grad_by_freq = True


class Hooked(Chain):
    """Halves the gradient of what goes into a block of the last stage."""

    def __init__(self):
        super().__init__()
        self.blocks[3].register_full_backward_hook(lambda module, grads, _: (grads[0] / 2,))


class HookedTensor(Chain):
    def forward(self, x):
        x = self.blocks[:3](x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad / 2)
        return self.blocks[3:](x)


class Retains(Chain):
    def forward(self, x):
        x = self.blocks[:4](x)
        if x.requires_grad:
            x.retain_grad()
        return self.blocks[4:](x)


@pytest.mark.parametrize(
    ("kind", "says", "instead"),
    [
        (Sparse, "UnsupportedError: embedding has sparse gradients .* Use sparse=False", Dense),
        (Hooked, r"UnsupportedError: A block has a hook for its backward .*x.register_hook", HookedTensor),
        (Retains, r"UnsupportedError: training_step asks to keep the gradient .* Use register_hook", HookedTensor),
        (Recomputed, r"another gradient than the whole module.* use_reentrant=False", NotReentrant),
        (Frequent, "UnsupportedError: embedding divides the gradient .* num_microbatches=1 runs", Frequent),
    ],
)
def test_gradients_that_stages_cannot_have_are_refused(kind, says, instead):
    with refused_by_both(says) as error:
        run(fit_with, partial(fresh, kind, 2), {"pipeline_parallel_size": 2}, {}, world=2)
    assert "on_train_batch" not in str(error.value)
    check(partial(fresh, instead, 2), 2, {"num_microbatches": 1} if instead is kind else {})


def test_running_statistics_of_instance_norms_are_watched():
    """A test of the loss does not see that each microbatch changes them."""
    net = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))
    watch = StateWatch(net, ["0"])
    net(torch.ones(2, 2, 4))
    assert "0.running_mean" in {place.name for place in watch.written()}


class Late(nn.Linear):
    """Saves its weight once it has run, as a scale of brevitas that is found while it trains."""

    ran = False

    def forward(self, x):
        self.ran = True
        return super().forward(x)

    def state_dict(self, **kwargs):
        state = super().state_dict(**kwargs)
        return state if self.ran else {key: value for key, value in state.items() if not key.endswith("weight")}


class SavesLate(Chain):
    def __init__(self):
        super().__init__()
        self.blocks[3] = Late(8, 8)


def test_a_block_that_saves_its_weight_once_it_has_run_is_refused():
    """On the rank that saves, blocks of other stages have never run: the checkpoint had no such weight."""
    with refused_by_both(r"blocks.3 .Late. leaves its parameter 'weight' out of its state_dict"):
        run(fit_with, partial(fresh, SavesLate, 2), {"pipeline_parallel_size": 2}, {}, world=2)
    check(partial(fresh, SavesLate, 2), 2, {"pipeline_parallel_size": 1, "tensor_parallel_size": 2})


def test_sparse_gradients_train_on_tensor_ranks():
    check(partial(fresh, Sparse, 2), 2, {"pipeline_parallel_size": 1, "tensor_parallel_size": 2})


def test_more_stages_than_blocks():
    with pytest.raises(PipelineSplitError, match="5 stages but the module only 4 blocks"):
        plan_split(MLP(), None, 5)


def test_cuts_by_hand():
    split = plan_split(MLP(), None, 3, cuts=["second", "head"])
    assert split.stages == (("first",), ("second", "third"), ("head",))
    with pytest.raises(PipelineSplitError, match="'nowhere' is not a block"):
        plan_split(MLP(), None, 2, cuts=["nowhere"])
    with pytest.raises(PipelineSplitError, match="does not run after"):
        plan_split(MLP(), None, 3, cuts=["head", "second"])
    with pytest.raises(PipelineSplitError, match="3 stages need 2"):
        plan_split(MLP(), None, 3, cuts=["second"])


def test_manual_optimization_and_closures():
    module = MLP()
    check_supported(module, [torch.optim.SGD(module.parameters(), lr=1.0)], ())
    with pytest.raises(UnsupportedError, match="LBFGS"):
        check_supported(module, [torch.optim.LBFGS(module.parameters())], ())
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="Manual optimization"):
        check_automatic(module)


class OwnBackward(LightningModule):
    def backward(self, loss):
        (2 * loss).backward()


def test_code_of_the_users_own_around_backward_is_warned_of():
    with pytest.warns(UserWarning, match=r"OwnBackward.backward is called .* once the gradients are there"):
        check_supported(OwnBackward(), (), ())
    freezes = type("Freezes", (Callback,), {"on_before_backward": lambda *_: None})
    with pytest.warns(UserWarning, match=r"Freezes.on_before_backward is called"):
        check_supported(LightningModule(), (), [freezes()])
    check_supported(LightningModule(), (), [Callback()])
