"""Draw the timetable of a pipeline that a run has recorded beside the ideal one of the same work."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_3d.errors import ConfigurationError, printable
from lightning_3d.monitor.pass_record import find_record, read_record
from lightning_3d.tools.pictures.drawing import save_png
from lightning_3d.tools.pictures.page import Part, Table, save_page
from lightning_3d.tools.pictures.timeline_pictures import HEADER, timelines
from lightning_3d.tools.planner.plan_report import table

EXAMPLE = """\
examples:
  lightning-3d timeline lightning_logs/version_0
  lightning-3d timeline lightning_logs/version_0 --plot timeline.png --html timeline.html

RUN is the folder of a run in stages with the callback Monitor3D(timetable_steps=3), or the file that it writes.
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a recorded file")
    parser.add_argument("--step", type=int, default=-1, metavar="N", help="recorded batch (default: the last)")
    parser.add_argument("--plot", metavar="FILE", help="draw both timetables as PNG")
    parser.add_argument("--html", metavar="FILE", help="the same on a page")


def run(args: Namespace) -> int:
    record = read_record(find_record(Path(args.run)))
    numbers = [step.number for step in record.steps]
    if args.step != -1 and args.step not in numbers:
        raise ConfigurationError(f"--step {args.step} is not recorded: give one of {', '.join(map(str, numbers))}.")
    step = record.steps[-1 if args.step == -1 else numbers.index(args.step)]
    both = timelines(
        record.schedule,
        ranks=record.ranks,
        chunks=record.stages_per_rank,
        microbatches=step.microbatches,
        recorded=step.passes,
        name=f"Batch {step.number}: {step.order}, {record.ranks} ranks, {step.microbatches} microbatches",
    )
    rows = both.rows()
    listing = table(HEADER, [[cell.text for cell in row] for row in rows])
    print(printable("\n".join([*both.lines(), "", listing])))
    if args.plot is not None:
        print(printable(f"wrote {save_png(Path(args.plot), both.pictures())}"))
    if args.html is not None:
        parts: list[Part] = [*both.pictures(), Table(title="Idle time", header=HEADER, rows=tuple(rows))]
        print(printable(f"wrote {save_page(Path(args.html), 'Timetable of a pipeline', parts)}"))
    return 0
