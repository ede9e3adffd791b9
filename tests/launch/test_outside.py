"""A launcher that starts the workers and their process group itself, as Ray does: more of them than the Trainer has
devices, and each trains in a thread."""

import os
import threading

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.errors import LayoutError
from lightning_3d.faults import flight
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.plain import MLP


class Outside(LightningEnvironment):
    """Ranks come from the launcher. Two neighbours share a node."""

    def world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return int(os.environ["RANK"])

    def set_global_rank(self, rank):
        pass

    def local_rank(self):
        return self.global_rank() % 2

    def node_rank(self):
        return self.global_rank() // 2

    def teardown(self):
        pass


class Standing(Callback):
    """The place of this process, as other ranks see it."""

    text = ""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.text = flight.standing()


def fitted(strategy, plugins):
    seed_everything(2, verbose=False)
    module, standing = MLP(), Standing()
    trainer = Trainer(
        **QUIET, devices=1, max_epochs=2, callbacks=[standing], plugins=plugins,
        strategy="auto" if strategy is None else Strategy3D(**strategy, quiet=True, timeout=60),
    )  # fmt: skip
    trainer.fit(module)
    return dict(module.state_dict()), trainer, standing.text


def worker(strategy, plugin):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(caught(strategy, [Outside() if plugin else LightningEnvironment()]))
    )
    thread.start()
    thread.join()
    return found[0]


def caught(strategy, plugins):
    try:
        weights, trainer, text = fitted(strategy, plugins)
    except LayoutError as error:
        return str(error)
    return weights, trainer.world_size, trainer.strategy.ranks_per_node, text


def alone():
    return fitted(None, [])[0]


def test_workers_that_another_launcher_started_train_like_one_device():
    (wanted,) = run(alone, world=1)
    for weights, world, per_node, text in run(worker, {"tensor_parallel_size": 2}, True, world=4, group=True):
        assert (world, per_node) == (4, 2)
        assert "test_outside.py" in text  # the thread that trains, not the main one
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)


def test_workers_whose_environment_was_not_given_are_refused():
    for text in run(worker, {}, False, world=2, group=True):
        assert "plugins=[RayLightningEnvironment()]" in text


@pytest.mark.parametrize(("nodes", "size"), [([0, 0, 1, 1], 2), ([0, 0, 0, 0, 1, 1], 2), ([0, 0, 0, 1, 1], 1)])
def test_the_size_of_a_node_divides_that_of_all(nodes, size, monkeypatch):
    strategy = Strategy3D(cluster_environment=Outside(), parallel_devices=[torch.device("cpu")])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(len(nodes)))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: len(nodes))
    monkeypatch.setattr("lightning_3d.strategy.processes.talk.gather", lambda mine: nodes)
    strategy._nodes = strategy._find_nodes()
    assert strategy.ranks_per_node == size
    assert strategy.ranks_of_host == nodes.count(0)
