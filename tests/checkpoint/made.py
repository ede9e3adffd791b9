"""Checkpoints of made-up tensors, saved by any number of pretended ranks in one process."""

from threading import Barrier, Thread, local
from unittest.mock import patch

import torch

from lightning_3d.checkpoint.collect import Collected, TensorEntry
from lightning_3d.checkpoint.placement import Placement, box
from lightning_3d.checkpoint.plain_json import dumps
from lightning_3d.checkpoint.safetensors_files import NAMES
from lightning_3d.checkpoint.save import agreement, carry_out, prepare, talk


class Ranks:
    """Threads that gather and agree as ranks do."""

    def __init__(self, size):
        self.said, self.barrier, self.here = [None] * size, Barrier(size), local()

    def gather(self, mine, group=None):
        self.said[self.here.rank] = mine
        self.barrier.wait(20)
        everyone = list(self.said)
        self.barrier.wait(20)
        return everyone

    def together(self, make, group, local):
        made = error = None
        try:
            made = make()
        except Exception as mine:
            error = mine
        for first in self.gather(error):
            if first is not None:
                raise first
        return made


class InLine:
    """Runs its work at once, so that what it raises is seen."""

    def __init__(self, target, args):
        target(*args)

    def start(self): ...

    def join(self, timeout): ...

    def is_alive(self):
        return False


def save(path, tensors, rest=None, ranks=2, place=None):
    """Save whole `tensors`, of which rank r holds `place(name, shape, r)`; returns what each rank raised."""
    place = place or (lambda name, shape, rank: rows(shape, rank, ranks))
    meeting, problems = Ranks(ranks), [None] * ranks

    def work(rank):
        meeting.here.rank = rank
        found = Collected()
        for name, whole in tensors.items():
            placement = place(name, whole.shape, rank)
            mine = torch.zeros(placement.local_shape, dtype=whole.dtype)
            for piece in placement.pieces:
                mine[box(piece.local, piece.size)] = whole[box(piece.offset, piece.size)]
            found.tensors[name], found.listing[name] = mine, TensorEntry(NAMES[whole.dtype], placement)
        found.rest = dumps(
            {**(rest or {}), "state_dict": _references(tensors)}, lambda value, at: value.name, ""
        ).decode()
        found.own = dumps({"rank": rank}, lambda value, at: at, "").decode()
        try:
            carry_out(prepare(found, path, rank))
        except Exception as error:
            problems[rank] = error

    threads = [Thread(target=work, args=(rank,)) for rank in range(ranks)]
    with patch.object(talk, "gather", meeting.gather), patch.object(agreement, "together", meeting.together):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return problems


def rows(shape, rank, ranks):
    placement = Placement.full(shape)
    return placement.chunk(0, rank, ranks) if shape else placement


class _Named(torch.Tensor):
    """A tensor that can be given an attribute `name`."""

    name = ""


def _references(tensors):
    """What stands for `tensors` in a state that is encoded: empty ones that know their names."""
    named = {}
    for name in tensors:
        named[name.removeprefix("state_dict.")] = torch.zeros(0).as_subclass(_Named)
        named[name.removeprefix("state_dict.")].name = name
    return named
