"""Defects that only a device shows, planted one by one: each fails."""

import pytest
import torch

from lightning_3d.axes.group import Group
from lightning_3d.comm import replicate
from lightning_3d.comm.replicate import ReplicatedGradients
from lightning_3d.ranks import talk
from tests.device import streams, test_layouts
from tests.device.accelerator import CardAccelerator
from tests.device.ranks import run
from tests.device.test_layouts import DELAYS, LAYOUTS
from tests.parity import assert_same, reference, train
from tests.workers import WorkerError

TRAINER, ATTRIBUTES = {"max_epochs": 1}, {"optimizer": "plain_sgd"}


def _hosts_in_a_group_of_cards():
    talk.open_hosts = lambda group: group


def _value_read():
    begin = Group._ending

    def reading(self, collective, work, total, average):
        end = begin(self, collective, work, total, average)
        return lambda: (end(), total.sum().item())

    Group._ending = reading


def _no_wait_for_sums():
    Group._ending = lambda *_: lambda: None


def _no_wait_for_events():
    streams.Stream.wait_event = lambda *_: None


def _other_order():
    replicate.LEAST_BYTES = 0  # several buckets
    begin = ReplicatedGradients._begin

    def reversed_(self):
        begin(self)
        if self.collectives.rank:
            self._current = self._current[::-1]

    ReplicatedGradients._begin = reversed_


def with_defect(defect, function, *args):
    """Call `function` in a process that has the defect from then on."""
    globals()[defect]()
    return function(*args)


def _on_cards(defect, name, function, *args, delays=0.0):
    return run(with_defect, defect, function, *args, world=LAYOUTS[name][0], delays=delays, ends=True, timeout=60)


def _training(name):
    world, arguments = LAYOUTS[name]
    flags = {**TRAINER, "accelerator": CardAccelerator()}
    return train, "GPT", world, {**arguments, "quiet": True}, ATTRIBUTES, flags


def test_a_host_tensor_in_a_group_of_cards():
    with pytest.raises(WorkerError, match="No backend type associated with device type cpu"):
        _on_cards("_hosts_in_a_group_of_cards", "zero0", *_training("zero0"))


def test_a_value_that_is_read_in_a_steady_step():
    for places in _on_cards("_value_read", "zero0", test_layouts.waits, LAYOUTS["zero0"][1], 2):
        assert places.keys() == {"test_planted.py"}


@pytest.mark.parametrize(("defect", "name"), [("_no_wait_for_sums", "zero0"), ("_no_wait_for_events", "zero3")])
def test_a_read_before_its_event(defect, name):
    wanted = reference("GPT", ATTRIBUTES, TRAINER)
    found = _on_cards(defect, name, *_training(name), delays=10 * DELAYS)
    with pytest.raises(AssertionError):
        assert_same(found, wanted, 1e-4)


def test_an_order_of_collectives_that_differs_between_ranks():
    with pytest.raises(WorkerError, match="OrderError: ranks of one communicator call"):
        _on_cards("_other_order", "zero0", *_training("zero0"))


def test_torch_has_no_card_where_none_is_registered():
    with pytest.raises(RuntimeError):
        torch.device("card")
