"""Accumulation windows that do not begin and end as usual: gradients left over, and gradients that are to stay."""

import pytest
import torch
from torch import nn

from tests.parity import assert_parity, layouts, refused_by_both
from tests.zoo.plain import MLP

ALL = layouts("zero0", "zero1", "zero2", "pipeline", "zero3")
LAYOUTS = {name: strategy for name, (_, strategy) in ALL.items()}


class EndsWithin(MLP):
    """Skips the rest of an epoch after the first of two batches: no optimizer step follows that one."""

    optimizer = "plain_sgd"

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class ZeroesRarely(MLP):
    """Adds the gradients of every other batch to those of the one before."""

    optimizer = "plain_sgd"

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            (optimizer if batch_idx % 4 == 0 else self).zero_grad()


class ReadsBefore(ZeroesRarely):
    def on_before_zero_grad(self, optimizer):
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        self.seen.append(float(sum(norms)))


class StepsPart(MLP):
    """Nobody zeroes the gradients of what the optimizer does not have: they add up, and are in the norm."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2:].parameters(), lr=0.05)


class CallsBlock(MLP):
    """Hooks call a block, within a window too, and one changes its weight after that."""

    optimizer = "plain_sgd"

    def on_train_batch_start(self, batch, batch_idx):
        self.call()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.call()
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)
        self.call()
        self.seen.append(float(sum(weight in self.names for weight in self.parameters())))

    def call(self):
        with torch.no_grad():
            self.seen.append(float(self.net[0](torch.ones(1, 8)).sum()))

    def configure_optimizers(self):
        self.names = {weight: name for name, weight in self.named_parameters()}
        return super().configure_optimizers()


class OtherValues(MLP):
    """Evaluates with averages of weights, by `functional_call`, and loads them from clones of its weights."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.load_state_dict({name: weight.detach() * 0.9 for name, weight in self.named_parameters()})

    def on_validation_start(self):
        self.values = {name: value * 0.5 for name, value in self.net.state_dict().items()}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        with torch.no_grad():
            call = torch.func.functional_call(self.net, self.values, torch.ones(2, 8))
            first = torch.func.functional_call(self.net[0], {"bias": self.values["0.bias"]}, torch.ones(2, 8))
        self.seen += [float(call.sum()), float(first.sum())]


class Differentiates(MLP):
    def on_before_optimizer_step(self, optimizer):
        torch.autograd.grad(self.net[0](torch.ones(1, 8)).sum(), self.net[0].weight)


class HasOwnLoss(MLP):
    def on_before_optimizer_step(self, optimizer):
        (torch.ones(1, 8) @ self.net[0].weight.T).sum().backward()


class OwnBackward(MLP):
    def backward(self, loss):
        weights = [*self.net.parameters(), self.scale]
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient


class SetsPlaces(MLP):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.net[0].bias.set_(self.net[0].bias * 0.5)


class SetsValues(MLP):
    """The same by the remedy."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.net[0].bias.copy_(self.net[0].bias * 0.5)


class Unaveraged(MLP):
    """Optimizes by hand, with `sync_grad=False` in one batch of two, or in all."""

    optimizer = "plain_sgd"
    all_of_them = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, last = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last and not self.all_of_them):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class NeverAveraged(Unaveraged):
    all_of_them = True


class BackwardOfBlock(MLP):
    """Adds gradients of a call in a hook, also within a window, and reads them there."""

    optimizer = "plain_sgd"

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.enable_grad():
            self.net[0](torch.ones(1, 8)).sum().backward()
        self.seen.append(float(self.net[0].weight.grad.norm()))


class ReadsStates(MLP):
    """Clips some gradients of a window by an optimizer's states before a backward, and all of them in a closure."""

    def on_before_backward(self, loss):
        found = map(self.trainer.optimizers[0].state.get, self.parameters())
        moments = sum(float(state["exp_avg"].norm()) for state in found if state)
        nn.utils.clip_grad_norm_(self.net[0].parameters(), 1e-3 + 0.01 * moments)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        def scaled():
            loss = optimizer_closure()
            for weight in self.net[0].parameters():
                weight.grad.div_(weight.grad.abs().mean().item())
            return loss

        optimizer.step(closure=scaled)


class KeepsNames(MLP):
    """Finds weights in `configure_optimizers`' names, in evaluations too, and changes them and gradients in windows."""

    optimizer = "plain_sgd"

    def configure_optimizers(self):
        self.names = {weight: name for name, weight in self.named_parameters()}
        return super().configure_optimizers()

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].zero_grad()
        for weight in self.net[2:].parameters():
            weight.data.clamp_(-0.15, 0.15)

    def on_after_backward(self):
        super().on_after_backward()
        for weight in self.parameters():
            weight.data.mul_(0.99 if "bias" in self.names[weight] else 0.98)
            weight.grad = None if weight.grad is None else weight.grad * 0.8 + torch.full(weight.shape, 1e-3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            torch._foreach_mul_([weight for weight in self.parameters() if "bias" in self.names[weight]], 0.9)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        listed = self.trainer.optimizers[0].param_groups[0]["params"]
        self.seen += [float(len(set(listed).intersection(self.parameters(), self.names)))]


@pytest.mark.parametrize(
    ("world", "layout", "precision"),
    [
        (2, {"zero_stage": 1}, "32"),
        (2, {"zero_stage": 1}, "bf16-mixed"),  # FSDP2 keeps gradients elsewhere
        (2, {"zero_stage": 3}, "32"),
        (4, {"zero_stage": 1, "pipeline_parallel_size": 2}, "32"),
    ],
)
def test_hooks_know_weights_by_those_of_configure_optimizers(world, layout, precision):
    trainer = {"accumulate_grad_batches": 2, "precision": precision, "limit_val_batches": 2}
    tolerance = 1e-5 if precision == "32" else 0.02
    assert_parity(f"{__name__}:KeepsNames", world, layout, trainer=trainer, tolerance=tolerance)


def test_hooks_within_a_window_read_states_and_gradients():
    assert_parity(f"{__name__}:ReadsStates", 2, LAYOUTS["zero2"], trainer={"accumulate_grad_batches": 2})


@pytest.mark.parametrize(("layout", "window"), [("zero1", 2), ("zero2", 1)])
def test_hooks_call_a_block_and_change_it(layout, window):
    assert_parity(f"{__name__}:CallsBlock", 2, LAYOUTS[layout], trainer={"accumulate_grad_batches": window})


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_code_between_steps_calls_with_other_values(layout):
    assert_parity(f"{__name__}:OtherValues", 2, LAYOUTS[layout], trainer={"limit_val_batches": 2})


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_hooks_set_weights_by_copy(layout):
    assert_parity(f"{__name__}:SetsValues", 2, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_backward_in_a_hook_gives_gradients(layout):
    assert_parity(f"{__name__}:BackwardOfBlock", 2, LAYOUTS[layout], trainer={"accumulate_grad_batches": 2})


@pytest.mark.parametrize(
    ("module", "layout", "text"),
    [
        ("Differentiates", "zero1", "differentiates by a weight"),
        ("HasOwnLoss", "zero1", "a loss that it computes from weights of its own"),
        ("OwnBackward", "pipeline", "a backward of the module's own"),
        ("SetsPlaces", "zero3", r"weight\.copy_\(values\)"),
    ],
)
def test_gradients_in_a_hook_that_shards_would_not_get_are_refused(module, layout, text):
    with refused_by_both(text):
        assert_parity(f"{__name__}:{module}", 2, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "pipeline"])
def test_gradients_that_no_optimizer_has_add_up(layout):
    assert_parity(f"{__name__}:StepsPart", 2, LAYOUTS[layout], trainer={"accumulate_grad_batches": 2})


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "pipeline"])
def test_gradients_of_a_window_without_a_step_are_dropped(layout):
    module = f"{__name__}:EndsWithin"
    assert_parity(module, 2, LAYOUTS[layout], trainer={"accumulate_grad_batches": 2}, steps=3)


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "pipeline"])
def test_gradients_that_the_module_does_not_zero_stay(layout):
    assert_parity(f"{__name__}:ReadsBefore", 2, LAYOUTS[layout])


@pytest.mark.parametrize(("kind", "world", "data"), [("ZeroesRarely", 2, {}), ("ReadsBefore", 4, {"zero_stage": 1})])
def test_gradients_that_stay_are_summed_over_stages_once(kind, world, data):
    layout = {"pipeline_parallel_size": 2, **data}
    assert_parity(f"{__name__}:{kind}", world, layout, trainer={"accumulate_grad_batches": 2})


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero3"])
@pytest.mark.parametrize("module", ["Unaveraged", "NeverAveraged"])
def test_windows_by_hand_with_sync_grad(module, layout):
    assert_parity(f"{__name__}:{module}", 2, LAYOUTS[layout])
