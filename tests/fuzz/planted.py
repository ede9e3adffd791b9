"""Errors to put into a rank, each one that a peer has shipped: the fuzzer must find them."""

import torch

from lightning_3d.axes.group import Group
from lightning_3d.layout import TENSOR_AXIS
from lightning_3d.pipeline.exchange import Ties
from lightning_3d.strategy.steps import Window


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
