"""Train a drawn case on one device and in its layout; they must agree, but for an error that is put into a rank."""

import re
from functools import partial

import pytest
import torch

from lightning_3d.axes.group import Group
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import TENSOR_AXIS
from lightning_3d.pipeline.exchange import Ties
from lightning_3d.strategy.steps import Window
from tests.fuzz.grammar import Drawn
from tests.parity import assert_same, change_differs, train
from tests.workers import WorkerError, run

TOLERANCE = {"64-true": 1e-9, "32-true": 1e-4}
"""fp64 shows any error that is none of rounding; fp32 trains through the code that most users run."""
TIMEOUT = 150
"""Seconds; a case takes one or two on an idle machine."""
ROUNDED = 0.1
"""Of what training changed in bf16, relative to it (Frobenius). An error of scale or a lost term is larger."""


_KINDS = (ConfigurationError, *ConfigurationError.__subclasses__())
REFUSAL = re.compile(rf"^lightning_3d\.errors\.(?:{'|'.join(kind.__name__ for kind in _KINDS)}): .*", re.MULTILINE)


class Refused(Exception):
    """The package said before training that it cannot do this."""


def fit(case, strategy, planted=None):
    attributes = dict(case.attributes)
    if case.trainer["precision"] == "bf16-mixed":
        attributes["optimizer"] = "plain_sgd"  # what it changes is a sum of gradients
    undo = pytest.MonkeyPatch()
    try:
        if planted is not None:
            PLANTED[planted](undo)
        world = case.world if strategy is not None else 1
        return train(partial(Drawn, case.spec), world, strategy, attributes, case.trainer)
    finally:
        undo.undo()


def check(case, planted=None):
    """Raise unless every rank got what one device gets; `Refused` if they did not train."""
    try:
        results = run(fit, case, case.strategy, planted, world=case.world, timeout=TIMEOUT)
    except WorkerError as error:
        refused = REFUSAL.findall(str(error))
        if len(refused) == case.world:
            raise Refused(refused[0]) from None
        raise
    (wanted,) = run(fit, case, None, world=1, timeout=TIMEOUT)
    assert len(wanted["losses"]) >= 2
    precision = case.trainer["precision"]
    if precision in TOLERANCE:
        assert_same(results, wanted, TOLERANCE[precision])
    else:
        for rank, got in enumerate(results):
            assert change_differs(got, wanted) < ROUNDED, f"rank {rank}"
            torch.testing.assert_close(got["losses"], wanted["losses"], rtol=0.03, atol=0.03)


def _accumulation_is_not_averaged(patch):
    """A pipeline that sums the batches of an accumulation window."""
    patch.setattr(Window, "scale", lambda self, plugin: 1.0)


def _input_gradients_are_not_summed(patch):
    """Tensor ranks that keep their own part of the gradient of what enters a split region."""
    all_reduce = Group.all_reduce

    def without(self, buffer, **options):
        if self.axis != TENSOR_AXIS or torch._C._current_graph_task_id() == -1:
            all_reduce(self, buffer, **options)

    patch.setattr(Group, "all_reduce", without)


def _ties_are_not_summed(patch):
    """Stages that each train their own copy of a shared weight."""
    patch.setattr(Ties, "sum_gradients", lambda self: None)


PLANTED = {
    "scaling": _accumulation_is_not_averaged,
    "missing all-reduce": _input_gradients_are_not_summed,
    "missing sum of ties": _ties_are_not_summed,
}
