"""Checkpoints of made-up tensors, saved by any number of pretended ranks in one process."""

from threading import Barrier, Thread

import torch

from lightning_3d.checkpoint.collect import Collected
from lightning_3d.checkpoint.entry import TensorEntry
from lightning_3d.checkpoint.placement import Placement, box
from lightning_3d.checkpoint.plain_json import dumps
from lightning_3d.checkpoint.safetensors_files import NAMES
from lightning_3d.checkpoint.save import carry_out, prepare


class Ranks:
    """Threads that gather as ranks do."""

    def __init__(self, size):
        self.size, self.said, self.barrier = size, [None] * size, Barrier(size)

    def gather(self, rank):
        def gather(mine):
            self.said[rank] = mine
            self.barrier.wait(20)
            everyone = list(self.said)
            self.barrier.wait(20)
            return everyone

        return gather


def save(path, tensors, rest=None, ranks=2, place=None):
    """Save whole `tensors`, of which rank r holds `place(name, shape, r)`; returns what each rank raised."""
    place = place or (lambda name, shape, rank: rows(shape, rank, ranks))
    meeting, problems = Ranks(ranks), [None] * ranks

    def work(rank):
        found = Collected()
        for name, whole in tensors.items():
            placement = place(name, whole.shape, rank)
            local = torch.zeros(placement.local_shape, dtype=whole.dtype)
            for piece in placement.pieces:
                local[box(piece.local, piece.size)] = whole[box(piece.offset, piece.size)]
            found.tensors[name], found.listing[name] = local, TensorEntry(NAMES[whole.dtype], placement)
        found.rest = dumps(
            {**(rest or {}), "state_dict": _references(tensors)}, lambda value, at: value.name, ""
        ).decode()
        found.own = dumps({"rank": rank}, lambda value, at: at, "").decode()
        try:
            carry_out(prepare(found, path, rank, meeting.gather(rank)), meeting.gather(rank))
        except Exception as error:
            problems[rank] = error

    threads = [Thread(target=work, args=(rank,)) for rank in range(ranks)]
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
