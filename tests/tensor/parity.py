"""Train a module on one process and on tensor ranks, and compare losses and gathered parameters."""

import collections
import copy
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.tensor.apply import apply_tensor, full_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests import workers
from tests.parity import largest

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # A key bias has a gradient of rounding only, which a tiny eps would blow up into steps of random sign.
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5),
}


class Ledger:
    def __init__(self):
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


def on_ranks(build, loss_of, batch_of, steps, optimizer, size, options):
    """One rank's job. `build`, `loss_of`, `batch_of` are module-level functions."""
    torch.manual_seed(0)
    module = build()
    torch.manual_seed(1)
    batches = [batch_of() for _ in range(steps)]
    reference = copy.deepcopy(module)
    expected = train(reference, loss_of, batches, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = record_calls(module, lambda: loss_of(module, batches[0]))
        plan = plan_tensor(module, size, calls=calls, **options)
    before = {name: p.numel() for name, p in module.named_parameters()}
    mesh = init_device_mesh("cpu", (size,))
    ledger = Ledger()
    applied = apply_tensor(module, plan, mesh, ledger=ledger)
    local = {
        name: full.numel() if name not in plan.splits else full.to_local().numel()
        for name, full in module.named_parameters()
    }
    found = train(module, loss_of, batches, optimizer)
    collectives = len(ledger.calls) / steps
    parameters = dict(module.named_parameters())
    worst = largest(abs(a - b) for a, b in zip(expected, found, strict=True))
    drift = {
        name: (full_tensor(parameters[name], plan.splits.get(name)) - whole).abs().max().item()
        for name, whole in reference.named_parameters()
    }
    replicated = {name: p.detach().clone() for name, p in parameters.items() if name not in plan.splits}
    applied.undo()
    names = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    undone = names == [(name, tuple(p.shape)) for name, p in reference.named_parameters()]
    undone &= not any("forward" in m.__dict__ for m in module.modules())
    again = loss_of(module.eval(), batches[0]).item() - loss_of(reference.eval(), batches[0]).item()
    return {
        "loss": worst, "drift": drift, "collectives": collectives, "before": before, "local": local,
        "whole": dict(plan.unsplit),
        "replicated": replicated, "undone": undone, "again": abs(again), "units": list(plan.units),
        "ops": collections.Counter(ledger.calls),
    }  # fmt: skip


def check(build, loss_of, batch_of, *, steps=10, optimizer="sgd", size=2, share=0.55, tolerance=1e-5, **options):
    """Assert parity; returns what rank 0 saw."""
    results = workers.run(
        on_ranks, build, loss_of, batch_of, steps, optimizer, size, options, world=size, group=True, timeout=100
    )
    for result in results:
        assert result["loss"] < tolerance, result["loss"]
        worst = max(result["drift"], key=result["drift"].get)
        assert result["drift"][worst] < tolerance, (worst, result["drift"][worst])
        assert result["undone"]
        assert result["again"] < tolerance
        for name, value in result["replicated"].items():
            assert torch.equal(value, results[0]["replicated"][name]), f"{name} differs over the tensor ranks"
    first = results[0]
    in_units = [n for n in first["before"] if any(n.startswith(u + ".") or not u for u in first["units"])]
    assert in_units
    assert sum(first["local"][n] for n in in_units) <= share * sum(first["before"][n] for n in in_units)
    return first
