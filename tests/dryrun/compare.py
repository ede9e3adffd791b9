"""A training on real gloo ranks and the same training dry, measured by the same meter."""

import gc
import os
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_3d.axes import ring_wire
from lightning_3d.comm.replicate import Bucket
from lightning_3d.strategy import processes
from lightning_3d.tools.dryrun import in_world, parse_cluster
from lightning_3d.tools.dryrun.fake_device import FakeDevice
from lightning_3d.tools.dryrun.simulated_rank import RankMeter
from tests.parity import QUIET, build, make_strategy
from tests.workers import run

FLAGS = {**QUIET, "max_epochs": 4, "limit_val_batches": 0}


class Clean(RankMeter):
    """A meter that collects garbage before training: a proof leaves some on rank 0."""

    def on_train_start(self, trainer, module):
        gc.collect()
        super().on_train_start(trainer, module)


def real_rank(name, strategy, flags):
    """What the meter reads on this rank of a job that trains two steps, or `max_steps` of them."""
    seed_everything(7, verbose=False)
    pretend, found = FakeDevice(), {}
    _count_resizes(pretend)
    flags = {"max_steps": 2, **flags}
    meter = Clean(pretend, flags["max_steps"], found.update)
    own = {"devices": int(os.environ["WORLD_SIZE"]), "callbacks": [meter]}
    trainer = Trainer(**{**FLAGS, **own, **flags}, strategy=make_strategy(strategy))
    # ranks that seeded alike have nothing to tell each other; a dry run sends no random streams that it could count
    unsent = patch.object(processes, "share_seeded_state", lambda: None)
    with pretend, unsent, _packed_counted(pretend), _shared_uncounted(pretend):
        trainer.fit(build(name))
    return found


def _count_resizes(pretend):
    """Have `pretend` told of what FSDP2 frees; the worker process lives on for other tests."""
    original = getattr(torch.UntypedStorage.resize_, "original", torch.UntypedStorage.resize_)

    def resize(storage, size):
        original(storage, size)
        pretend.memory.resize(storage)
        return storage

    resize.original = original
    torch.UntypedStorage.resize_ = resize


def _packed_counted(pretend):
    """Have `pretend` count the buffers of small gradients, which real ranks make in another thread than it sees."""
    original = Bucket._pack

    def pack(bucket, gradients):
        buffer, views = original(bucket, gradients)
        pretend.memory.add(buffer)
        return buffer, views

    return patch.object(Bucket, "_pack", pack)


def _shared_uncounted(pretend):
    """Have `pretend` leave out the memory of a ring: ranks of one machine share it, and simulated ones have none."""
    original = ring_wire.connect

    def connect(group, slot_bytes):
        with pretend.aside():
            memory = original(group, slot_bytes)
        for side in () if memory is None else (memory._outlet, memory._inlet):
            pretend.memory._sizes[id(side.slots[0].untyped_storage())] = 0
        return memory

    return patch.object(ring_wire, "connect", connect)


def real(name, world, strategy, flags=None, timeout=120):
    return run(real_rank, name, strategy, flags or {}, world=world, timeout=timeout)


def dry(name, cluster, strategy, flags=None, ranks=None):
    """The report of the same training on `cluster`."""
    with in_world(parse_cluster(cluster)) as world:
        world.ranks = ranks
        seed_everything(7, verbose=False)
        module = build(name)
        Trainer(**{**FLAGS, **(flags or {})}, strategy=make_strategy(strategy)).fit(module)
        return world.reports[0]
