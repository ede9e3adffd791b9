"""Show which rank has which blocks, shards and bytes, in the best layout for a question of `lightning-3d plan`."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_3d.errors import printable
from lightning_3d.layout import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, short_name
from lightning_3d.module.amounts import show_bytes
from lightning_3d.tools.commands.plan import question_flags
from lightning_3d.tools.pictures.drawing import save_png
from lightning_3d.tools.pictures.kinds import Bars, Cell, Cells
from lightning_3d.tools.pictures.page import Table, TableCell, Words, save_page
from lightning_3d.tools.pictures.plan_pictures import GB, bars_of_memory, sizes_name
from lightning_3d.tools.planner.answers import answer, refuse_ignored
from lightning_3d.tools.planner.memory import PlannedMemory, layers_by_stage
from lightning_3d.tools.planner.plan_report import job_lines, strategy_block, table
from lightning_3d.tools.planner.priced_layout import Plan, stages_memory

MOST_ROWS = 64
"""Nodes that have rows of their own. Of more, a row is a pipeline rank."""
MOST_COLUMNS = 16
"""Ranks in a row of the picture."""
SIZES = ("weights", "gradients", "optimizer", "activations")
HEADER = ("ranks", "node", "place", "blocks", *SIZES, "rest", "total")
"""The rest are head, casts, buffers and what is reserved."""


class StageContent(NamedTuple):
    """The part of the model that each rank of one pipeline rank shares, and the bytes of each of them."""

    blocks: str
    memory: PlannedMemory


def contents(plan: Plan) -> list[StageContent]:
    stages = range(plan.layout.sizes[PIPELINE_AXIS])
    memory = stages_memory(
        plan.job, plan.cluster, plan.layout, stages, micro=plan.micro, microbatches=plan.microbatches
    )
    return [StageContent(_blocks(plan, stage), each) for stage, each in zip(stages, memory, strict=True)]


def layout_rows(plan: Plan) -> list[tuple[TableCell, ...]]:
    """Rows of the table below `HEADER`: ranks in a row that have the same blocks and bytes are one row.

    A rank of another node begins another row, so that the table shows which axes cross the border of a node.
    """
    layout, stages, node = plan.layout, contents(plan), plan.cluster.devices_per_node
    together = layout.world_size // layout.sizes[PIPELINE_AXIS]
    step = node if together % node == 0 and layout.world_size <= MOST_ROWS * node else together
    rows: list[tuple[TableCell, ...]] = []
    for first in range(0, layout.world_size, min(step, together)):
        last = min(first + min(step, together), layout.world_size) - 1
        start, end = layout.coordinate(first), layout.coordinate(last)
        content = stages[start[PIPELINE_AXIS]]
        named, total = [getattr(content.memory, name) for name in SIZES], content.memory.total
        nodes = spread(first // node, last // node)
        places = ", ".join(f"{short_name(axis)} {spread(start[axis], end[axis])}" for axis in start)
        words = (TableCell(text) for text in (nodes, places, content.blocks))
        sizes = (TableCell(show_bytes(size), size) for size in (*named, total - sum(named), total))
        rows.append((TableCell(spread(first, last), first), *words, *sizes))
    return rows


def spread(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def layout_pictures(plan: Plan) -> list[Cells | Bars]:
    """Every rank at its place, and the memory of each pipeline rank."""
    stages = contents(plan)
    name = f"{plan.job.profile.name}, {sizes_name(plan.layout)} on {plan.cluster}"
    labels = [f"pipeline {stage}: {content.blocks}" for stage, content in enumerate(stages)]
    return [
        Cells(title=f"Ranks of {name} (d: data, t: tensor)", unit="GB on a rank", rows=dict(_rows(plan, stages))),
        bars_of_memory("Memory of a rank, by pipeline rank", labels, [each.memory for each in stages], plan),
    ]


def _rows(plan: Plan, stages: list[StageContent]) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    """Rows of one pipeline rank: as many data ranks in each as can be read, with all their tensor ranks."""
    layout = plan.layout
    together = max(1, MOST_COLUMNS // layout.tensor_parallel_size)
    for stage, content in enumerate(stages):
        for first in range(0, layout.data_parallel_size, together):
            last = min(first + together, layout.data_parallel_size)
            cells = tuple(
                Cell(
                    content.memory.total / GB,
                    str(layout.rank({PIPELINE_AXIS: stage, DATA_AXIS: data, TENSOR_AXIS: tensor})),
                    f"d{data} t{tensor}",
                )
                for data in range(first, last)
                for tensor in range(layout.tensor_parallel_size)
            )
            part = f", data {first}-{last - 1}" if together < layout.data_parallel_size else ""
            yield f"pipeline {stage}: {content.blocks}{part}", cells


def _blocks(plan: Plan, rank: int) -> str:
    """The blocks of pipeline rank `rank`; `before` and `after` are the parts of the model around all blocks."""
    layout, profile = plan.layout, plan.job.profile
    own, blocks = layout.stages[rank], layers_by_stage(profile.layers, profile.units, layout.num_stages)
    spans = []
    for stage in own:
        first, count = sum(blocks[:stage]), blocks[stage]
        spans.append(f"{first}-{first + count - 1}" if count > 1 else str(first) if count else "none")
    before = ["before"] if 0 in own else []
    after = ["after"] if rank == layout.last_rank else []
    return " + ".join([*before, ", ".join(spans), *after])


EXAMPLE = """\
examples:
  lightning-3d layout llama-7b --cluster 2x8xh100 --tensor 2 --pipeline 4 --zero 1
  lightning-3d layout my_package.model.LitGPT --inputs 8x1024:int64 --cluster 8xh100 --pipeline 2 --plot layout.png
  lightning-3d layout llama-70b --cluster 8x8xh100 --html layout.html

Sizes that are not given are those of the best plan. Bytes are those of the planner, at the peak of a step.
"""


def configure(parser: ArgumentParser) -> None:
    question_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--plot", metavar="FILE", help="draw the ranks and their memory as PNG")
    group.add_argument("--html", metavar="FILE", help="the same on a page")


def run(args: Namespace) -> int:
    refuse_ignored(args)
    plan = answer(Namespace(**vars(args), top=1)).plans[0]
    rows = layout_rows(plan)
    listing = table(HEADER, [[cell.text for cell in row] for row in rows])
    lines = [*job_lines(plan.job), f"{plan.layout} on {plan.cluster}", "", listing]
    print(printable("\n".join(lines)))
    if args.plot is not None:
        print(printable(f"wrote {save_png(Path(args.plot), layout_pictures(plan))}"))
    if args.html is not None:
        about = Words(title="The training", lines=(*job_lines(plan.job), "", *strategy_block(plan)), exact=True)
        listed = Table(title="Ranks (a click on a name sorts)", header=HEADER, rows=tuple(rows))
        title = f"{plan.job.profile.name}: {plan.layout} on {plan.cluster}"
        print(printable(f"wrote {save_page(Path(args.html), title, [about, *layout_pictures(plan), listed])}"))
    return 0
