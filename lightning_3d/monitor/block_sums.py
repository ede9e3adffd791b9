"""The losses of the last batches, and the sum of each block's output, on the device until somebody asks.

A sum is not finite where one element is not. So the first block with such a sum is where a NaN began.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.torch_private import in_backward, in_transform, is_compiled
from lightning_3d.sandbox.trees import leaves

MOST = 64
"""Batches that are remembered."""


@dataclass
class BatchSums:
    number: int
    loss: Tensor | None = None
    blocks: dict[int, Tensor] = field(default_factory=dict)
    """Position of a block -> sum of its output, over all microbatches."""


class BlockSums:
    """Notes sums while it is attached. It reads nothing from the device before `losses` and `first_bad`."""

    def __init__(self, module: nn.Module) -> None:
        blocks = Anatomy.of(module).blocks
        self.blocks = [name for name in blocks if any(True for _ in module.get_submodule(name).parameters())]
        """Those with weights: an activation may be a hyperparameter too, which no checkpoint could save with a hook."""
        self.batches: deque[BatchSums] = deque(maxlen=MOST)
        self._now: BatchSums | None = None
        self._hooks: list[RemovableHandle] = []
        if any(is_compiled(each) for each in module.modules()):
            self.blocks = []  # a hook would become a part of the compiled code
        for position, name in enumerate(self.blocks):
            self._hooks.append(module.get_submodule(name).register_forward_hook(self._hook(position)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, number: int) -> None:
        self._now = BatchSums(number)
        self.batches.append(self._now)

    def end(self, loss: Tensor | None) -> None:
        if self._now is not None:
            self._now.loss, self._now = loss, None

    def losses(self) -> dict[int, float]:
        """Number of a batch -> loss. Waits for the device, once."""
        known = [batch for batch in self.batches if batch.loss is not None]
        if not known:
            return {}
        values = torch.stack([_scalar(batch.loss) for batch in known]).tolist()
        return dict(zip((batch.number for batch in known), values, strict=True))

    def first_bad(self, number: int) -> int | None:
        """Position of the first block of batch `number` with an output that is not finite."""
        batch = next(batch for batch in self.batches if batch.number == number)
        bad = (at for at, total in sorted(batch.blocks.items()) if not torch.isfinite(total))
        return next(bad, None)

    def _hook(self, position: int) -> Any:
        def note(block: nn.Module, args: Any, output: Any) -> None:
            if self._now is None or not torch.is_grad_enabled() or in_backward() or in_transform():
                return  # an evaluation, a block that runs again for its backward, or values that are not there yet
            tensor = next((leaf for leaf in leaves(output) if _is_plain(leaf)), None)
            if tensor is not None:
                total = tensor.detach().sum(dtype=torch.float32)
                earlier = self._now.blocks.get(position)
                self._now.blocks[position] = total if earlier is None else earlier + total

        return note


def _is_plain(leaf: Any) -> bool:
    """True for a tensor with values: subclasses stand for tensors of other ranks, or gather when they are read."""
    return type(leaf) is Tensor and not leaf.is_meta and leaf.is_floating_point()


def _scalar(loss: Tensor | None) -> Tensor:
    assert loss is not None
    return loss.detach().float().reshape(-1)[0]
