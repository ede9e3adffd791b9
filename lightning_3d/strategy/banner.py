"""The text at the start of training: the ranks and their blocks, unsplit parameters, memory, one optimizer step."""

import re
import warnings
from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.module.amounts import show_bytes
from lightning_3d.optim.state_bytes import StateBytes
from lightning_3d.parallel.state_counts import with_states
from lightning_3d.pipeline.microbatch import auto_microbatches
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.stage_costs import bubble_share
from lightning_3d.tensor.tensor_plan import TensorPlan

WIDE = 4
"""Data ranks, and tensor ranks of each, that are drawn one by one. Of more, the first two and the last are drawn."""
SMALL = 0.02
"""Share of the module's bytes below which parameters that tensor ranks do not split are not named."""


def opening(
    module: nn.Module, layout: Layout, split: PipelineSplit | None, tensor: TensorPlan | None, *more: str
) -> str:
    """A few lines about the placement of `module`."""
    lines = [f"Strategy3D on {_count(layout.world_size, 'rank')}: {layout}", *draw(layout, split)]
    if tensor is not None:
        lines.append(f"  tensor: {len(tensor.splits)} parameters split, {_unsplit(module, tensor)}")
    return "\n".join([*lines, *filter(None, more), *[_HIDDEN] * hides_warnings()])


_HIDDEN = (
    "  warnings: a filter hides all, also those of numbers that differ from one device. Behind the imports,"
    ' warnings.filterwarnings("default", module="lightning_3d") shows them'
)


def hides_warnings() -> bool:
    """True where the first filter that decides about all warnings of this package ignores them."""
    ours = [each for each in warnings.filters if each[1] is None and issubclass(UserWarning, each[2])]
    return next((each[0] == "ignore" for each in ours if each[3] is None or re.match(each[3], __name__)), False)


def memory_line(expected: Sequence[StateBytes], optimizers: Sequence[Optimizer], kept: float | None) -> str:
    """The memory of the fullest rank once `optimizers` have stepped."""
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    states = with_states(expected, kept or 0.0)
    stage, most = max(enumerate(states), key=lambda item: item[1].total)
    where = f" on stage {stage}" if len({state.total for state in states}) > 1 else ""
    parts = {"weights": most.weights, "gradients": most.gradients, names: most.optimizer}
    text = " + ".join(f"{show_bytes(size)} {name}" for name, size in parts.items() if size)
    rest = "activations" if kept is not None else f"what {names} keeps, and activations"
    return f"memory of a rank: {show_bytes(most.total)}{where} ({text or 'all of it is offloaded'}), and {rest}"


def step_line(layout: Layout, accumulate: int, batch: int | None, pieces: int | None = None) -> str:
    """The samples of one optimizer step; `batch` is the loader's batch size, `pieces` the microbatches of the first."""
    parts = [_count(layout.data_parallel_size, "data rank"), f"batch {batch}" if batch else "the loader's batch"]
    if accumulate > 1:
        parts.append(f"{accumulate} batches accumulated")
    text = " x ".join(parts)
    if batch:
        text += f" = {layout.data_parallel_size * batch * accumulate:,} samples"
    return f"one optimizer step: {text}{_microbatches(layout, batch, pieces)}"


def draw(layout: Layout, split: PipelineSplit | None = None) -> Iterator[str]:
    """The ranks as a table: a row for each pipeline rank with its blocks, a box of tensor ranks for each data rank."""
    columns = _shown(layout.data_parallel_size)
    boxes = [[_box(layout, stage, data) for data in columns] for stage in range(layout.sizes[PIPELINE_AXIS])]
    labels = [f"stage {stage}" if layout.pipelined else "ranks" for stage in range(len(boxes))]
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
    together = layout.peers // layout.sizes[PIPELINE_AXIS]
    peers = layout.peers_of(data)[stage * together :]
    ranks = ["..." if index is None else str(peers[index]) for index in _shown(together)]
    return f"[{' '.join(ranks)}]"


def _shown(size: int) -> list[int | None]:
    return list(range(size)) if size <= WIDE else [0, 1, None, size - 1]


def _blocks(layout: Layout, split: PipelineSplit | None, rank: int) -> str:
    """The blocks of a pipeline rank, in several pieces with virtual stages."""
    if split is None:
        return ""
    lines = split.describe().splitlines()
    own = split.stages_on(rank, layout.sizes[PIPELINE_AXIS], layout.schedule)
    return ", ".join(lines[stage].partition(": ")[2] for stage in own)


def _unsplit(module: nn.Module, tensor: TensorPlan) -> str:
    """The bytes that every tensor rank has in full. Names the largest parameters, equal ones of all blocks together."""
    sizes = {name: item.numel() * item.element_size() for name, item in module.named_parameters()}
    kinds: dict[str, int] = {}
    for name in sizes.keys() - tensor.splits.keys():
        kind = re.sub(r"\d+", "*", name)
        kinds[kind] = kinds.get(kind, 0) + sizes[name]
    kept, total = sum(kinds.values()), sum(sizes.values())
    text = f"{show_bytes(kept)} of {show_bytes(total)} ({kept / max(total, 1):.0%}) not split"
    if kept < SMALL * total:
        return text
    largest = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:3]
    return f"{text}: {', '.join(f'{show_bytes(size)} {kind}' for kind, size in largest)}{' ...' * (len(kinds) > 3)}"


def _microbatches(layout: Layout, batch: int | None, pieces: int | None) -> str:
    stages = layout.sizes[PIPELINE_AXIS]
    if stages == 1:
        return ""
    count = pieces or layout.num_microbatches
    if count == "auto" and batch:
        count = auto_microbatches(batch, stages)
    if count == "auto":
        return f"; the pipeline cuts a batch into microbatches ({layout.schedule})"
    chunks = stages_per_rank(layout.schedule, layout.stages_per_rank)
    idle = bubble_share(layout.schedule, stages=stages, microbatches=count, chunks=chunks)
    cut = "leaves a batch whole" if count == 1 else f"cuts a batch into {_count(count, 'microbatch')}"
    return f"; the pipeline {cut} ({layout.schedule}, idle {idle:.0%} of the time)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"
