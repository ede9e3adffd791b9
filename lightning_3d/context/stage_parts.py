"""Messages between stages of a pipeline: each context rank sends its part of the hidden states."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_3d.context.cut_plan import LEAST, parts_of
from lightning_3d.pipeline.wire import Parts, Spec
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_tensor import LateTensor, compute_late, is_part
from lightning_3d.tensor.sequence import part_of


@dataclass(frozen=True)
class StageParts(Parts):
    """The results of divided blocks."""

    axis: Axis
    results: Mapping[str, Mapping[int, int]]
    """For each block the results that are divided, and along which dimension."""

    def sent(self, unit: str, index: int, spec: Spec) -> Spec:
        dim = self.results.get(unit, {}).get(index)
        if dim is None or dim >= len(spec.shape) or spec.shape[dim] < LEAST * self.axis.size:
            return spec
        own = parts_of(dim, spec.shape[dim], self.axis.size).local_size(self.axis.rank)
        return spec.divided(dim, (*spec.shape[:dim], own, *spec.shape[dim + 1 :]))

    def own(self, tensor: Tensor, spec: Spec) -> Tensor:
        return tensor if spec.dim is None else part_of(tensor, self.axis, self._split(spec, spec.dim))

    def joined(self, own: Tensor, spec: Spec) -> Tensor:
        return own if spec.dim is None else LateTensor.of(own, self._split(spec, spec.dim), self.axis)

    def is_part(self, value: Any) -> bool:
        return is_part(value)

    def whole(self, value: Any) -> Any:
        return compute_late(value)

    def _split(self, spec: Spec, dim: int) -> TensorSplit:
        return parts_of(dim, spec.shape[dim], self.axis.size)
