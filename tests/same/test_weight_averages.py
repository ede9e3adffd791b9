"""Lightning's averages of weights give the numbers of one device, in training, evaluation and checkpoints."""

import io
import itertools
import warnings
from functools import cache, partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.checkpoint.trainings import SaveAt
from tests.parity import QUIET, build, in_turn, layouts, long, make_trainer
from tests.workers import run

LAYOUTS = {name: strategy for name, (_, strategy) in layouts("zero1", "zero2", "zero3", "tensor", "pipeline").items()}
FULL, SHARDED = {"checkpoint_format": "full"}, {"checkpoint_format": "sharded"}
AVERAGES = {
    "ema": partial(EMAWeightAveraging, decay=0.7),
    "mean": WeightAveraging,
    "host": partial(WeightAveraging, device="cpu"),
    "multi": partial(WeightAveraging, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)),
    "swa": partial(StochasticWeightAveraging, swa_lrs=1e-3, swa_epoch_start=1),
}


class Validate(Callback):
    """Notes the loss of validation, which uses the averaged weights."""

    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, module):
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(name, kind, world, strategy, resume=None, save=None, trainer=None):
    """Train, or `save` at a step (the number and the path) and stop; losses, weights and averages on this rank."""
    seed_everything(7, verbose=False)
    module, average, validate = build(name), AVERAGES[kind](), Validate()
    chosen = Strategy3D(**strategy) if strategy is not None else "auto"
    flags = {**QUIET, "limit_val_batches": 1, "max_epochs": 4, "devices": world, **(trainer or {})}
    warnings.filterwarnings("error", r".*\.on_before_backward is called")  # no average has one
    fit = Trainer(**flags, strategy=chosen, callbacks=[average, validate, *([SaveAt(*save, True)] if save else [])])
    fit.fit(module, ckpt_path=resume)
    fit.validate(module, verbose=False)
    return {
        "losses": module.seen,
        "validation": validate.losses,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "average": {name: value.clone() for name, value in average._average_model.state_dict().items()},
    }


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@cache
def reference(kind):
    return run(train, "GPT", kind, 1, None, world=1)[0]


MOVED = [("mean", "zero1"), ("mean", "tensor")]
"""These layouts are in `test_resumes_in_another_layout`."""
CASES = [
    case
    for case in itertools.product(["ema", "mean", "swa"], ["zero1", "zero3", "tensor", "pipeline"])
    if case not in MOVED
]
MORE = [
    *itertools.product(["host"], LAYOUTS),
    ("multi", "tensor"),
    ("multi", "pipeline"),
    ("multi", "zero2"),
    ("ema", "zero2"),
    *MOVED,
]


@pytest.mark.parametrize(("kind", "layout"), in_turn(CASES, 4) + [long(*case) for case in MORE])
def test_trains_as_on_one_device(kind, layout):
    wanted = reference(kind)
    for got in run(train, "GPT", kind, 2, LAYOUTS[layout], world=2):
        assert_same(got, wanted)


def average_in(path):
    """The averaged weights in a checkpoint of one file, and those in training."""
    checkpoint = torch.load(path, weights_only=True)
    if "current_model_state" in checkpoint:
        return checkpoint["state_dict"], checkpoint["current_model_state"], checkpoint["averaging_state"]
    return checkpoint["callbacks"]["StochasticWeightAveraging"]["average_model_state"], checkpoint["state_dict"], {}


LAST, WITHIN = 5, 7
"""Steps of a save: the last one of an epoch, and one within an epoch."""
MOVES = [
    ("ema", FULL, "zero3", "tensor", LAST),
    ("swa", FULL, "tensor", "pipeline", WITHIN),
    ("mean", FULL, "pipeline", "zero1", WITHIN),
    ("ema", SHARDED, "tensor", "zero3", WITHIN),
    ("swa", SHARDED, "zero1", "tensor", LAST),
    ("mean", SHARDED, "pipeline", "tensor", LAST),
    *(("swa", FULL, layout, layout, step) for layout in ("zero1", "zero3", "tensor") for step in (LAST, WITHIN)),
]


@pytest.mark.parametrize(
    ("kind", "form", "before", "after", "step"),
    [
        pytest.param(*move, marks=pytest.mark.long if at % 6 or move[2] == move[3] else ())
        for at, move in enumerate(MOVES)
    ],
)
def test_a_resumed_run_equals_one_that_was_not_broken(tmp_path, kind, form, before, after, step):
    path, plain = str(tmp_path / "x.ckpt"), str(tmp_path / "plain.ckpt")
    run(train, "GPT", kind, 2, {**LAYOUTS[before], **form}, None, (step, path), world=2)
    if form is FULL:
        run(train, "GPT", kind, 1, None, None, (step, plain), world=1)
        for got, expected in zip(average_in(path), average_in(plain), strict=True):
            assert_same(got, expected)
    wanted = reference(kind)
    for got in run(train, "GPT", kind, 2, {**LAYOUTS[after], **form}, path, world=2):
        assert len(got["losses"]) == len(wanted["losses"]) - step
        resumed = {name: wanted[name][-len(got[name]) :] for name in ("losses", "validation")}
        assert_same(got, wanted | resumed)


@pytest.mark.parametrize("layout", ["zero1", long("zero3")])
def test_validation_within_a_window_of_accumulation(layout):
    trainer = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    (wanted,) = run(train, "GPT", "ema", 1, None, None, None, trainer, world=1)
    for got in run(train, "GPT", "ema", 2, LAYOUTS[layout], None, None, trainer, world=2):
        assert_same(got, wanted)


def _saved(strategy):
    """The classes of the module before and after `fit`, and after `torch.save` and `torch.load`."""
    module = build("MLP")
    before = [type(each) for each in module.modules()]
    trainer = make_trainer(2, strategy, limit_val_batches=0, max_steps=1)
    trainer.fit(module)
    file = io.BytesIO()
    torch.save(trainer.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same(loaded.state_dict(), module.state_dict())
    return before == [type(each) for each in module.modules()] == [type(each) for each in loaded.modules()]


@pytest.mark.parametrize("layout", ["zero1", "zero3", "tensor", "pipeline"])
def test_the_module_is_plain_after_fit_and_can_be_saved(layout):
    assert run(_saved, LAYOUTS[layout], world=2) == [True, True]


def _refused(strategy):
    module = build("MLP")
    module.statistics = torch.nn.BatchNorm1d(4)
    try:
        trainer = make_trainer(2, strategy, max_steps=1, callbacks=[AVERAGES["swa"]()])
        trainer.fit(module)
    except UnsupportedError as error:
        return str(error)


def test_an_epoch_without_backward_is_refused():
    for text in run(_refused, LAYOUTS["zero1"], world=2):
        assert text.startswith("StochasticWeightAveraging computes the statistics of BatchNorm anew")
