"""Numbers that hooks compute from weights and gradients, of which a pipeline rank has its stages' only."""

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import get_total_norm

from tests.parity import assert_parity, in_turn, layouts, long, train
from tests.workers import WorkerError, run
from tests.zoo.language import GPT, UntiedGPT
from tests.zoo.plain import MLP

LAYOUTS = layouts("tensor", "zero1", "zero3", "pipeline", "pipeline-zero1", "pipeline-tensor")


class ByLightning(GPT):
    """What Lightning's documentation says for gradients that are to be looked at."""

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen += [float(norms[name]) for name in sorted(norms)]


class ByHand(UntiedGPT):
    def on_after_backward(self):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.stack([grad.detach().norm(2) for grad in grads]).norm(2)
        largest = max(grad.abs().max().item() for grad in grads)
        self.log("total", total)
        self.seen += [float(total), largest, len(grads)]


class OfOne(GPT):
    """The first block is held by one stage."""

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.blocks[0].c_attn.weight.grad.data.norm(1).item())


class OfWeights(GPT):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for name, weight in self.named_parameters():
            self.log(f"norm/{name}", weight.norm())
            self.seen += [weight.mean().item(), float((weight.detach() > 0).float().mean()), int((weight == 0).sum())]


class Extremes(MLP):
    """Of weights with one row, of which a rank has none."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for weight in self.parameters():
            self.seen += [weight.abs().max().item(), float(weight.min()), float(weight.norm(float("inf")))]


class Together(UntiedGPT):
    """Several numbers and several tensors at once, and what is made of them."""

    def on_after_backward(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        for weight in matrices:
            spread, mean = torch.var_mean(weight)
            largest, _ = weight.grad.max(dim=0)
            self.seen += [float(spread), float(mean), float(largest.sum() * 2)]
        self.seen += [float(norm) for norm in torch._foreach_norm([weight.detach() for weight in matrices])]


class AfterSteps(UntiedGPT):
    """Gradients are there until the next step zeroes them."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 2:
            self.seen += [weight.grad.norm().item() for weight in self.parameters()]


class Scaled(GPT):
    """A weight is scaled by a number of another one, wherever they are."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.blocks[-1].c_attn.weight.div_(1 + 0.01 * self.blocks[0].c_attn.weight.norm())


class OfPlaces(GPT):
    """Of one place in what torch computes of a matrix that tensor ranks divide, on one stage."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append(float(torch.linalg.svdvals(self.blocks[0].c_attn.weight.detach())[0]))


class Halved(GPT):
    def on_after_backward(self):
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)


def _some(names):
    """Every second with one layout in the short run."""
    return [
        pytest.param(name, layout, marks=() if at % 2 == 0 and (at + place) % 6 == 3 else pytest.mark.long)
        for at, name in enumerate(names)
        for place, layout in enumerate(LAYOUTS)
    ]


@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(_some(["ByLightning", "ByHand", "OfOne", "OfWeights", "Together", "AfterSteps", "Scaled", "Halved"]), 2),
)
def test_numbers_are_those_of_one_device(name, layout):
    assert_parity(f"{__name__}:{name}", *LAYOUTS[layout])


def test_a_number_of_one_stage_that_its_tensor_ranks_have_in_full():
    assert_parity(f"{__name__}:OfPlaces", *LAYOUTS["pipeline-tensor"])


@pytest.mark.parametrize("layout", in_turn(["zero3", "zero1", "tensor", "pipeline"], 2))
def test_the_largest_number_of_a_small_weight(layout):
    assert_parity(f"{__name__}:Extremes", *LAYOUTS[layout])


class ByTorch(GPT):
    """Its first parameter is on every stage."""

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(float(get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(float(get_total_norm(grads, 1.0)))


@pytest.mark.parametrize("layout", ["zero3", long("pipeline-tensor")])
def test_the_norm_that_torch_computes_of_parts_is_that_of_the_whole(layout):
    assert_parity(f"{__name__}:ByTorch", *LAYOUTS[layout])


class Summed(UntiedGPT):
    def on_after_backward(self):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.zeros((), device=grads[0].device)
        for grad in grads:
            total += grad.pow(2).sum()
        self.seen += [float(total.sqrt()), float(get_total_norm(grads))]


@pytest.mark.parametrize("layout", ["pipeline", long("pipeline-tensor")])
def test_numbers_are_summed_up_where_the_first_gradient_is(layout):
    """Which only its stage has."""
    assert_parity(f"{__name__}:Summed", *LAYOUTS[layout])


@pytest.mark.long
def test_numbers_within_a_window_are_those_of_the_data_rank():
    """Nothing is sent between data ranks there, whatever the pipeline."""
    window = {"accumulate_grad_batches": 2}
    wanted = run(train, f"{__name__}:ByHand", 2, {"zero_stage": 1}, {}, window, world=2)
    cut = {"pipeline_parallel_size": 2, "zero_stage": 1}
    for rank, got in enumerate(run(train, f"{__name__}:ByHand", 4, cut, {}, window, world=4)):
        torch.testing.assert_close(got["losses"], wanted[rank % 2]["losses"], rtol=1e-5, atol=1e-5)


class Unlike(GPT):
    """Goes through what is here first."""

    def on_before_optimizer_step(self, optimizer):
        for weight in sorted(self.parameters(), key=lambda weight: weight.is_meta):
            self.seen.append(float(weight.grad.norm()))


def test_another_order_is_named():
    said = "Unlike.on_before_optimizer_step computes numbers from weights or gradients in another order"
    with pytest.raises(WorkerError, match=f"UnsupportedError: {said}"):
        assert_parity(f"{__name__}:Unlike", 2, {"pipeline_parallel_size": 2})
