"""With what comes after: ZeRO on the same modules, clipping, and the random state."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.shards import local
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.dropout import ShardDropout
from lightning_3d.tensor.plan_module import plan_tensor
from tests import workers
from tests.parity import silent
from tests.zoo import blocks


def quiet_plan(module, run, size, **options):
    with silent():
        return plan_tensor(module, size, calls=record_calls(module, run), **options)


def gpt_loss(module, batch):
    return module(batch[:, :-1], batch[:, 1:])


class Recomputed(blocks.GPT):
    def forward(self, idx, targets):
        blocks = list(self.h)
        self.__dict__["h_run"] = [
            lambda x, b=b: torch.utils.checkpoint.checkpoint(b, x, use_reentrant=False) for b in blocks
        ]
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h_run if self.recompute else blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def recomputed(sequence_parallel):
    """Gradients with dropout, with and without running each block again in backward."""
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = Recomputed(dropout=0.3)
        module.recompute = False
        batch = torch.randint(0, 50, (2, 9))
        plan = quiet_plan(module, lambda m=module, b=batch: gpt_loss(m, b), 2, sequence_parallel=sequence_parallel)
        module.recompute = recompute
        apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
        torch.manual_seed(3)
        gpt_loss(module, batch).backward()
        grads.append([local(p.grad) for p in module.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_recomputation_draws_the_same_masks(sequence_parallel):
    assert max(workers.run(recomputed, sequence_parallel, world=2, group=True)) < 1e-6


def evaluated():
    """torch's encoder has a fused shortcut in eval mode that would read shards as if they were whole."""
    torch.manual_seed(0)
    module = blocks.encoder()
    module.enable_nested_tensor = module.use_nested_tensor = True
    reference, x = copy.deepcopy(module), torch.randn(2, 8, 16)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[1, 5:] = True
    undo = UndoStack()
    apply_tensor(module, quiet_plan(module, lambda: module(x), 2), init_device_mesh("cpu", (2,)), undo)
    with torch.no_grad():
        plain = (module.eval()(x) - reference.eval()(x)).abs().max().item()
        padded = module(x, src_key_padding_mask=padding) - reference(x, src_key_padding_mask=padding)
    undo.close()
    return plain, padded[~padding].abs().max().item(), module.use_nested_tensor


def test_eval_mode_takes_no_fused_shortcut():
    for plain, padded, restored in workers.run(evaluated, world=2, group=True):
        assert plain < 1e-5
        assert padded < 1e-5
        assert restored


def dropout_run(seed):
    torch.manual_seed(0)
    module = blocks.nano_gpt(dropout=0.3)
    x = torch.randn(2, 8, 16)
    plan = quiet_plan(module, lambda: module(x), 2)
    apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
    torch.manual_seed(seed)
    out = module(x)
    out.sum().backward()
    return out.detach(), torch.rand(3), module.blocks[0].ln_1.weight.grad


def test_dropout_agrees_on_whole_activations_and_is_reproducible():
    (first, after, grad), (second, after_second, grad_second) = workers.run(dropout_run, 5, world=2, group=True)
    assert torch.equal(first, second)
    assert torch.equal(grad, grad_second)
    assert torch.equal(after, after_second)  # the ranks' generators are still in step
    assert torch.equal(first, workers.run(dropout_run, 5, world=2, group=True)[0][0])
    assert not torch.equal(first, workers.run(dropout_run, 6, world=2, group=True)[0][0])


def masks():
    """Dropout on the hidden dimension of an MLP whose shards are equal, so that equal masks would show."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    x = torch.randn(2, 8)
    plan = quiet_plan(module, lambda: module(x), 2)
    assert plan.units[""].dropouts == (True,)
    seen = []
    module[1].register_forward_hook(lambda m, i, o: seen.append(o == 0))
    apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
    module(x)
    return seen[0]


def test_dropout_differs_on_shards():
    first, second = workers.run(masks, world=2, group=True)
    assert first.shape == (2, 32)
    assert not torch.equal(first, second)


class DropsByItself(torch.nn.Sequential):
    """Dropout that is no module: its rate is not known before the call."""

    def forward(self, x):
        return self[1](torch.nn.functional.dropout(self[0](x), 0.0, self.training))


def rates():
    """Entries of the interceptor of dropout so far: a module without a rate, a function without one, a module with one.

    And the masks of the last.
    """
    torch.manual_seed(0)
    by_module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.0), torch.nn.Linear(64, 8))
    by_itself = DropsByItself(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    x, entered, masks = torch.randn(2, 8), [], []
    for module in (by_module, by_itself):
        plan = quiet_plan(module, lambda module=module: module(x), 2)
        apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter = ShardDropout.__enter__
        monkeypatch.setattr(ShardDropout, "__enter__", lambda mode: entered.append(mode) or enter(mode))
        counts = [by_module(x) is None or len(entered), by_itself(x) is None or len(entered)]
        by_module[1].p = 0.5
        by_module[1].register_forward_hook(lambda m, i, o: masks.append(o == 0))
        by_module(x)
    return [*counts, len(entered)], masks[0]


def test_rates_of_zero_need_no_interceptor_until_they_change():
    (entered, first), (_, second) = workers.run(rates, world=2, group=True)
    assert entered == [0, 1, 2]
    assert not torch.equal(first, second)
