"""Metrics reduce over the data axis only: tensor and pipeline peers hold the same samples."""

from collections.abc import Callable
from typing import Any

import torchmetrics.metric
from torch import Tensor
from torch import distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.layout import Layout

_DEFAULT = "gather_all_tensors"
"""What `torchmetrics.metric` calls for metrics that were given no way to gather (read in torchmetrics 1.9).

Replaced, and not set on metrics one by one: callbacks and helpers of the user's have some too, and some are made during
the run. `tests/same/test_metrics.py` fails when it is called something else.
"""


def gather_over(data: dist.ProcessGroup, layout: Layout) -> Callable[[], None]:
    """Have metrics that have no group of their own gather over `data`; returns what undoes it."""
    if layout.data_parallel_size == layout.world_size:
        return lambda: None  # the world is the data axis
    before = getattr(torchmetrics.metric, _DEFAULT)

    def gather(result: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(result, group=group if group is not None else data)

    setattr(torchmetrics.metric, _DEFAULT, gather)
    return lambda: setattr(torchmetrics.metric, _DEFAULT, before)
