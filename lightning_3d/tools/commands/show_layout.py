"""Show which rank has which blocks, shards and bytes, in the best layout for a question of `lightning-3d plan`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_3d.errors import printable
from lightning_3d.tools.commands.plan import question_flags
from lightning_3d.tools.pictures.drawing import save_png
from lightning_3d.tools.pictures.layout_pictures import HEADER, layout_pictures, layout_rows
from lightning_3d.tools.pictures.page import Table, Words, save_page
from lightning_3d.tools.planner.answers import answer, refuse_ignored
from lightning_3d.tools.planner.plan_report import job_lines, strategy_block, table

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
