"""Train a module on one process and in shards, in threads, and compare losses and gathered parameters."""

import copy
import math

import torch

from lightning_3d.axes import ledger
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.blocks import find_blocks
from lightning_3d.tensor.geometry import assemble, local_part
from lightning_3d.tensor.patch import patch_unit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary
from tests.parity import caught_warnings


class Ledger(ledger.Ledger):
    def __init__(self):
        super().__init__()
        self.calls = []

    def add(self, axis, op, nbytes):
        self.calls.append(op)


def train(module, loss_of, batches):
    opt, losses = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), []
    for batch in batches:
        opt.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def evaluate(module, loss_of, batch):
    with torch.no_grad():
        return float(loss_of(module.eval(), batch))


def assert_small(differences, tolerance=1e-5):
    """Also where one of them is not a number, which is neither larger nor smaller."""
    assert {name: value for name, value in differences.items() if not value < tolerance} == {}


def share_of_blocks(module, plan):
    """Of the parameters of the blocks, what the first tensor rank holds."""
    blocks = find_blocks(module)
    inside = {n: p.numel() for n, p in module.named_parameters() if any(not b or n.startswith(f"{b}.") for b in blocks)}
    held = [
        size // plan.splits[name].size * plan.splits[name].local_size(0) if name in plan.splits else size
        for name, size in inside.items()
    ]
    return sum(held) / max(1, sum(inside.values()))


def in_threads(module, loss_of, batches, size, *, all_proven=True, **options):
    """Shards in threads of this process, which start nothing: the plan, and the largest differences from one process.

    Of a loss, of the loss in eval mode, and of each parameter. If `all_proven`, no call is computed whole.
    """
    with caught_warnings() as said:
        plan = plan_tensor(module, size, calls=record_calls(module, lambda: loss_of(module, batches[0])), **options)
        reference = copy.deepcopy(module)
        expected = train(reference, loss_of, batches)
        shards = run_shards(size, lambda axis: _shard(module, plan, loss_of, batches, axis))
        evaluated = evaluate(reference, loss_of, batches[0])
    unproven = {text for text in said if "is called in a way" in text}
    assert bool(unproven) != all_proven, unproven
    difference = {"loss": 0.0, "eval": 0.0}
    for losses, _, in_eval in shards:
        assert all(map(math.isfinite, losses)), losses
        difference["loss"] = max(difference["loss"], *(abs(a - b) for a, b in zip(losses, expected, strict=True)))
        difference["eval"] = max(difference["eval"], abs(in_eval - evaluated))
    for name, whole in reference.named_parameters():
        parts = [parameters[name] for _, parameters, _ in shards]
        if name in plan.splits:
            parts = [assemble(parts, plan.splits[name])]
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs over the tensor ranks"
        difference[name] = (parts[0] - whole).abs().max().item()
    return plan, difference


def _shard(module, plan, loss_of, batches, axis):
    def own(name, value):
        split = plan.splits.get(name)
        return value if split is None else local_part(value, split, axis.rank).clone()

    shard = shard_copy(module, lambda name, value: own(name, value.clone()))
    undo = UndoStack()
    for name, unit in plan.units.items():
        patch_unit(shard.get_submodule(name), unit, axis, undo)
    patch_vocabulary(shard, plan.vocabulary, axis, undo)
    losses = train(shard, loss_of, batches)
    evaluated = evaluate(shard, loss_of, batches[0])
    return losses, {name: parameter.detach() for name, parameter in shard.named_parameters()}, evaluated
