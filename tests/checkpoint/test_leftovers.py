"""What compression left over under one layout is made good under another.

Once gradients are zero only leftovers move the weights, and error feedback sends all of them in a few steps: how far the
weights go from a checkpoint on, divided by the learning rate, is what the data ranks still owed together.
"""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_3d import Strategy3D
from lightning_3d.checkpoint.leftovers import Leftovers, Part, Sending, _shares
from lightning_3d.checkpoint.own import Found, restore_own
from lightning_3d.checkpoint.placement import Placement
from lightning_3d.checkpoint.stored import RANKS
from lightning_3d.comm.powersgd import PowerSGD
from lightning_3d.errors import CheckpointError
from lightning_3d.ranks.random_streams import main_streams
from tests.checkpoint.trainings import SaveAt
from tests.modules import GPT
from tests.parity import QUIET
from tests.workers import run

RATE, SAVED_AT = 10.0, 3
FULL, SHARDED = {"checkpoint_format": "full"}, {"checkpoint_format": "sharded"}
INT8, BF16, POWERSGD = ({"grad_compression": kind} for kind in ("int8", "bf16", "powersgd"))


class Fading(GPT):
    optimizer = "plain_sgd"
    factor = 1.0

    def loss(self, batch):
        return super().loss(batch) * self.factor


class Fast(Callback):
    def on_train_start(self, trainer, module):
        trainer.optimizers[0].param_groups[0]["lr"] = RATE


def fit(world, strategy, steps, resume=None, save=None, scaled=None):
    """Train, or with `resume` go on without gradients; the weights on this rank, and what was warned of."""
    seed_everything(7, verbose=False)
    module = Fading()
    module.factor = 1.0 if resume is None else 0.0
    callbacks = [SaveAt(SAVED_AT, save, True)] if save else [Fast()]
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scaled))] if scaled else []
    flags = {"limit_val_batches": 0, "max_steps": steps, "max_epochs": -1, "devices": world, "plugins": plugins}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Trainer(**QUIET, **flags, strategy=Strategy3D(**strategy), callbacks=callbacks).fit(module, ckpt_path=resume)
    told = [str(warning.message) for warning in said if "left over" in str(warning.message)]
    return {name: weight.clone() for name, weight in module.state_dict().items()}, told


@pytest.fixture(scope="module")
def owed(tmp_path_factory):
    """What is owed after a checkpoint, as its own layout pays it; each is trained once."""
    folder, known = tmp_path_factory.mktemp("owed"), {}

    def of(world, strategy, steps=4, scaled=None):
        key = repr((world, strategy, scaled))
        if key not in known:
            path = str(folder / f"{len(known)}.ckpt")
            before = run(fit, world, strategy, SAVED_AT, None, path, scaled, world=world)[0][0]
            # copies of a parameter on tensor ranks or stages may owe different roundings: the first one's count
            known[key] = path, before, paid(path, before, world, strategy, steps, scaled)[0]
        return known[key]

    return of


def paid(path, before, world, strategy, steps=4, scaled=None):
    """On each rank what goes from the weights until nothing is left over."""
    results = run(fit, world, strategy, SAVED_AT + steps, path, None, scaled, world=world)
    assert all(told == [] for _, told in results)
    return [{name: (weight - after[name]) / RATE for name, weight in before.items()} for after, _ in results]


def assert_same(found, wanted, atol=1e-7):
    assert any(debt.abs().max() > 1e-5 for debt in wanted.values())
    for debts in found:
        for name, debt in wanted.items():
            torch.testing.assert_close(debts[name], debt, rtol=1e-4, atol=atol)


def grid(tensor, pipeline, **more):
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **INT8, **more}


TWO, FOUR = FULL | INT8 | {"zero_stage": 0}, SHARDED | INT8 | {"zero_stage": 1}
PAIRS = [
    ((2, TWO), (4, FULL | INT8 | {"zero_stage": 0})),
    ((2, TWO), (2, SHARDED | INT8 | {"zero_stage": 2})),
    ((2, TWO), (2, SHARDED | BF16 | {"zero_stage": 0})),
    ((4, FOUR), (4, grid(2, 1, zero_stage=0))),
    ((4, FULL | grid(1, 2, zero_stage=0)), (2, TWO)),
]
LONG_PAIRS = [
    ((4, FOUR), (4, grid(2, 1, zero_stage=2))),
    ((4, FOUR), (3, INT8 | {"zero_stage": 3})),
    ((4, FOUR), (4, INT8 | {"zero_stage": 3, "zero_shard_size": 2})),
    ((4, INT8 | {"zero_stage": 3, "zero_shard_size": 2}), (3, INT8 | {"zero_stage": 0})),
    ((3, INT8 | {"zero_stage": 0}), (4, grid(1, 2, zero_stage=2))),
    ((4, grid(2, 1, zero_stage=0)), (2, INT8 | {"zero_stage": 3})),
    ((4, grid(2, 1, zero_stage=2)), (4, grid(1, 2, zero_stage=0))),
    ((4, grid(1, 2, zero_stage=2)), (4, grid(2, 1, zero_stage=3))),
]


@pytest.mark.parametrize(
    ("saved", "loaded"), PAIRS + [pytest.param(*pair, marks=pytest.mark.long) for pair in LONG_PAIRS]
)
def test_what_is_owed_follows(owed, saved, loaded):
    path, before, wanted = owed(*saved)
    assert_same(paid(path, before, *loaded), wanted)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, FULL | POWERSGD | {"zero_stage": 0}), (2, SHARDED | INT8 | {"zero_stage": 0})),
        pytest.param(
            (2, FULL | POWERSGD | {"zero_stage": 0}), (4, POWERSGD | {"zero_stage": 2}), marks=pytest.mark.long
        ),
        pytest.param((2, TWO), (2, FULL | POWERSGD | {"zero_stage": 0}), marks=pytest.mark.long),
        pytest.param((4, POWERSGD | {"zero_stage": 3}), (4, grid(2, 1) | POWERSGD), marks=pytest.mark.long),
    ],
)
def test_what_is_owed_follows_powersgd(owed, saved, loaded):
    path, before, wanted = owed(*saved, steps=60)
    assert_same(paid(path, before, *loaded, steps=60), wanted, atol=1e-6)  # 60 steps leave a little over


def test_what_is_owed_follows_out_of_a_loss_scale(owed):
    path, before, wanted = owed(2, TWO, scaled=2.0**10)
    assert_same(paid(path, before, 2, TWO), wanted)


def test_where_nothing_is_compressed_leftovers_are_dropped_and_that_is_told(owed):
    path, before, _ = owed(2, TWO)
    results = run(fit, 2, {"zero_stage": 0}, SAVED_AT + 1, path, world=2)
    assert all(torch.equal(before[name], weight) for after, _ in results for name, weight in after.items())
    assert "no gradients are compressed here: it starts at zero again" in results[0][1][0]


def test_a_checkpoint_that_does_not_tell_of_what_leftovers_are_keeps_them_in_its_layout_only(owed, tmp_path):
    path, before, wanted = owed(2, TWO)
    loaded, older = torch.load(path, weights_only=True), str(tmp_path / "older.ckpt")
    for state in loaded[RANKS]:
        del state["sending"]
    torch.save(loaded, older)
    assert_same(paid(older, before, 2, TWO), wanted)
    results = run(fit, 2, INT8 | {"zero_stage": 2}, SAVED_AT + 1, older, world=2)
    assert all(torch.equal(before[name], weight) for after, _ in results for name, weight in after.items())
    assert "belongs to ranks of another layout: it starts at zero again" in results[0][1][0]


def test_shares_keep_the_mean():
    for before, ranks in itertools.product(range(1, 7), repeat=2):
        shares = [_shares(rank, ranks, before) for rank in range(ranks)]
        assert all(sum(share.values()) == pytest.approx(1) for share in shares)
        for old in range(before):
            assert sum(share.get(old, 0) for share in shares) / ranks == pytest.approx(1 / before)
    assert [_shares(rank, 3, 3) for rank in range(3)] == [{0: 1.0}, {1: 1.0}, {2: 1.0}]


def _sending(compression, rank, ranks, placement):
    return Sending(((compression, {"0": Part(("w", "tied"), placement)}),), rank, ranks, "int8", 1.0)


def _state(rank, ranks, memory, placement, **changes):
    sending = _sending(SimpleNamespace(memory=memory), rank, ranks, placement).plain()
    streams = {"streams": main_streams(), "cuda": None, "step": []}
    communication = {"compressions": [memory], "orders": []}
    return streams | {"data": [rank, ranks], "communication": communication, "sending": {**sending, **changes}}


def test_padding_and_columns_of_tensor_ranks_are_taken_apart():
    """Two data ranks that hold the columns of a 3 x 2 matrix apart; one rank of three then has all of it."""
    whole = Placement.whole((3, 2))
    columns = [whole.split(1, [((column, column + 1), (0, 1))]) for column in range(2)]
    lost = {(rank, column): torch.randn(4) for rank in range(2) for column in range(2)}  # one of four is padding
    average = {key: torch.randn(1, 2) for key in lost}
    states = [
        _state(rank, 2, {"0": lost[rank, column].view(2, 2), "0/average": average[rank, column]}, columns[column])
        for rank, column in lost
    ]
    found, wanted = [], torch.zeros(3, 2)
    for rank in range(3):
        compression = SimpleNamespace(memory={"of": "before"})
        Leftovers.find(states).hand_out(_sending(compression, rank, 3, whole))
        found.append(compression.memory.pop("0"))
        assert compression.memory == {}
    for column in range(2):
        both = torch.cat([average[0, column], average[1, column]]).flatten()
        wanted[:, column] = ((lost[0, column] + lost[1, column]) / 2 + both)[:3]
    torch.testing.assert_close(sum(found) / 3, wanted)


def test_powersgd_starts_where_it_was_if_its_part_is_the_same():
    whole = Placement.whole((2, 2))
    states = [_state(r, 2, {"0": torch.ones(2, 2), "0/right": torch.full((2, 1), r)}, whole) for r in (0, 1)]
    for placement, kept in ((whole, True), (whole.chunk(0, 0, 2), False)):
        for rank in range(3):
            compression = object.__new__(PowerSGD)
            Leftovers.find(states).hand_out(_sending(compression, rank, 3, placement))
            assert ("0/right" in compression.memory) is kept
            assert not kept or torch.equal(compression.memory["0/right"], torch.zeros(2, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.0},
        {"scale": "1"},
        {"parts": []},
        {"parts": [{"0": ["w"]}]},
        {"parts": [{"0": ["w", [2], [2**50], [[[0], [2], [0]]]]}]},
        {"parts": [{"0": ["w", [2], [1], [[[0], [2], [0]]]]}]},
        {"parts": [{"0": ["w", [3], [3], [[[0], [3], [0]]]]}]},
        {"parts": [{"0": ["w", [2, 2], [2, 2], [[[0, 0], [2, 2], [0, 0]]]]}]},
        {"parts": [[["0", "w"]]]},
    ],
    ids=str,
)
def test_what_a_damaged_checkpoint_says_of_leftovers_is_an_error(changes):
    placement = Placement.whole((2,))
    states = [_state(0, 1, {"0": torch.ones(2)}, placement, **changes)]
    to = _sending(SimpleNamespace(memory={}), 0, 2, placement)
    with pytest.raises(CheckpointError, match=r"cannot be taken up|is not within \(1,\)"):
        restore_own(Found(data=states[0], everyone=states), SimpleNamespace(states=[1]), None, to)
