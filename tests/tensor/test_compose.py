"""With what comes after: ZeRO on the same modules, clipping, and the random state."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.shards import local
from lightning_3d.tensor.apply import apply_tensor, full_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.dropout import ShardDropout
from lightning_3d.tensor.late_tensor import pass_late
from lightning_3d.tensor.plan_module import plan_tensor
from tests import workers
from tests.parity import largest, long, silent
from tests.zoo import blocks


def quiet_plan(module, run, size, **options):
    with silent():
        return plan_tensor(module, size, calls=record_calls(module, run), **options)


def t5_loss(module, batch):
    return module(input_ids=batch[:, :-1], labels=batch[:, 1:].contiguous()).loss


def gpt_loss(module, batch):
    return module(batch[:, :-1], batch[:, 1:])


def with_zero(build, loss_of, blocks_of, reshard, sequence_parallel):
    """Tensor 2 x data 2: each data rank has half of the batch."""
    torch.manual_seed(0)
    module = build()
    reference = copy.deepcopy(module)
    batches = [torch.randint(0, 50, (4, 9)) for _ in range(5)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = quiet_plan(module, lambda: loss_of(module, batches[0]), 2, sequence_parallel=sequence_parallel)
    assert all((unit.sequence is not None) == sequence_parallel for unit in plan.units.values())
    applied = apply_tensor(module, plan, mesh["tensor_parallel"], UndoStack())
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
        block.register_forward_pre_hook(pass_late, prepend=True, with_kwargs=True)
    fully_shard(module, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
    ours = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-5)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-5)
    worst = 0.0
    for batch in batches:
        part = batch.chunk(2)[mesh.get_local_rank("data_parallel")]
        loss = loss_of(module, part)
        loss.backward()
        expected = loss_of(reference, batch)
        expected.backward()
        mean = torch.stack([loss.detach()])
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG, group=mesh.get_group("data_parallel"))
        worst = largest([worst, (mean - expected).abs().item()])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = {name: full_tensor(p, applied.splits.get(name)) for name, p in module.named_parameters()}
    drift = largest((found[name] - p).abs().max().item() for name, p in reference.named_parameters())
    return worst, drift


def gpt_blocks(module):
    return module.h


def t5_blocks(module):
    return [*module.encoder.block, *module.decoder.block]


@pytest.mark.parametrize(
    ("reshard", "sequence_parallel"), [(True, True), (False, False), *(long(each, not each) for each in (True, False))]
)
def test_zero_on_the_same_modules(reshard, sequence_parallel):
    job = (blocks.GPT, gpt_loss, gpt_blocks, reshard, sequence_parallel)
    for worst, drift in workers.run(with_zero, *job, world=4, group=True, fresh=True):
        assert worst < 1e-5
        assert drift < 1e-5


@pytest.mark.parametrize("reshard", [True, long(False)])
def test_zero_on_blocks_that_hand_parts_of_a_result_to_the_next(reshard):
    for worst, drift in workers.run(
        with_zero, blocks.t5, t5_loss, t5_blocks, reshard, False, world=4, group=True, fresh=True
    ):
        assert worst < 1e-5
        assert drift < 1e-5


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


def clipped():
    torch.manual_seed(0)
    module = blocks.nano_gpt()
    reference, x = copy.deepcopy(module), torch.randn(2, 8, 16)
    applied = apply_tensor(module, quiet_plan(module, lambda: module(x), 2), init_device_mesh("cpu", (2,)), UndoStack())
    for m in (module, reference):
        m(x).square().sum().backward()
    grads = {name: full_tensor(p.grad, applied.splits.get(name)) for name, p in module.named_parameters()}
    return max((grads[name] - p.grad).abs().max().item() for name, p in reference.named_parameters())


def test_gradients_gather_in_source_order():
    for worst in workers.run(clipped, world=2, group=True, fresh=True):
        assert worst < 1e-4
