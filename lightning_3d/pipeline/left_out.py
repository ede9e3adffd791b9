"""Labels that cross entropy leaves out, in later batches than the first.

Its mean is over the other labels. Where microbatches leave out unequally many, their mean is not that of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.microbatch import Path
from lightning_3d.sandbox.trees import leaves_at


@dataclass
class LeftOut:
    """Refuses a batch whose microbatches leave out unequally many labels."""

    targets: Sequence[tuple[Path, int]] = ()
    """The place in a batch that has the labels of a cross entropy, and the label that it leaves out."""
    _late: list[tuple[Any, Tensor]] = field(default_factory=list)

    def check(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> None:
        """Raise for a batch on the CPU, and one step late for a batch on another device, which is not waited for."""
        while self._late:
            event, uneven = self._late.pop()
            event.synchronize()
            _refuse(uneven)
        for path, label in self.targets if len(sizes) > 1 else ():
            labels: list[Any] = [dict(leaves_at(batch)).get(path) for batch in microbatches]
            if all(isinstance(each, Tensor) for each in labels):
                counts = [(each == label).sum() for each in labels]
                shares = torch.stack([count * sizes[0] for count in counts])
                uneven = (shares != torch.stack([counts[0] * size for size in sizes])).any()
                if uneven.is_cpu:
                    _refuse(uneven)
                else:
                    late, event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.Event(uneven.device)
                    late.copy_(uneven, non_blocking=True)
                    event.record()
                    self._late.append((event, late))


def _refuse(uneven: Tensor) -> None:
    if uneven:
        raise UnsupportedError(
            "cross_entropy leaves out some labels of this batch (ignore_index), and not equally many of each"
            " microbatch. Its mean is over the other labels, so the mean over microbatches would be another loss than"
            " on one device. The first batch had no such labels, so the loss was taken for a mean over samples."
            " loss_scope='batch' computes it on the full batch."
        )
