"""Microbatches: the places of the samples in a batch, and the cut between them.

Most batches are tensors with a row per sample: dimension 0 is the batch. Other batches, for example of detectors, are
lists with an entry per sample. Dimension 0 of their tensors is something else: the colours of an image, the boxes of a
target. `Rows` distinguishes the two on the first batch, by the loader's number of samples. Every microbatch gets
anything else in full. A tensor whose first dimension equals the number of samples by chance (class weights, say) is cut
too: give it another shape.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.sandbox.trees import SIMPLE, children, has_row_count, leaves, rebuild, tensors_in, values_at

Path = tuple[int, ...]
"""The way to a value inside a batch: positions in nested containers."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DEPTH = 4
"""Objects inside objects that `signature` opens."""


@dataclass(frozen=True)
class Rows:
    """The places of the samples in the batches of a loader."""

    lists: frozenset[Path] = frozenset()
    """Lists with an entry per sample. Everything else has a row per sample, or belongs to all of them."""
    least: int = 1
    """Fewest rows of a microbatch that "auto" cuts: 2 where a module normalizes over rows."""

    @classmethod
    def of(cls, batch: Any, expected: int | None, module: nn.Module) -> "Rows":
        """The rows of the loader that gave `batch`, its first one, and promises `expected` samples in each."""
        lists = {path: value for path, value in values_at(batch) if _is_list_of_samples(value, expected)}
        # tensors with as many rows as their list has entries are fields of a batch, unless other lists are sure
        sure = {path for path, value in lists.items() if _is_ragged(value) or not _has_rows(value, len(value))}
        found = lists.keys() if sure and expected is not None else sure
        found = {path for path in found if not any(path[: len(other)] == other for other in found if other != path)}
        least = 2 if any(isinstance(each, NORMS) for each in module.modules()) else 1
        result = cls(frozenset(found), least)
        rows = result.count(batch)
        if expected is not None and rows is not None and rows > expected and rows % expected:
            raise UnsupportedError(
                f"The loader promises {expected} samples in a batch, and the batch seems to have {rows} rows. A"
                " pipeline cuts batches along the samples, and would cut this one at other places. Give every sample a"
                f" row of each tensor, or an entry of each list; or use {NO_PIPELINE}."
            )
        return result

    def count(self, batch: Any) -> int | None:
        """Samples in the batch, None where it has no dimension of samples or holds something that cannot be cut."""
        if _is_packed(batch):
            return None
        lengths = Counter(len(value) for path, value in values_at(batch) if path in self.lists)
        if lengths:
            return lengths.most_common(1)[0][0]
        sizes: Counter[int] = Counter()
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor):
                if leaf.ndim and type(leaf) is Tensor:
                    sizes[leaf.shape[0]] += 1
            elif not isinstance(leaf, SIMPLE):
                return None
        return sizes.most_common(1)[0][0] if sizes else None

    def take(self, value: Any, rows: int, start: int, stop: int, path: Path = ()) -> Any:
        if path in self.lists:
            return type(value)(value[start:stop])
        if isinstance(value, Tensor):
            return value[start:stop] if value.ndim and value.shape[0] == rows else value
        inner = children(value)
        if has_row_count(value):
            return value[start:stop] if value.batch_size[:1] == (rows,) else value
        if inner is None:
            return value
        if _is_list(value) and len(value) == rows and not _has_rows(value, rows):
            return type(value)(value[start:stop])
        return rebuild(value, [self.take(item, rows, start, stop, (*path, at)) for at, item in enumerate(inner)])


TENSORS = Rows()
"""Batches with a row per sample in each tensor."""


def _is_list_of_samples(value: Any, expected: int | None) -> bool:
    """True for a list whose entries are alike: as many as the loader promises, or ragged where it promises nothing."""
    if not _is_alike(value) or any(map(_is_alike, value)):
        return False
    return _is_ragged(value) if expected is None else len(value) == expected


def _is_alike(value: Any) -> bool:
    """True for a list of one kind of entries."""
    return _is_list(value) and len(set(map(_kind, value))) == 1


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _has_rows(value: Any, rows: int) -> bool:
    return any(leaf.ndim and leaf.shape[0] == rows for leaf in tensors_in(value))


def _kind(entry: Any) -> Any:
    """Equal for two samples of one list: sizes may differ, the rest does not."""
    if isinstance(entry, Tensor):
        return entry.ndim, entry.dtype
    keys = frozenset(entry.keys()) if isinstance(entry, Mapping) else None
    return type(entry), keys


def _is_ragged(entries: list[Any] | tuple[Any, ...]) -> bool:
    """True where tensors at one place of the entries have other lengths: no tensor could hold them as rows."""
    shapes = {tuple(leaf.shape[:1] for leaf in tensors_in(entry)) for entry in entries}
    return len(shapes) > 1


def _is_packed(value: Any) -> bool:
    """True where a PackedSequence is inside, whose rows are steps of all samples in turn."""
    return isinstance(value, PackedSequence) or any(map(_is_packed, children(value) or ()))


def split_sizes(rows: int, pieces: int) -> list[int]:
    """Sizes of the microbatches: as equal as they can be, the larger ones first."""
    pieces = max(1, min(pieces, rows))
    small, larger = divmod(rows, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def auto_microbatches(rows: int, stages: int, least: int = 1) -> int:
    """The largest divisor of `rows` up to 4 per stage, or 2 per stage with unequal sizes if that leaves too few.

    Each microbatch has at least `least` rows.
    """
    if stages == 1:
        return 1
    most = max(1, rows // least)
    best = max(count for count in range(1, 4 * stages + 1) if rows % count == 0 and count <= most)
    return best if best >= min(stages, most) else min(most, 2 * stages)


def microbatch_sizes(batch: Any, count: int | Literal["auto"], ranks: int, rows: Rows = TENSORS) -> list[int]:
    """Rows of each microbatch of a batch; [1] where it has no rows to cut."""
    size = rows.count(batch)
    if not size:
        return [1]
    return split_sizes(size, auto_microbatches(size, ranks, rows.least) if count == "auto" else count)


def split_batch(batch: Any, sizes: list[int], rows: Rows = TENSORS) -> list[Any]:
    if len(sizes) == 1:
        return [batch]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [rows.take(batch, sum(sizes), start, start + size) for start, size in zip(starts, sizes, strict=True)]


def signature(value: Any, depth: int = _DEPTH) -> Any:
    """The properties that two microbatches share if one rehearsal is valid for both: nesting, shapes, types.

    Objects that are no containers are opened as well: a batch of graphs keeps its tensors in attributes.
    """
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    inner = children(value)
    if inner is not None:
        keys = tuple(value.keys()) if isinstance(value, Mapping) else None
        return (type(value), keys, tuple(signature(item, depth) for item in inner))
    held = {} if isinstance(value, (*SIMPLE, type)) or not depth else getattr(value, "__dict__", {})
    if not held:
        return type(value)
    return (type(value), tuple((name, signature(item, depth - 1)) for name, item in held.items()))
