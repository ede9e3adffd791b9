"""Training on tensor ranks that are threads of this process: the very code of the shards, and nothing to start."""

import copy
import warnings

import torch

from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.geometry import assemble, local_part
from lightning_3d.tensor.patch import patch_unit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary
from tests.parity import largest
from tests.tensor.parity import train


def compare(module, loss_of, batches, size, *, all_proven=True, **options):
    """The plan, and the largest difference of a loss, of a parameter and of the loss in eval mode from one process.

    Args:
        all_proven: whether no call is one that the plan was not proven for, and computed whole.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = plan_tensor(module, size, calls=record_calls(module, lambda: loss_of(module, batches[0])), **options)
        reference = copy.deepcopy(module)
        expected = train(reference, loss_of, batches)
        shards = run_shards(size, lambda axis: _shard(module, plan, loss_of, batches, axis))
        with torch.no_grad():
            evaluated = float(loss_of(reference.eval(), batches[0]))
    unproven = {str(warning.message) for warning in said if "is called in a way" in str(warning.message)}
    assert bool(unproven) != all_proven, unproven
    difference = {"loss": 0.0, "eval": 0.0}
    for losses, _, in_eval in shards:
        difference["loss"] = largest([difference["loss"], *(abs(a - b) for a, b in zip(losses, expected, strict=True))])
        difference["eval"] = largest([difference["eval"], abs(in_eval - evaluated)])
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
    for name, unit in plan.units.items():
        patch_unit(shard.get_submodule(name), unit, axis)
    patch_vocabulary(shard, plan.vocabulary, axis)
    losses = train(shard, loss_of, batches)
    with torch.no_grad():
        evaluated = float(loss_of(shard.eval(), batches[0]))
    return losses, {name: parameter.detach() for name, parameter in shard.named_parameters()}, evaluated
