"""Modules that nothing here was designed for train exactly as on one device, or are refused before training."""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from lightning_3d.errors import UnsupportedError
from tests.parity import check, fit, in_turn, long
from tests.workers import WorkerError, run
from tests.zoo import oddities
from tests.zoo.registry import members

REFUSED = {
    "Outside": "PipelineSplitError: The step reads 8 parameters of blocks",
    "SkippedBlocks": "UnsupportedError: training_step draws at random which blocks to run",
    "Stateful": "PipelineSplitError: .*once the module is cut. A block before it must pass it a value in another way than by arguments",
    "Balanced": "PipelineSplitError: Cut into stages, the step fails, but uncut it does not .*has no attribute 'penalty'.*turns such a reading off",
    "ChangingHook": "PipelineSplitError: .* another gradient .*: 'blocks.0.0', which is inside of a block, has a forward hook",
    "Replaced": "PipelineSplitError: Cut into stages, the step leaves another value in the buffer 'blocks.1.last'",
    "Twice": "UnsupportedError: The step calls 'blocks.0' .* twice cannot be pipelined",
    "Bags": r"UnsupportedError: training_step runs on a batch, and fails .* of the 4 .*: 2 of 8 [\s\S]* needs more samples at once",
    "GraphHooks": "PipelineSplitError: Cut into stages, the step gives .* another gradient than the whole module",
    "SkippedByNumpy": "UnsupportedError: training_step draws at random which blocks to run",
    "Reversible": "PipelineSplitError: Cut into stages, .* another result than uncut. A block before it .* Pass it from",
}
WHOLE_BATCH = ["Conv", "Statistics", "Noted"]
"""Batch norm normalizes over what it gets, and a buffer that is replaced holds the last microbatch: these agree where the
batch is one."""
CUT_THROUGH = ["Chunked", "KeptFunction"]
"""With three stages the cut falls into a recomputed region, or behind a function of autograd that cannot be seen."""
EXACT = [name for name in members("oddities") if name not in (*REFUSED, "Selected", "Warmed", "Skipping")]


@pytest.mark.parametrize("name", in_turn([long(name) if name == "Nested" else name for name in EXACT], 2))
def test_trains_as_on_one_device(name):
    microbatches = 1 if name in WHOLE_BATCH else 4
    check(partial(oddities.build, name), 2, {"num_microbatches": microbatches}, validate=name != "Streamed")


def test_packed_sequences_beside_tensor_ranks():
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2}
    check(partial(oddities.build, "Packed"), 4, layout)


def test_hooks_of_a_first_call_are_registered_once():
    """Runs ahead of training leave no hooks, which would record each hidden state several times."""
    check(partial(oddities.build, "HiddenStates"), 2, {"pipeline_parallel_size": 1, "tensor_parallel_size": 2})


class NeedsTheFirst(nn.Module):
    """Raises an error of ours on the rank of its stage, once the first block is on another one."""

    def __init__(self, first):
        super().__init__()
        self.layer, self.first = oddities.dense(), [first]

    def forward(self, x):
        if next(self.first[0].parameters()).is_meta:
            raise UnsupportedError("the first block is elsewhere")
        return self.layer(x)


class Needing(oddities.Awkward):
    def __init__(self):
        super().__init__()
        first = oddities.dense(6, 8)
        self.blocks = nn.Sequential(first, oddities.dense(), oddities.dense(), NeedsTheFirst(first), nn.Linear(8, 3))

    def forward(self, x):
        return self.blocks(x)


class Box:
    def __init__(self, x):
        self.x = x


@dataclass
class Boxes:
    x: torch.Tensor


class Boxed(nn.Module):
    """Blocks exchange an object, of a dataclass or another class."""

    def __init__(self, box):
        super().__init__()
        self.weight, self.box = nn.Parameter(torch.eye(6)), box

    def forward(self, x):
        return self.box(torch.tanh(getattr(x, "x", x) @ self.weight))


def boxing(box):
    module = oddities.FourBlocks()
    module.blocks = nn.Sequential(*map(Boxed, [box, box, box, nn.Identity()]))
    return module, module.batches(2)


def test_an_object_that_blocks_exchange_is_a_dataclass_or_refused():
    with pytest.raises(WorkerError, match=r"PipelineSplitError: .*Objects other than dataclasses"):
        run(fit, partial(boxing, Box), {"pipeline_parallel_size": 2}, world=2)
    check(partial(boxing, Boxes), 2, {"num_microbatches": 4})


def needing():
    module = Needing()
    fit(lambda: (module, module.batches(2)), {"pipeline_parallel_size": 2})


def test_an_error_of_ours_on_one_stage_reaches_the_others():
    with pytest.raises(WorkerError) as caught:
        run(needing, world=2, timeout=120)
    assert str(caught.value).count("Error: the first block is elsewhere") >= 2


def fitted(name):
    fit(partial(oddities.build, name), {"pipeline_parallel_size": 2, "num_microbatches": 4, "loss_scope": "microbatch"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Selected", r"stage 0.* shape \(\d+, 8\).* must not depend on values"),
        ("Skipping", "stage 0.* ended before .* must not depend on batch_idx"),
        # A later term would be computed from zeros: what only it needs was not sent.
        ("Warmed", "training_step returns, logs or keeps a value of an ear"),
    ],
)
def test_a_step_unlike_its_rehearsal_is_named(name, message):
    """Not before training, since another batch shows it."""
    with pytest.raises(WorkerError, match=f"PipelineSplitError: {message}"):
        run(fitted, name, world=2)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("name", [name for name in EXACT if name not in CUT_THROUGH])
def test_over_three_stages_and_with_a_split_backward(name, schedule):
    options = {"schedule": schedule, "stages_per_rank": 1} | (
        {"num_microbatches": 1}
        if name in (*WHOLE_BATCH, "Packed")
        else {}  # rows of unlike lengths are of other shapes
    )
    check(partial(oddities.build, name), 3, options, validate=name != "Streamed", accumulate_grad_batches=2)


@pytest.mark.long
@pytest.mark.parametrize("name", CUT_THROUGH)
def test_what_three_stages_cut_through_is_refused(name):
    with pytest.raises(WorkerError) as error:
        run(refused, name, 3, world=3)
    assert "training began" not in str(error.value)
    says = (
        r"PipelineSplitError: stage 1: the backward fails|UnsupportedError: The step computes .* inside one torch.utils"
    )
    assert len(re.findall(says, str(error.value))) >= 3


def refused(name, world=2, **layout):
    module, batches = oddities.build(name)

    def began():
        raise AssertionError("training began")

    module.on_train_start = began
    fit(lambda: (module, batches), {"pipeline_parallel_size": world, "num_microbatches": 4, **layout})


def refused_in_low_precision(name):
    module, batches = oddities.build(name)
    fit(lambda: (module, batches), {"pipeline_parallel_size": 2, "num_microbatches": 4}, precision="bf16-mixed")


def test_what_a_hook_takes_is_not_lost_in_rounding():
    """The router's loss of a mixture of experts is a hundredth of the loss."""
    assert_refused("ChangingHook", refused_in_low_precision, 2)


def refused_beside_tensor_ranks(name):
    refused(name, tensor_parallel_size=2)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_on_every_rank_before_training(name):
    assert_refused(name, refused, 2)


@pytest.mark.parametrize("name", ["Balanced", "ChangingHook", "GraphHooks", "Replaced"])
def test_is_refused_where_tensor_ranks_share_the_blocks_too(name):
    assert_refused(name, refused_beside_tensor_ranks, 4)


def assert_refused(name, function, world):
    with pytest.raises(WorkerError, match=REFUSED[name]) as error:
        run(function, name, world=world)
    kind = REFUSED[name].split(":")[0]
    for part in str(error.value).split("--- rank ")[1:]:
        assert kind in part.splitlines()[-1] or f"errors.{kind}" in part
    assert "training began" not in str(error.value)
    assert all(f"--- rank {rank}" in str(error.value) for rank in range(world))


def padded(layer, x, lengths):
    x = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(layer(x)[0], batch_first=True, total_length=6)[0]


class Repacked(oddities.Packed):
    """Layers get padded sequences, which code between them packs, or which they pack."""

    def loss(self, batch):
        x = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x, batch["lengths"]) if self.layer is Repacking else padded(layer, x, batch["lengths"])
        return F.cross_entropy(self.head(x.sum(1)), batch["y"])


class Repacking(nn.GRU):
    def forward(self, x, lengths):
        return padded(super().forward, x, lengths)


def repacked(layer):
    module = type("Repacked", (Repacked,), {"layer": layer})()
    return module, module.batches(2)


def test_sequences_are_packed_inside_of_a_block():
    with pytest.raises(WorkerError, match="a block that packs sequences unpacks them too"):
        run(fit, partial(repacked, nn.GRU), {"pipeline_parallel_size": 2}, world=2)
    check(partial(repacked, Repacking), 2, {"num_microbatches": 4})
