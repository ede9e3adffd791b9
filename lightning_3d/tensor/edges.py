"""What entered the split regions in one forward of a block, so that products of one input share one sum in backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.autograd_collectives import copy
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_gather import whole
from lightning_3d.tensor.overlap import Deferral, Early
from lightning_3d.tensor.sequence import enter, shards_of


@dataclass
class _Entered:
    """A tensor at the edge of a region."""

    source: Tensor
    grad_mode: bool
    inside: Tensor
    """What the region's code has."""
    taken: Tensor
    """What its products take of that."""
    early: Early | None
    """Until a product took it: its sum may still be launched."""


class Memo:
    """The copies made in one forward of a block."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.entered: list[_Entered] = []
        self.decoys: list[tuple[Tensor, Tensor]] = []
        self.sequence: TensorSplit | None = None
        """How the residual stream is divided in the forward that is running."""
        self.dims = 0
        """Dimensions of the stream."""
        self.others: list[Tensor] = []
        """The block's other arguments, which are whole."""
        self.running = 0
        """Forwards of the block that are running: more than one where it calls itself."""
        self.repeatable = True
        """Whether parts of the block may run again by themselves: all calls were in shards and nothing more."""

    def decoy(self, tensor: Tensor, width: int) -> Tensor:
        """A narrower tensor to read sizes off, which stands for `tensor` until a column product takes it."""
        made = tensor.detach().narrow(-1, 0, width)
        self.decoys.append((made, tensor))
        return made

    def clear(self) -> None:
        self.entered.clear()
        self.decoys.clear()
        self.others.clear()
        self.sequence = None

    def __call__(self, tensor: Tensor) -> Tensor:
        for decoy, real in self.decoys:
            if decoy is tensor:
                tensor = real
        tensor = whole(tensor)  # functions of autograd do not see through a `LateGather`
        if not tensor.requires_grad:
            return tensor
        if self.sequence is not None and not any(tensor is other for other in self.others):
            return tensor  # it was gathered where the region begins, and that sums the gradient
        early = Early(self.axis.begin_all_reduce)
        return self._once(tensor, early, lambda: copy(tensor, self.axis, early))

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole sequence of a part of the residual stream."""
        split = self.sequence
        if split is None or any(tensor is other for other in self.others):
            return tensor
        if tensor.dim() != self.dims or tensor.shape[split.dim] != split.local_size(self.axis.rank):
            return tensor
        early = Early(lambda grad: self.axis.begin_reduce_scatter(shards_of(grad, self.axis, split)))
        return self._once(tensor, early, lambda: enter(tensor, self.axis, split, early))

    def taken(self, tensor: Tensor, deferral: Deferral | None) -> Tensor:
        """What a product takes of what entered: the first one launches the sum if its weight's gradient can wait."""
        entered = self._find(lambda entered: entered.inside is tensor)
        if entered is None:
            return tensor
        if entered.early is not None and deferral is not None:
            entered.taken = deferral.launch(tensor, entered.early)
        entered.early = None
        return entered.taken

    def _once(self, tensor: Tensor, early: Early, make: Callable[[], Tensor]) -> Tensor:
        found = self._find(lambda entered: entered.source is tensor)
        if found is None:
            inside = make()
            found = _Entered(tensor, torch.is_grad_enabled(), inside, inside, early)
            self.entered.append(found)
        return found.inside

    def _find(self, wanted: Callable[[_Entered], bool]) -> _Entered | None:
        grad = torch.is_grad_enabled()
        return next((entered for entered in self.entered if entered.grad_mode == grad and wanted(entered)), None)

    def __deepcopy__(self, memo: Any) -> "Memo":
        return Memo(self.axis)
