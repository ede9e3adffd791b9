"""Train a module on one process and in shards, on ranks or in threads, and compare losses and gathered parameters."""

import collections
import copy
import math
import traceback
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.axes import ledger
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.apply import apply_tensor, full_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.blocks import find_blocks
from lightning_3d.tensor.geometry import assemble, local_part
from lightning_3d.tensor.patch import patch_unit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary
from tests import workers
from tests.parity import caught_warnings
from tests.zoo.families import BATCHES, FAMILIES, loss_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # A key bias has a gradient of rounding only, which a tiny eps would blow up into steps of random sign.
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5),
}


class Ledger(ledger.Ledger):
    def __init__(self):
        super().__init__()
        self.calls = []

    def add(self, axis, op, nbytes):
        self.calls.append(op)


def train(module, loss_of, batches, optimizer="sgd"):
    """The loss of each batch, with a step after each."""
    opt, losses = OPTIMIZERS[optimizer](module.parameters()), []
    for batch in batches:
        opt.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def on_mesh(module, loss_of, batches, mesh, *, optimizer="sgd", **options):
    """One rank's part: the differences from a copy that is trained unsplit, and what the plan did."""
    reference = copy.deepcopy(module)
    expected = train(reference, loss_of, batches, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = record_calls(module, lambda: loss_of(module, batches[0]))
        plan = plan_tensor(module, mesh.size(), calls=calls, **options)
    before = {name: p.numel() for name, p in module.named_parameters()}
    ledger = Ledger()
    undo = UndoStack()
    apply_tensor(module, plan, mesh, undo, ledger=ledger)
    local = {
        name: full.numel() if name not in plan.splits else full.to_local().numel()
        for name, full in module.named_parameters()
    }
    found = train(module, loss_of, batches, optimizer)
    assert all(map(math.isfinite, found)), found
    ops = collections.Counter(ledger.calls)
    parameters = dict(module.named_parameters())
    drift = {
        name: (full_tensor(parameters[name], plan.splits.get(name)) - whole).abs().max().item()
        for name, whole in reference.named_parameters()
    }
    replicated = {name: p.detach().clone() for name, p in parameters.items() if name not in plan.splits}
    evaluated = evaluate(module, loss_of, batches[0])
    undo.close()
    wanted = evaluate(reference, loss_of, batches[0])
    names = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    undone = names == [(name, tuple(p.shape)) for name, p in reference.named_parameters()]
    undone &= [*module.state_dict()] == [*reference.state_dict()]
    undone &= not any("forward" in m.__dict__ for m in module.modules())
    return {
        "loss": max(abs(a - b) for a, b in zip(expected, found, strict=True)), "drift": drift,
        "eval": abs(evaluated - wanted), "again": abs(evaluate(module, loss_of, batches[0]) - wanted),
        "undone": undone, "replicated": replicated, "before": before, "local": local, "whole": dict(plan.unsplit),
        "units": list(plan.units), "ops": ops, "collectives": ops.total() / len(batches),
    }  # fmt: skip


def evaluate(module, loss_of, batch):
    with torch.no_grad():
        return float(loss_of(module.eval(), batch))


def assert_same(results, tolerance=1e-5):
    """What each rank saw differs from one process by rounding only, and replicas do not differ."""
    for result in results:
        assert_small(result["drift"] | {what: result[what] for what in ("loss", "eval", "again")}, tolerance)
        assert result["undone"]
        for name, value in result["replicated"].items():
            assert torch.equal(value, results[0]["replicated"][name]), f"{name} differs over the tensor ranks"


def assert_small(differences, tolerance=1e-5):
    """Also where one of them is not a number, which is neither larger nor smaller."""
    assert {name: value for name, value in differences.items() if not value < tolerance} == {}


def on_ranks(build, loss_of, batch_of, steps, optimizer, size, options):
    """One rank's job. `build`, `loss_of`, `batch_of` are module-level functions."""
    torch.manual_seed(0)
    module = build()
    torch.manual_seed(1)
    batches = [batch_of() for _ in range(steps)]
    return on_mesh(module, loss_of, batches, init_device_mesh("cpu", (size,)), optimizer=optimizer, **options)


def check(build, loss_of, batch_of, *, steps=10, optimizer="sgd", size=2, share=0.55, tolerance=1e-5, **options):
    """Assert parity; returns what rank 0 saw."""
    results = workers.run(
        on_ranks, build, loss_of, batch_of, steps, optimizer, size, options, world=size, group=True, timeout=100
    )
    assert_same(results, tolerance)
    first = results[0]
    in_units = [n for n in first["before"] if any(n.startswith(u + ".") or not u for u in first["units"])]
    assert in_units
    assert sum(first["local"][n] for n in in_units) <= share * sum(first["before"][n] for n in in_units)
    return first


def survey(names, size, steps, options):
    """What each family's training gave; a family that fails says how, and the next one goes on."""
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name in names:
        family = FAMILIES[name]
        torch.manual_seed(0)
        module, batches = family.build().train(), [BATCHES[family.inputs]() for _ in range(steps)]
        try:
            found[name] = on_mesh(module, loss_of, batches, mesh, **options)
        except Exception:
            found[name] = {"error": traceback.format_exc()[-1500:]}
    return found


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
