"""Memory of the process: collections of garbage that look at little."""

import gc
import weakref

import pytest

from lightning_3d.module.host_memory import quick_collections


class Ring:
    def __init__(self):
        self.me = self


def test_cycles_made_inside_are_collected_and_older_objects_are_not_looked_at():
    older, frozen = Ring(), gc.get_freeze_count()
    gone, garbage = weakref.ref(older), weakref.ref(Ring())
    with quick_collections():
        assert garbage() is None
        del older
        inside = weakref.ref(Ring())
        gc.collect()
        assert inside() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() == frozen


def test_an_error_inside_ends_it():
    before = gc.get_freeze_count()
    with pytest.raises(ValueError), quick_collections():
        raise ValueError
    assert gc.get_freeze_count() == before


def test_objects_that_were_frozen_before_stay_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        with quick_collections():
            gc.collect()
        assert gc.get_freeze_count() > 0.99 * before  # a few may have lost their last user
    finally:
        gc.unfreeze()
