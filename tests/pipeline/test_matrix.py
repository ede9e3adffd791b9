"""The models that people train, over 2, 3 and 4 stages through a Trainer: few cases by default, everything when long."""

from functools import partial

import pytest
import torch

from tests.parity import assert_same_fit, fit_with, in_turn
from tests.same.covering import covering
from tests.workers import run
from tests.zoo.batchless import GPT, build, gpt_batch

MODULES = ["MLP", "GPT", "GPT-untied", "Encoder", "ConvNet", "Llama", "GPT2", "BERT", "ViT", "T5"]
CHOICES = {"stages": [2, 3, 4], "microbatches": [1, 2, 3, 4, 8], "accumulate": [1, 3]}
CASES = covering({"module": MODULES, **CHOICES}, lambda case: True, of=3)
PAIRS = [
    {"module": MODULES[index % len(MODULES)], **case} for index, case in enumerate(covering(CHOICES, lambda case: True))
]


def made(name, steps, rows=8):
    """The module and its batches, with an optimizer whose epsilon is above the rounding of gradients that are zero."""
    torch.manual_seed(1)
    if name.startswith("GPT") and name != "GPT2":
        module, batches = GPT(tied=name == "GPT"), [gpt_batch(seed=index) for index in range(steps)]
    else:
        module, batches = build(name, steps, rows)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    return module, batches


_references = {}


def check(case, steps):
    module, accumulate = case["module"], case["accumulate"]
    options = {"validate": True, "accumulate_grad_batches": accumulate}
    key = (module, accumulate, steps)
    if key not in _references:
        (_references[key],) = run(fit_with, partial(made, module, steps), None, options, world=1)
    strategy = {"pipeline_parallel_size": case["stages"], "num_microbatches": case["microbatches"]}
    world = case["stages"]
    for got in run(fit_with, partial(made, module, steps), strategy, options, world=world, timeout=180):
        assert len(got["losses"]) == steps
        assert_same_fit(got, _references[key])


def _name(case):
    return "{module}-{stages}x{microbatches}-acc{accumulate}".format(**case)


@pytest.mark.parametrize("case", in_turn(PAIRS, 4), ids=_name)
def test_pairs(case):
    check(case, 4)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_everything(case):
    check(case, 20)
