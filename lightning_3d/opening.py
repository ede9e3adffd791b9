"""What is said when training starts: which rank holds what, what stayed whole, what makes up one optimizer step."""

from collections.abc import Iterator

from lightning_3d.layout import Coordinate, Layout
from lightning_3d.pipeline.schedule import stage_ranks
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.tensor.plan import TensorPlan

WIDE = 4
"""Data ranks, and tensor ranks of each, that are drawn one by one; of more, the first and the last are."""


def opening(layout: Layout, split: PipelineSplit | None, tensor: TensorPlan | None, accumulate: int) -> str:
    """A few lines about what is about to run."""
    lines = [f"Strategy3D on {_count(layout.world_size, 'rank')}: {layout}", *draw(layout, split)]
    if tensor is not None:
        kept = [name for name in tensor.whole if name]
        names = f"{', '.join(kept[:3])}{' ...' if len(kept) > 3 else ''}"
        whole = f"{_count(len(kept), 'part')} stayed whole ({names})" if kept else "nothing large stayed whole"
        lines.append(f"  tensor: {len(tensor.splits)} parameters divided, {whole}")
    lines.append(f"  one optimizer step: {_step(layout, split, accumulate)}")
    return "\n".join(lines)


def draw(layout: Layout, split: PipelineSplit | None = None) -> Iterator[str]:
    """The ranks as a table: a row for each pipeline rank with its blocks, a box of tensor ranks for each data rank."""
    columns = _shown(layout.data_parallel_size)
    boxes = [[_box(layout, stage, data) for data in columns] for stage in range(layout.pipeline_parallel_size)]
    labels = [f"stage {stage}" if layout.pipeline_parallel_size > 1 else "ranks" for stage in range(len(boxes))]
    left = max(map(len, labels))
    heads = ["..." if data is None else f"data {data}" for data in columns]
    several = layout.data_parallel_size > 1
    widths = [max(map(len, column)) for column in zip(*boxes, *([heads] if several else []), strict=True)]
    if several:
        yield f"  {'':<{left}}  {_cells(heads, widths)}".rstrip()
    for stage, row in enumerate(boxes):
        cells = _cells(row, widths)
        yield f"  {labels[stage]:<{left}}  {cells}  {_blocks(layout, split, stage)}".rstrip()


def _cells(row: list[str], widths: list[int]) -> str:
    return "  ".join(cell.center(width) for cell, width in zip(row, widths, strict=True))


def _box(layout: Layout, stage: int, data: int | None) -> str:
    if data is None:
        return "..."
    tensors = _shown(layout.tensor_parallel_size)
    ranks = ["..." if t is None else str(layout.rank(Coordinate(stage, data, t))) for t in tensors]
    return f"[{' '.join(ranks)}]"


def _shown(size: int) -> list[int | None]:
    return list(range(size)) if size <= WIDE else [0, 1, None, size - 1]


def _blocks(layout: Layout, split: PipelineSplit | None, rank: int) -> str:
    """What a pipeline rank holds; several pieces with virtual stages."""
    if split is None:
        return ""
    size = layout.pipeline_parallel_size
    holder = stage_ranks(layout.schedule, size, split.num_stages // size)
    lines = split.describe().splitlines()
    return ", ".join(lines[stage].partition(": ")[2] for stage, at in enumerate(holder) if at == rank)


def _step(layout: Layout, split: PipelineSplit | None, accumulate: int) -> str:
    parts = [f"{_count(layout.data_parallel_size, 'data rank')} x the loader's batch"]
    if accumulate > 1:
        parts.append(f"{accumulate} batches accumulated")
    text = " x ".join(parts)
    if split is None:
        return text
    pieces = "microbatches" if layout.num_microbatches == "auto" else _count(layout.num_microbatches, "microbatch")
    return f"{text}; the pipeline cuts a batch into {pieces} ({layout.schedule})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"
