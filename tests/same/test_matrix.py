"""Modules x layouts x features are the same training: each pair of choices in CI, each three of them when long."""

import pytest
import torch

from lightning_3d.layout import HALVED_BACKWARD
from tests.parity import assert_parity, change_differs, reference, train
from tests.same.covering import covering
from tests.workers import run

MIXTURES = ("tests.experts.trained:Mixtral", "tests.experts.trained:Listed")
CHOICES = {
    "kind": ["MLP", "Encoder", "GPT", "Llama", *MIXTURES],
    "layout": [
        (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2),
        (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2),
        (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4),
        (2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (4, 1, 2, 1), (4, 1, 1, 2),
    ],
    "zero": [0, 1, 2, 3],
    "experts": [1, 2, 4],
    "shard": [None, 2],
    "sequence": [False, True],
    "schedule": ["1f1b", "gpipe", "interleaved_zero_bubble"],
    "precision": ["32-true", "bf16-mixed"],
    "accumulate": [1, 2],
    "clip": [None, 0.5],
    "validate": [False, True],
    "recompute": [None, "selective", "full"],
    "offload": [None, "optimizer", "activations"],
    "sync": ["ring", "native"],
}  # fmt: skip
"""Layouts are (data, context, tensor, pipeline)."""
USUAL = {name: values[0] for name, values in CHOICES.items()} | {"zero": 1}


def _possible(case):
    """False for what docs refuse, and for a choice that changes nothing beside the others."""
    data, context, tensor, pipeline = case["layout"]
    moot = {
        "zero": data * context == 1,
        "experts": case["kind"] not in MIXTURES or (data * context) % case["experts"] != 0,
        "shard": data < 4 or not case["zero"],
        "sequence": tensor == 1 or case["kind"] == "MLP",
        "schedule": pipeline == 1,
        "sync": data * context == 1,
    }
    if any(case[name] != USUAL[name] for name, nothing in moot.items() if nothing):
        return False
    if context > {"GPT": 2, "Llama": 4, "tests.experts.trained:Mixtral": 4}.get(case["kind"], 1):
        return False  # no sequence, too short a one, or a block that returns a mean over positions
    if case["kind"] == "MLP" and pipeline == 4:
        return False  # it has three layers
    if case["kind"] in MIXTURES and (case["precision"] != "32-true" or pipeline == 4):
        return False  # rounding sends a token to another expert; there are two blocks
    return not (case["experts"] > 1 and (case["shard"] or case["sequence"] or case["schedule"] in HALVED_BACKWARD))


def _world(case):
    data, context, tensor, pipeline = case["layout"]
    return data * context * tensor * pipeline


def _sizes(kind):
    """Positions of the modules that may have more than others: four context ranks need 16 to prove a cut. Five batches."""
    return {"length": 16} | ({"samples": 40} if kind in MIXTURES else {})


FOUND = [
    USUAL | {"kind": "MLP", "layout": (2, 1, 1, 2), "schedule": "interleaved_zero_bubble", "precision": "bf16-mixed"},
    USUAL | {"kind": MIXTURES[0], "layout": (1, 1, 2, 1), "sequence": True},
]
"""What once trained with other numbers, or crashed. Pairs may leave it out."""
PAIRS = covering(CHOICES, lambda case: _possible(case) and _world(case) <= 4)


def _name(case):
    layout = "d{}c{}t{}p{}".format(*case["layout"])
    other = [
        f"{name}_{value}" for name, value in case.items() if name not in ("kind", "layout") and value != USUAL[name]
    ]
    return "-".join([case["kind"].rpartition(":")[2], layout, *other])


def _arguments(case):
    data, context, tensor, pipeline = case["layout"]
    strategy = {
        "data_parallel_size": data,
        "context_parallel_size": context,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "expert_parallel_size": case["experts"],
        "zero_stage": case["zero"],
        "zero_shard_size": case["shard"],
        "sequence_parallel": case["sequence"],
        "schedule": case["schedule"],
        "recompute": case["recompute"],
        "offload": {case["offload"]: "cpu"} if case["offload"] else "none",
        "grad_sync": case["sync"],
    }
    trainer = {"max_epochs": 1, "precision": case["precision"], "accumulate_grad_batches": case["accumulate"]}
    if case["clip"]:
        trainer["gradient_clip_val"] = case["clip"]
    if case["validate"]:
        trainer |= {"limit_val_batches": 2, "val_check_interval": 2}
    return strategy, trainer


def check(case):
    strategy, trainer = _arguments(case)
    if case["precision"] == "32-true":
        assert_parity(case["kind"], _world(case), strategy, attributes=_sizes(case["kind"]), trainer=trainer)
    else:
        _check_rounded(case["kind"], _world(case), strategy, trainer)


def _check_rounded(kind, world, strategy, trainer):
    """What six steps changed differs by rounding only: by less than it does after training on shuffled samples.

    Plain SGD without momentum, so that the change is a sum of gradients. An epoch is three of the five batches: over all
    of them the sum would be nearly the same in any order, and the control would show nothing. The bound is that of Megatron's test of
    gradients across layouts (arXiv 2506.09280, theorem 5.3), k * C^(L + 1) * eps with k = 4, C = 1.03 and L = 3 blocks.
    """
    attributes = {"optimizer": "plain_sgd"} | _sizes(kind)
    trainer = trainer | {"limit_train_batches": 3, "max_epochs": 1 + trainer["accumulate_grad_batches"]}
    wanted = reference(kind, attributes, trainer)
    shuffled = reference(kind, attributes | {"shuffled": True}, trainer)
    bound = 4 * 1.03**4 * torch.finfo(torch.bfloat16).eps
    assert change_differs(shuffled, wanted) > bound
    for rank, got in enumerate(run(train, kind, world, strategy, attributes, trainer, world=world, timeout=120)):
        assert change_differs(got, wanted) < bound, f"rank {rank}"
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=bound, atol=bound)
        torch.testing.assert_close(got["norms"], wanted["norms"], rtol=bound, atol=bound)


@pytest.mark.parametrize("case", [*FOUND, *PAIRS], ids=_name)
def test_pairs(case):
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", covering(CHOICES, _possible, of=3), ids=_name)
def test_threes(case):
    check(case)
