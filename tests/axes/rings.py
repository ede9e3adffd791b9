"""Groups whose ranks send by our ring."""

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring_wire import RingWire


def ring(ranks, ledger=None, axis="data", kind=Group):
    return kind(ranks, axis, ledger or Ledger(), RingWire(ranks))
