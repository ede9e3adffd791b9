"""Optimizers, schedules, parameter groups, callbacks that change them, hooks: over mixed plain and split parameters."""

import itertools
import re
from contextlib import suppress
from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_3d.errors import DivergenceError, UnsupportedError, WritesError
from tests.parity import assert_parity, build, in_turn, layouts, long, make_trainer, reference, train
from tests.workers import on_ranks, run
from tests.zoo.language import UntiedGPT
from tests.zoo.plain import MLP

LAYOUTS = layouts("tensor", "zero3", "pipeline-zero1")
SHORT = ["tensor", "zero3", long("pipeline-zero1")]
KINDS = {
    "fused": lambda parameters: optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "single": lambda parameters: optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=False),
    "foreach": lambda parameters: optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=True),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=1e-2, eps=1e-2),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=1e-4, eps=1e-3),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2, eps=(1e-3, 1e-3)),
    "adamax": lambda parameters: optim.Adamax(parameters, lr=1e-3, eps=1e-4),
}


class Chosen(UntiedGPT):
    def configure_optimizers(self):
        return KINDS[self.optimizer](self.parameters())


class Plateau(MLP):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class OwnPlateau(Plateau):
    """Each data rank logs a number of its own samples, which gets better on one where it gets worse on another."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0][:, 7].mean() * (-1) ** self.current_epoch)


class PlateauByHand(OwnPlateau):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.step_by_hand(self.optimizers(), batch)
        self.log("loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.lr_schedulers().step(self.trainer.callback_metrics["val_loss"])


class Tagged(MLP):
    """Attributes of parameters choose their groups, as in code of state space models."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.rate = 0.05 if parameter.ndim > 1 else 0.2

    def configure_optimizers(self):
        each = [{"params": [p], "lr": getattr(p, "rate", 0.01)} for p in self.parameters()]
        return torch.optim.SGD(each, lr=0.01)


class OnSphere(nn.Parameter):
    """A parameter that its optimizer knows by its class, as geoopt's on manifolds."""


class Sphere(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, OnSphere):
                parameter.copy_(nn.functional.normalize(parameter, dim=1))
        return loss


class OnSpheres(MLP):
    def __init__(self):
        super().__init__()
        for layer in (each for each in self.modules() if isinstance(each, nn.Linear)):
            layer.weight = OnSphere(layer.weight.detach())

    def configure_optimizers(self):
        return Sphere(self.parameters(), lr=0.05)


@pytest.mark.parametrize("kind", ["Tagged", "OnSpheres"])
@pytest.mark.parametrize("strategy", [{"zero_stage": 1}, {"zero_stage": 3}, {"tensor_parallel_size": 2}], ids=str)
def test_an_optimizer_meets_the_class_and_the_attributes_of_parameters(kind, strategy):
    """Shards had neither: groups, and the steps on manifolds, were other ones without a word."""
    assert_parity(f"{__name__}:{kind}", 2, {**strategy, "quiet": True})


def _fit_twice(kind, strategy):
    """Two fits with one optimizer. Code has kept the weights: their values after each."""
    seed_everything(7, verbose=False)
    module, after = build(f"{__name__}:{kind}"), []
    kept, optimizer = [*module.parameters()], Sphere(module.parameters(), lr=0.05, momentum=0.9)
    module.configure_optimizers = lambda: optimizer
    for _ in range(2):
        trainer = make_trainer(2 if strategy else 1, strategy, quiet=True, max_epochs=1, limit_val_batches=0)
        trainer.fit(module)
        assert all(mine is now for mine, now in zip(kept, module.parameters(), strict=True))
        after.append([weight.detach().clone() for weight in kept])
    return after


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("Tagged", {"tensor_parallel_size": 2}),
        ("OnSpheres", {"zero_stage": 3}),
        ("OnSpheres", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_second_fit_goes_on_with_the_objects_and_the_states_of_the_first(kind, strategy):
    """Weights of other stages came back as plain parameters, and an optimizer began anew without a word."""
    (wanted,) = run(_fit_twice, kind, None, world=1)
    for got in run(_fit_twice, kind, strategy, world=2):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


COMMON = ["fused", "single", "adafactor"]
OFTEN = [each for each in itertools.product(COMMON, LAYOUTS) if each[0] == "adafactor" or "pipeline" not in each[1]]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(*pair, marks=() if pair in OFTEN and at % 2 else pytest.mark.long)
        for at, pair in enumerate(itertools.product(KINDS, LAYOUTS))
    ],
)
def test_optimizer(kind, layout):
    trainer = {"max_epochs": 1}
    assert_parity(f"{__name__}:Chosen", *LAYOUTS[layout], attributes={"optimizer": kind}, trainer=trainer)


@pytest.mark.parametrize("layout", SHORT)
def test_plateau_schedule(layout):
    assert_parity(f"{__name__}:Plateau", *LAYOUTS[layout], trainer={"max_epochs": 3, "limit_val_batches": 2})


class Freezing(UntiedGPT):
    """A hook freezes a block in the second batch of a window: the step uses the gradients of the first."""

    def on_train_batch_start(self, batch, batch_idx):
        self.freeze(batch_idx % 4 == 3)

    def freeze(self, frozen):
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad = not frozen


class LateFreezing(Freezing):
    """A block is frozen after the forward, as by a toggle between two losses, and thawed after the backward."""

    def on_before_backward(self, loss):
        self.freeze(self.global_step % 2 == 1)

    def on_after_backward(self):
        self.freeze(False)


class Partly(torch.nn.Linear):
    def forward(self, x):
        plain = x + self.bias
        return plain if self.rows is None else torch.where(self.rows, super().forward(x), plain)


class RoutedFreezing(Freezing):
    """Only the samples of the first data rank meet the weight of that block."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = Partly(16, 16)

    def forward(self, tokens):
        alone = self.trainer.world_size == 1
        rows = torch.arange(len(tokens))[:, None, None] < len(tokens) // (1 + alone)
        self.blocks[0].rows = rows if alone or not self.global_rank else None
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("Freezing", "zero0"), ("Freezing", "zero1"), ("LateFreezing", "zero0"), ("Freezing", "tensor"),
     ("Freezing", "zero3"), long("Freezing", "pipeline-zero1"), ("RoutedFreezing", "zero0"),
     ("RoutedFreezing", "zero1")],
)  # fmt: skip
def test_frozen_within_a_window(kind, layout):
    """Replicas diverged (zero0), the parameters trained on (zero1), a hook of ours ended in a KeyError (late)."""
    chosen = {**LAYOUTS, **layouts("zero0", "zero1")}[layout]
    assert_parity(f"{__name__}:{kind}", *chosen, trainer={"accumulate_grad_batches": 2})


class Muon(UntiedGPT):
    """Whole matrices by Muon, what is no matrix by AdamW: two optimizers, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        matrices = [p for name, p in self.named_parameters() if p.ndim == 2 and "blocks" in name]
        rest = [p for p in self.parameters() if not any(p is m for m in matrices)]
        return optim.Muon(matrices, lr=1e-3), optim.AdamW(rest, lr=1e-3, eps=1e-4)


@pytest.mark.parametrize("layout", ["zero0", "tensor", "zero3"])
def test_two_optimizers_one_of_which_sees_whole_matrices(layout):
    world, strategy = {**LAYOUTS, "zero0": (2, {"zero_stage": 0})}[layout]
    # Muon computes in bf16 inside
    assert_parity(f"{__name__}:Muon", world, strategy, trainer={"max_epochs": 1}, tolerance=1e-3)


class Turns(UntiedGPT):
    """Two optimizers in turn, each with a backward of its own in the same step, as adversaries are trained."""

    by = "toggle_optimizer"

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            self.choose(index, optimizer)
            loss = self.step_by_hand(optimizer, batch)
            if self.by == "toggle_optimizer":
                self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def choose(self, index, optimizer):
        if self.by == "toggle_optimizer":
            self.toggle_optimizer(optimizer)
        elif index == 0:
            self.blocks.requires_grad_(False)
        else:
            self.blocks.requires_grad_(True)
            self.embed.requires_grad_(False)  # for good

    def configure_optimizers(self):
        rest = [p for name, p in self.named_parameters() if "blocks" not in name]
        made = optim.AdamW(rest, lr=1e-3, eps=1e-4), optim.AdamW(self.blocks.parameters(), lr=1e-3, eps=1e-4)
        return list(made), [lr_scheduler.ExponentialLR(each, 0.5) for each in made]

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()


@pytest.mark.parametrize("by", ["toggle_optimizer", long("requires_grad_")])
@pytest.mark.parametrize("layout", ["zero1", "zero3", long("tensor-zero2")])
def test_two_optimizers_in_turn(layout, by):
    world, strategy = {**LAYOUTS, **SEARCHED}[layout]
    assert_parity(f"{__name__}:Turns", world, strategy, attributes={"by": by}, trainer={"max_epochs": 2})


class OwnBackward(UntiedGPT):
    """Manual optimization that calls `loss.backward()`, twice in a step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        whole = 0.0
        for half in (0, 1):
            loss = self.loss([each[half::2] for each in batch]) / 2
            loss.backward()
            whole += loss.detach()
        self.optimizers().step()
        self.log("loss", whole, sync_dist=True)


@pytest.mark.parametrize("zero_stage", [0, long(1), long(3)])
def test_a_backward_of_the_user(zero_stage):
    assert_parity(f"{__name__}:OwnBackward", 2, {"zero_stage": zero_stage}, trainer={"max_epochs": 1})


class Retries(OwnBackward):
    """Catches the error of a backward, and begins again."""

    def training_step(self, batch, batch_idx):
        def fail(_):
            raise RuntimeError

        hook = self.norm.register_forward_pre_hook(lambda _, args: args[0].register_hook(fail) and None)
        with suppress(RuntimeError):
            self.loss(batch).backward()
        hook.remove()
        super().training_step(batch, batch_idx)


class BeforeItsOwn(UntiedGPT):
    """Automatic optimization, with a backward in the step: Lightning zeroes what it gives in the first of a window."""

    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        return super().training_step(batch, batch_idx)


class InValidation(UntiedGPT):
    """A backward for each batch of a validation, of which one rank has fewer."""

    def val_dataloader(self):
        return DataLoader([*super().val_dataloader()][self.global_rank :], batch_size=None)

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.loss(batch).backward()


@pytest.mark.parametrize(
    ("kind", "zero_stage", "trainer"),
    [
        ("Retries", 0, {}),
        ("BeforeItsOwn", 1, {"accumulate_grad_batches": 2}),
        ("InValidation", 0, {"limit_val_batches": 1.0, "val_check_interval": 2}),
    ],
)
def test_other_backwards_of_the_user(kind, zero_stage, trainer):
    assert_parity(f"{__name__}:{kind}", 2, {"zero_stage": zero_stage}, trainer=trainer)


class OwnGradients(UntiedGPT):
    """Gradients of `torch.autograd.grad`, given to the parameters."""

    automatic_optimization, averages, wrapped = False, False, True

    def training_step(self, batch, batch_idx):
        loss, parameters = self.loss(batch), list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = self.trainer.strategy.reduce(gradient) if self.averages else gradient
        self.optimizers(use_pl_optimizer=self.wrapped).step()
        self.log("loss", loss, sync_dist=True)


class StepsItself(OwnGradients):
    """Calls the optimizer itself, of which the strategy learns nothing."""

    wrapped = False


class OfFirstSamples(UntiedGPT):
    """The first step scales a weight by what it sees, as ActNorm does."""

    def training_step(self, batch, batch_idx):
        if not self.global_step:
            with torch.no_grad():
                next(self.parameters()).mul_(batch[0].float().mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "error", "zero_stage", "words"),
    [
        (OwnGradients, DivergenceError, 0, "Average those of torch.autograd.grad"),
        (OwnGradients, WritesError, 1, "average such gradients over data"),
        (StepsItself, WritesError, 1, "average such gradients over data"),
        (OfFirstSamples, DivergenceError, 0, "writes what it computes from its samples"),
    ],
)
@on_ranks(2, group=False)
def test_what_one_rank_does_alone_is_refused(kind, error, zero_stage, words):
    trainer = make_trainer(2, {"zero_stage": zero_stage}, quiet=True, max_epochs=1)
    with pytest.raises(error, match=words):
        trainer.fit(kind())


def test_gradients_that_the_step_averages_are_those_of_one_device():
    """The remedy of both errors."""
    averages = {"averages": True}
    assert_parity(f"{__name__}:OwnGradients", 2, {"zero_stage": 0}, attributes=averages, trainer={"max_epochs": 1})


class Scheduled(UntiedGPT):
    """Groups with rates of their own, under a schedule."""

    kind = "every step"

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 2e-3, "weight_decay": 0.0}]
        made = optim.AdamW(groups, lr=1e-3, eps=1e-4)
        if self.kind == "every step":
            steps = self.trainer.estimated_stepping_batches
            schedule = lr_scheduler.OneCycleLR(made, max_lr=[1e-2, 2e-2], total_steps=steps)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        schedule = lr_scheduler.StepLR(made, 1, gamma=0.3)
        how = {"interval": "step", "frequency": 2} if self.kind == "every second step" else {"interval": "epoch"}
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, **how}}


@pytest.mark.parametrize(
    ("kind", "layout"),
    in_turn([("every step", "tensor"), ("every second step", "zero3"), ("every epoch", "pipeline-zero1")], 3, 1),
)
def test_parameter_groups_under_schedules(kind, layout):
    assert_parity(f"{__name__}:Scheduled", *LAYOUTS[layout], attributes={"kind": kind}, trainer={"max_epochs": 2})


class Unfreeze(BaseFinetuning):
    """The blocks join the optimizer in the second epoch, in a group of their own."""

    def freeze_before_training(self, module):
        self.freeze(module.blocks)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks, optimizer, lr=5e-4)


class Trained(UntiedGPT):
    def configure_optimizers(self):
        return optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


@pytest.mark.parametrize("layout", SHORT)
def test_finetuning_callback(layout):
    assert_parity(f"{__name__}:Trained", *LAYOUTS[layout], trainer={"max_epochs": 3, "callbacks": [Unfreeze]})


@pytest.mark.parametrize("layout", SHORT)
def test_accumulation_that_changes_with_the_epoch(layout):
    changing = partial(GradientAccumulationScheduler, {0: 1, 1: 2, 2: 3})
    assert_parity("GPT", *LAYOUTS[layout], trainer={"max_epochs": 3, "callbacks": [changing]})


AVERAGES = {
    "EMAWeightAveraging": EMAWeightAveraging,
    "StochasticWeightAveraging": partial(StochasticWeightAveraging, swa_lrs=1e-3, swa_epoch_start=1),
    "ModelPruning": partial(ModelPruning, "l1_unstructured", amount=0.5),
}


@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averaged_weights_where_ranks_hold_whole_ones(kind):
    trainer = {"max_epochs": 3, "limit_val_batches": 1, "callbacks": [AVERAGES[kind]]}
    assert_parity("GPT", 2, {"zero_stage": 0}, trainer=trainer)


def _refused(strategy, world, callback, changes=None):
    module = MLP()
    if changes is not None:
        changes(module)
    callbacks = [AVERAGES[callback]()] if callback else []
    try:
        make_trainer(world, strategy, max_steps=1, callbacks=callbacks).fit(module)
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["tensor", long("zero3")])
def test_callbacks_that_need_whole_weights_are_refused_on_every_rank(layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_refused, strategy, world, "ModelPruning", world=world):
        assert said.startswith("ModelPruning chooses weights by all values of a parameter")


def _hook(module):
    module.net[0].weight.register_hook(lambda grad: grad * 2)


def _late_hook(module):
    module.on_train_start = lambda: module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _optimizer_hook(module):
    """An optimizer that steps in the backward, and keeps groups in its state: optimi's gradient release."""
    plain = module.configure_optimizers

    def configure():
        optimizer = plain()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(lambda parameter: None)
                optimizer.state[parameter] = {"group": group}
        return optimizer

    module.configure_optimizers = configure
    module.on_sanity_check_start = module.on_train_start = lambda: pytest.fail("training has begun")


@pytest.mark.parametrize(
    ("hook", "layout"),
    [(_hook, "tensor"), (_late_hook, "zero3"), (_optimizer_hook, "zero3"), (_optimizer_hook, "pipeline-zero1")],
)
def test_hooks_of_parameters_that_are_divided_are_refused(hook, layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_refused, strategy, world, None, hook, world=world):
        assert re.match(r"(net.0.weight|scale) has a hook for its gradient", said)


class Hooked(UntiedGPT):
    """Gradients changed where Lightning offers it, and a hook in the graph of activations."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def forward(self, tokens):
        scores = super().forward(tokens)
        if scores.requires_grad:
            scores.register_hook(lambda grad: grad * 3)
        return scores


@pytest.mark.parametrize("layout", SHORT)
def test_gradients_changed_by_hooks(layout):
    assert_parity(f"{__name__}:Hooked", *LAYOUTS[layout], trainer={"max_epochs": 1})


class Searched(MLP):
    def configure_optimizers(self):
        return optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


SEARCHED = {
    "zero0": (2, {"zero_stage": 0}),
    "zero1": (2, {"zero_stage": 1}),
    "tensor-zero2": (4, {"tensor_parallel_size": 2, "zero_stage": 2}),
}


@pytest.mark.parametrize("layout", in_turn([*SEARCHED, "zero3", "tensor"], 3))
def test_lbfgs_searches_with_whole_parameters_and_the_loss_of_all_data_ranks(layout):
    world, strategy = {**LAYOUTS, **SEARCHED}[layout]
    assert_parity(f"{__name__}:Searched", world, strategy, trainer={"max_epochs": 1}, tolerance=1e-4)


class Rated(MLP):
    learning_rate = 1e-3

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=self.learning_rate)


def _find_rate(strategy, world):
    seed_everything(7, verbose=False)
    module = Rated()
    trainer = make_trainer(world, strategy, max_epochs=30, limit_val_batches=0)
    found = Tuner(trainer).lr_find(module, num_training=12, min_lr=1e-4, max_lr=1.0, early_stop_threshold=None)
    trainer.fit(module)
    return found.results["loss"], module.learning_rate, float(module.scale)


@pytest.mark.parametrize("layout", [long("tensor"), "pipeline"])
def test_lr_find(layout):
    world, strategy = {**LAYOUTS, "pipeline": (2, {"pipeline_parallel_size": 2})}[layout]
    (wanted,) = run(_find_rate, None, 1, world=1)
    for got in run(_find_rate, strategy, world, world=world):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [long(0), long(3)])
def test_lr_find_is_the_same_on_all_data_ranks(stage):
    one, two = run(_find_rate, {"zero_stage": stage}, 2, world=2)
    assert one == two


class Compiled(UntiedGPT):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor", "zero3"])
def test_compiled_blocks(layout):
    assert_parity(f"{__name__}:Compiled", *LAYOUTS[layout], trainer={"max_epochs": 1})


@pytest.mark.parametrize("layout", ["zero0", "zero3"])
@pytest.mark.parametrize("module", ["OwnPlateau", "PlateauByHand"])
def test_a_schedule_follows_the_metric_of_all_samples(module, layout):
    """Ranks that followed their own samples would reduce their learning rates in other epochs."""
    name, trainer = f"{__name__}:{module}", {"max_epochs": 4, "limit_val_batches": 2}
    for got in run(train, name, 2, layouts(layout)[layout][1], {}, trainer, world=2):
        wanted = reference(name, {}, trainer)
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)
