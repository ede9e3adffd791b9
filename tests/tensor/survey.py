"""Train tiny models of many kinds in one job, and compare each with itself on one process."""

import copy
import time
import traceback
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.tensor.apply import apply_tensor, full_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.blocks import find_units
from lightning_3d.tensor.plan_module import plan_tensor
from tests.tensor.parity import train
from tests.zoo.families import BATCHES, FAMILIES, loss_of


def survey(names, size, steps, options):
    """What each family's training gave; a family that fails says how, and the next one goes on."""
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name in names:
        try:
            found[name] = _one(name, size, steps, options, mesh)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    return found


def share_of_blocks(module, plan):
    """Of the parameters of the blocks, what the first tensor rank holds."""
    blocks = find_units(module)
    inside = {n: p.numel() for n, p in module.named_parameters() if any(not b or n.startswith(f"{b}.") for b in blocks)}
    held = [
        size // plan.splits[name].size * plan.splits[name].local_size(0) if name in plan.splits else size
        for name, size in inside.items()
    ]
    return sum(held) / max(1, sum(inside.values()))


def _one(name, size, steps, options, mesh) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    family = FAMILIES[name]
    torch.manual_seed(0)
    module = family.build().train()
    batches = [BATCHES[family.inputs]() for _ in range(steps)]
    reference = copy.deepcopy(module)
    expected = train(reference, loss_of, batches)
    start = time.perf_counter()
    plan = plan_tensor(module, size, calls=record_calls(module, lambda: loss_of(module, batches[0])), **options)
    planning = time.perf_counter() - start
    share = share_of_blocks(module, plan)
    applied = apply_tensor(module, plan, mesh)
    losses = train(module, loss_of, batches)
    parameters = dict(module.named_parameters())
    drift = {
        n: (full_tensor(parameters[n], plan.splits.get(n)) - p).abs().max().item()
        for n, p in reference.named_parameters()
    }
    worst = max(drift, key=drift.__getitem__)
    module.eval(), reference.eval()
    with torch.no_grad():
        eval_gap = abs(float(loss_of(module, batches[0])) - float(loss_of(reference, batches[0])))
    replicated = {n: p.detach().clone() for n, p in parameters.items() if n not in plan.splits}
    applied.undo()
    return {
        "loss": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
        "drift": (drift[worst], worst),
        "eval": eval_gap,
        "share": share,
        "whole": dict(plan.unsplit),
        "replicated": replicated,
        "planning": planning,
        "sequence": sum(u.sequence is not None for u in plan.units.values()),
        "units": len(plan.units),
        "blocks": len(find_units(module)),
        "vocabulary": list(plan.vocabulary),
    }
