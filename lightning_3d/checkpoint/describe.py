"""Live tensors to plain placements: the only file of this package that knows how each parallelism lays tensors out."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_3d.checkpoint.placement import Interval, Placement
from lightning_3d.layout import TENSOR_AXIS


class Split(Protocol):
    """How tensor parallelism divides one tensor (`tensor.geometry.TensorSplit` is one)."""

    @property
    def dim(self) -> int: ...

    def boxes(self, rank: int) -> Iterable[tuple[Interval, Interval]]: ...


Splits = Mapping[nn.Parameter, Split]
"""For the parameters that tensor parallelism divides."""


def describe(tensor: Tensor, split: Split | None = None) -> Placement:
    """What this rank holds of `tensor`: chunks by tensor rank first, then rows of those by data rank."""
    if tensor.is_meta:
        return Placement.nothing(tensor.shape)
    placement = Placement.whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return placement
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = sorted(zip(names, range(mesh.ndim), tensor.placements, strict=True), key=lambda axis: axis[0] != TENSOR_AXIS)
    for name, axis, how in axes:
        if isinstance(how, Replicate):
            continue
        rank, ranks, dim = mesh.get_local_rank(axis), mesh.size(axis), int(getattr(how, "dim"))  # noqa: B009
        if name == TENSOR_AXIS and split is not None:
            placement = placement.split(split.dim, split.boxes(rank))
        else:
            placement = placement.chunk(dim, rank, ranks)
    assert placement.local_shape == tuple(tensor.to_local().shape), (placement, tensor.to_local().shape)
    return placement
