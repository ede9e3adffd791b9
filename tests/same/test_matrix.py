"""Every layout x ZeRO stage x precision x Trainer flag is the same training: pairs by default, everything when long."""

import pytest
import torch

from tests.parity import assert_parity, in_turn, reference, train
from tests.same.covering import covering, every
from tests.workers import run

CHOICES = {
    "kind": ["MLP", "Encoder", "GPT", "Llama"],
    "layout": [
        (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2),
        (2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4),
    ],
    "zero": [0, 1, 2, 3],
    "precision": ["32-true", "bf16-mixed"],
    "accumulate": [1, 2],
    "clip": [None, 0.5],
    "validate": [False, True],
}  # fmt: skip
"""Layouts are (data, tensor, pipeline)."""


def _possible(case):
    data, _, pipeline = case["layout"]
    if data == 1 and case["zero"] != 1:
        return False  # nothing to share
    return not (pipeline == 4 and case["kind"] == "MLP")  # it has three layers


def _world(case):
    data, tensor, pipeline = case["layout"]
    return data * tensor * pipeline


CASES = every(CHOICES, _possible)
PAIRS = covering([case for case in CASES if _world(case) <= 4 and 4 not in case["layout"]])


def _name(case):
    layout = "d{}t{}p{}".format(*case["layout"])
    flags = [f"zero{case['zero']}", case["precision"], f"acc{case['accumulate']}"]
    flags += ["clip"] * bool(case["clip"]) + ["val"] * case["validate"]
    return "-".join([case["kind"], layout, *flags])


def _arguments(case):
    data, tensor, pipeline = case["layout"]
    strategy = {
        "data_parallel_size": data,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "zero_stage": case["zero"],
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
        assert_parity(case["kind"], _world(case), strategy, trainer=trainer)
    else:
        _check_rounded(case["kind"], _world(case), strategy, trainer)


def _check_rounded(kind, world, strategy, trainer):
    """What six steps changed differs by rounding only: by less than it does after training on shuffled samples.

    Plain SGD without momentum, so that the change is a sum of gradients. An epoch is three of the five batches: over all
    of them the sum would be nearly the same in any order, and the control would show nothing. The bound is that of Megatron's test of
    gradients across layouts (arXiv 2506.09280, theorem 5.3), k * C^(L + 1) * eps with k = 4, C = 1.03 and L = 3 blocks.
    """
    attributes = {"optimizer": "plain_sgd"}
    trainer = trainer | {"limit_train_batches": 3, "max_epochs": 1 + trainer["accumulate_grad_batches"]}
    wanted = reference(kind, attributes, trainer)
    shuffled = reference(kind, attributes | {"shuffled": True}, trainer)
    bound = 4 * 1.03**4 * torch.finfo(torch.bfloat16).eps
    assert _difference(shuffled, wanted) > bound
    for rank, got in enumerate(run(train, kind, world, strategy, attributes, trainer, world=world, timeout=120)):
        assert _difference(got, wanted) < bound, f"rank {rank}"
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=bound, atol=bound)
        torch.testing.assert_close(got["norms"], wanted["norms"], rtol=bound, atol=bound)


def _difference(got, wanted):
    """Of what training changed, relative to it (Frobenius), over all weights."""
    squares = [
        ((got["weights"][key] - weight).square().sum(), (weight - wanted["before"][key]).square().sum())
        for key, weight in wanted["weights"].items()
    ]
    return float((sum(d for d, _ in squares) / sum(n for _, n in squares)).sqrt())


@pytest.mark.parametrize("case", in_turn(PAIRS, 6), ids=_name)
def test_pairs(case):
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_everything(case):
    check(case)
