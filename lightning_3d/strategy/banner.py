"""The text at the start of training: the ranks and their blocks, unsplit parameters, memory, one optimizer step.

The bytes of a rank are counted from the module's own parameters, before anything is placed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from lightning_3d.layout import Coordinate, Layout
from lightning_3d.optim.moments import moments
from lightning_3d.pipeline.microbatch import auto_microbatches
from lightning_3d.pipeline.schedule import stage_ranks, stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.planner.bubble import bubble_share
from lightning_3d.planner.memory import offloaded
from lightning_3d.planner.show import show_bytes
from lightning_3d.planner.states import StateBytes, sharded_states
from lightning_3d.tensor.tensor_plan import TensorPlan

WIDE = 4
"""Data ranks, and tensor ranks of each, that are drawn one by one. Of more, only the first and last are drawn."""
SMALL = 0.02
"""Share of the module's bytes below which parameters that tensor ranks do not split are not named."""


def opening(
    module: nn.Module, layout: Layout, split: PipelineSplit | None, tensor: TensorPlan | None, loss: str = ""
) -> str:
    """A few lines about the placement of `module`."""
    lines = [f"Strategy3D on {_count(layout.world_size, 'rank')}: {layout}", *draw(layout, split)]
    if tensor is not None:
        lines.append(f"  tensor: {len(tensor.splits)} parameters split, {_unsplit(module, tensor)}")
    if loss:
        lines.append(loss)
    return "\n".join(lines)


def memory_line(expected: Sequence[StateBytes], optimizers: Sequence[Optimizer]) -> str:
    """The memory of the fullest rank once `optimizers` have stepped; `expected` comes from `expected_states`."""
    kept = moments(optimizers)
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    states = with_states(expected, kept or 0.0)
    stage, most = max(enumerate(states), key=lambda item: item[1].total)
    where = f" on stage {stage}" if len({state.total for state in states}) > 1 else ""
    parts = {"weights": most.weights, "gradients": most.gradients, names: most.optimizer}
    text = " + ".join(f"{show_bytes(size)} {name}" for name, size in parts.items() if size)
    rest = "activations" if kept is not None else f"what {names} keeps, and activations"
    return f"memory of a rank: {show_bytes(most.total)}{where} ({text or 'all of it is in host memory'}), and {rest}"


def step_line(layout: Layout, accumulate: int, batch: int | None) -> str:
    """The samples of one optimizer step; `batch` is the loader's batch size, where it has one."""
    parts = [_count(layout.data_parallel_size, "data rank"), f"batch {batch}" if batch else "the loader's batch"]
    if accumulate > 1:
        parts.append(f"{accumulate} batches accumulated")
    text = " x ".join(parts)
    if batch:
        text += f" = {layout.data_parallel_size * batch * accumulate:,} samples"
    return f"one optimizer step: {text}{_microbatches(layout, batch)}"


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
    """The blocks of a pipeline rank, in several pieces with virtual stages."""
    if split is None:
        return ""
    size = layout.pipeline_parallel_size
    holder = stage_ranks(layout.schedule, size, split.num_stages // size)
    lines = split.describe().splitlines()
    return ", ".join(lines[stage].partition(": ")[2] for stage, at in enumerate(holder) if at == rank)


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


def _microbatches(layout: Layout, batch: int | None) -> str:
    stages = layout.pipeline_parallel_size
    if stages == 1:
        return ""
    count = layout.num_microbatches
    if count == "auto" and batch:
        count = auto_microbatches(batch, stages)
    if count == "auto":
        return f"; the pipeline cuts a batch into microbatches ({layout.schedule})"
    chunks = stages_per_rank(layout.schedule, layout.stages_per_rank)
    idle = bubble_share(layout.schedule, stages=stages, microbatches=count, chunks=chunks, joined=True)
    cut = f"; the pipeline cuts a batch into {_count(count, 'microbatch')} ({layout.schedule}"
    return f"{cut}, idle {idle:.0%} of the time)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def elements_on_stages(
    module: nn.Module, stages: frozenset[int], split: PipelineSplit | None, tensor: TensorPlan | None
) -> dict[nn.Parameter, int]:
    """Elements on the first tensor rank of each parameter that is on one of `stages`."""
    elements: dict[nn.Parameter, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners = _owners(name, split)
        if owners is None or stages & set(owners):
            cut = tensor.splits.get(name) if tensor else None
            size = parameter.numel()
            elements[parameter] = size if cut is None else size // cut.size * cut.local_size(0)
    return elements


def parameters_on(module: nn.Module, stage: int, split: PipelineSplit | None, tensor: TensorPlan | None) -> int:
    """Number of parameters on the first tensor rank of a stage. Parameters of several stages count on each."""
    return sum(elements_on_stages(module, frozenset([stage]), split, tensor).values())


def stages_of(layout: Layout, split: PipelineSplit | None, pipeline_rank: int) -> frozenset[int]:
    """The stages on a pipeline rank."""
    if split is None:
        return frozenset([0])
    size = layout.pipeline_parallel_size
    ranks = stage_ranks(layout.schedule, size, split.num_stages // size)
    return frozenset(stage for stage, rank in enumerate(ranks) if rank == pipeline_rank)


def expected_states(
    module: nn.Module, layout: Layout, split: PipelineSplit | None, tensor: TensorPlan | None
) -> list[StateBytes]:
    """Bytes of weights, gradients and one optimizer state on a rank of each pipeline rank, by the ZeRO table.

    `with_states` turns one optimizer state into those of an optimizer. Under a pipeline, weights are gathered and
    gradients reduced once per step, so ZeRO stages 2 and 3 need as much memory as stage 1.
    """
    stage = 3 if layout.offload == "all" else layout.zero_stage
    stage = min(layout.zero_stage, 1) if layout.pipeline_parallel_size > 1 else stage
    ranks = layout.zero_shard_size or layout.data_parallel_size
    expected = []
    for pipeline_rank in range(layout.pipeline_parallel_size):
        elements = elements_on_stages(module, stages_of(layout, split, pipeline_rank), split, tensor)
        weights = sum(size * parameter.element_size() for parameter, size in elements.items())
        trained = sum(
            size * parameter.element_size() for parameter, size in elements.items() if parameter.requires_grad
        )
        full = StateBytes(weights=weights, gradients=trained, optimizer=trained)
        expected.append(offloaded(sharded_states(full, 1, stage=stage, ranks=ranks), layout)[0])
    return expected


def with_states(expected: Sequence[StateBytes], moments: float) -> list[StateBytes]:
    """`expected` with `moments` states of a parameter's size: Adam keeps 2, SGD without momentum none."""
    return [replace(each, optimizer=moments * each.optimizer) for each in expected]


def _owners(name: str, split: PipelineSplit | None) -> tuple[int, ...] | None:
    """Stages that own a parameter, None for all."""
    if split is None or name in split.everywhere:
        return None
    for unit, stages in split.holders.items():
        if name == unit or name.startswith(f"{unit}."):
            return stages
    return None
