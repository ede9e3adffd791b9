"""Defects that only a device shows, planted one by one: each fails."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_3d.axes.group import Group
from lightning_3d.comm import replicate
from lightning_3d.comm.replicate import ReplicatedGradients
from lightning_3d.optim.stand_ins import HostCopies
from lightning_3d.pipeline import split
from lightning_3d.ranks import talk
from lightning_3d.strategy import processes
from tests.device import streams, test_layouts, test_memory
from tests.device.accelerator import CardAccelerator
from tests.device.ranks import run
from tests.device.test_layouts import LAYOUTS
from tests.parity import train
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


def _no_wait_for_streams():
    streams.Stream.wait_stream = lambda *_: None


def _stand_ins_written_early():
    write = HostCopies.write_values

    def written(self):
        write(self)
        for stand_in in self._used.values():
            stand_in.data.zero_()

    HostCopies.write_values = written


def _other_order():
    replicate.LEAST_BYTES = 0  # several buckets
    begin = ReplicatedGradients._begin

    def reversed_(self):
        self._current = begin(self)[:: -1 if self.collectives.rank else 1]
        return self._current

    ReplicatedGradients._begin = reversed_


def _whole_module():
    processes.keep_on_host = lambda module, device: module.to(device)


def _stages_of_others():
    split.absent_like = lambda tensor: tensor


def _never_freed():
    FSDPParamGroup.reshard = lambda self: None


def with_defect(defect, function, *args):
    """Call `function` in a process that has the defect from then on."""
    globals()[defect]()
    return function(*args)


def _on_cards(defect, name, function, *args):
    return run(with_defect, defect, function, *args, world=LAYOUTS[name][0], ends=True, timeout=60)


def _training(name):
    world, arguments = LAYOUTS[name]
    flags = {**TRAINER, "accelerator": CardAccelerator()}
    return train, "GPT", world, {**arguments, "quiet": True}, ATTRIBUTES, flags


def test_a_value_that_is_read_in_a_steady_step():
    for places in _on_cards("_value_read", "zero0", test_layouts.steady, LAYOUTS["zero0"][1], 2):
        assert places.keys() == {"test_planted.py"}


@pytest.mark.parametrize(
    ("defect", "name", "error"),
    [
        ("_no_wait_for_sums", "zero0", "RaceError"),
        ("_no_wait_for_events", "zero3", "RaceError"),
        ("_no_wait_for_streams", "zero3", "RaceError"),
        ("_stand_ins_written_early", "optimizer", "RaceError"),
        ("_hosts_in_a_group_of_cards", "zero0", "No backend type associated with device type cpu"),
        ("_other_order", "zero0", "OrderError: ranks of one communicator call"),
    ],
)
def test_messages_and_memory_that_are_used_wrongly(defect, name, error):
    with pytest.raises(WorkerError, match=error):
        _on_cards(defect, name, *_training(name))


@pytest.mark.parametrize(
    ("defect", "layout", "message"),
    [
        ("_whole_module", "2 zero3", "set-up has weights of other ranks"),
        ("_stages_of_others", "2 pipeline", "weights of other ranks"),
        ("_never_freed", "2 zero3", "stays gathered"),
    ],
)
def test_memory_of_another_ranks_part(defect, layout, message):
    arguments = test_memory.LAYOUTS[layout]
    found = run(with_defect, defect, test_memory.measured, arguments, 2, world=2, ends=True, timeout=60)
    with pytest.raises(AssertionError, match=message):
        test_memory.judge(layout, found, 2 - (layout == "2 zero3"))


def test_each_risk_of_the_page_names_tests_that_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", Path(__file__).with_name("README.md").read_text())
    assert len(named) > 32
    assert not [name for file, name in named if f"def {name}(" not in Path(file).read_text()]


def test_torch_has_no_card_where_none_is_registered():
    with pytest.raises(RuntimeError):
        torch.device("card")
