"""Pictures of plans and layouts show the planner's own numbers."""

from itertools import pairwise

import pytest

from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout
from lightning_3d.pipeline.schedule import actions
from lightning_3d.pipeline.stage_costs import bubble_share
from lightning_3d.tools.commands.show_layout import contents, layout_pictures, layout_rows, spread
from lightning_3d.tools.pictures.plan_pictures import cost_curves, plan_lanes, plan_pictures
from lightning_3d.tools.pictures.timeline_pictures import timetable
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.memory import layers_on_rank
from lightning_3d.tools.planner.priced_layout import price_layout
from tests.planner.closed_forms import idle

pytestmark = pytest.mark.usefixtures("no_user_files")


def plan(devices=64, batch=512, micro=1, model="llama-7b", **sizes):
    cluster = Cluster.of(Catalogue.load().find("h100"), devices)
    job = Job(profile=named_model(model).profile(), samples=1e6, batch=batch)
    return price_layout(job, cluster, Layout(**sizes).fit(devices), micro=micro)


def test_bars_are_the_memory_of_the_fullest_rank():
    plans = [plan(tensor_parallel_size=2), plan(tensor_parallel_size=4, pipeline_parallel_size=4)]
    bars = plan_pictures(plans, None, None)["memory"]
    sums = [sum(sizes) for sizes in zip(*bars.parts.values(), strict=True)]
    assert sums == pytest.approx([each.peak.total / 1e9 for each in plans])
    assert bars.limit == 80
    assert bars.labels[1] == "d4 t4 p4 z1, micro 1, 1f1b"


def test_cost_has_the_deadline_in_days_and_a_point_for_each_number_of_devices():
    curves = cost_curves([plan(devices=8, model="gpt2")], deadline=3 * 86400.0, budget=1e5)
    assert curves.deadline == (3.0, "deadline")
    assert curves.budget == (1e5, "budget")
    points = curves.curves["h100"]
    assert [point.label for point in points] == ["2", "4", "8", "16", "32"]
    assert all(left.x > right.x for left, right in pairwise(points))
    short = cost_curves([plan(devices=8, model="gpt2")], deadline=36000.0)
    assert short.deadline == (10.0, "deadline")
    assert short.x.startswith("hours")
    assert [point.x for point in short.curves["h100"]] == pytest.approx([24 * point.x for point in points])


@pytest.mark.parametrize(
    ("stages", "microbatches", "drawn"), [(4, 128, "4 ranks and 16"), (64, 512, "64 ranks and 64")]
)
def test_the_idle_share_of_a_timetable_is_that_of_the_step_and_not_of_the_excerpt(stages, microbatches, drawn):
    given = plan(64, batch=microbatches * (64 // stages), pipeline_parallel_size=stages, model="llama-70b")
    lanes = plan_lanes(given)
    share = float(lanes.title.partition("idles ")[2].partition("%")[0]) / 100
    assert share == pytest.approx(bubble_share("1f1b", stages=stages, microbatches=microbatches), abs=6e-4)
    assert f"(drawn with {drawn} microbatches)" in lanes.title
    assert lanes.lanes == stages


def test_a_short_timetable_is_drawn_in_full():
    lanes = plan_lanes(plan(4, batch=8, pipeline_parallel_size=4))
    assert "drawn" not in lanes.title
    assert len(lanes.spans) == 4 * 8 * 2


LAYOUTS = [
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "zero_stage": 3},
    {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 4},
    {"tensor_parallel_size": 8},
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_rank_has_its_place_blocks_and_the_bytes_of_the_planner(sizes):
    given = plan(16, **sizes)
    rows, layout = layout_rows(given), given.layout
    together = [numbers(row[0].text) for row in rows]
    assert [rank for own in together for rank in own] == list(range(16))
    for own, row in zip(together, rows, strict=True):
        nodes, places = {rank // 8 for rank in own}, [layout.coordinate(rank) for rank in own]
        assert numbers(row[1].text) == sorted(nodes)
        assert len({place["pipeline_parallel"] for place in places}) == len(nodes) == 1
        assert f"data {spread(places[0].data, places[-1].data)}" in row[2].text
    stages = contents(given)
    assert [stages[0].memory, stages[-1].memory][: len(given.memory)] == list(given.memory)
    blocks = [block for stage in stages for block in numbers(stage.blocks)]
    assert sorted(blocks) == list(range(32))
    own = [len(numbers(stage.blocks)) for stage in stages]
    assert own == [layers_on_rank(given.job.profile, layout, stage) for stage in range(layout.pipeline_parallel_size)]
    assert stages[0].blocks.startswith("before + 0-")
    assert stages[-1].blocks.endswith("-31 + after")


def numbers(blocks):
    spans = [part for part in blocks.replace(" + ", ", ").split(", ") if part[0].isdigit()]
    ends = [(int(span.partition("-")[0]), int(span.rpartition("-")[2])) for span in spans]
    return [number for first, last in ends for number in range(first, last + 1)]


def test_the_picture_of_a_layout_has_every_rank_once_in_rows_that_can_be_read():
    cells, bars = layout_pictures(plan(64, tensor_parallel_size=2, pipeline_parallel_size=2))
    assert sorted(int(cell.name) for row in cells.rows.values() for cell in row) == list(range(64))
    assert all(len(row) <= 16 for row in cells.rows.values())
    assert next(iter(cells.rows)) == "pipeline 0: before + 0-15, data 0-7"
    assert len(bars.labels) == 2


def test_ranks_are_together_up_to_the_border_of_a_node_and_many_by_pipeline_rank():
    rows = layout_rows(plan(256, tensor_parallel_size=8, pipeline_parallel_size=4))
    assert [row[0].text for row in rows][:3] == ["0-7", "8-15", "16-23"]
    for row in rows:  # a click sorts by the bytes, and these add up
        assert sum(cell.key for cell in row[4:-1]) == pytest.approx(row[-1].key)
    many = layout_rows(plan(1024, batch=1024, tensor_parallel_size=8, pipeline_parallel_size=4))
    assert [(row[0].text, row[1].text) for row in many][:2] == [("0-255", "0-31"), ("256-511", "32-63")]


def test_the_layout_command_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--tensor", "2", "--pipeline", "2", "--plot", str(tmp_path / "l.png"), "--html", str(tmp_path / "l.html")]
    assert main(["layout", "gpt2", "--cluster", "4xh100", *flags]) == 0
    out = capsys.readouterr().out
    assert "pipeline 1, data 0, tensor 0-1" in out
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert "pipeline 1, data 0, tensor 0-1" in (tmp_path / "l.html").read_text()


def test_the_first_rank_of_a_v_shaped_schedule_has_both_ends_of_the_model_and_a_tied_head_once(capsys):
    flags = ["--tensor", "1", "--pipeline", "2", "--schedule", "zbv_zero_bubble", "--micro", "4", "--batch", "64"]
    assert main(["layout", "gpt2", "--cluster", "2xh100", *flags]) == 0
    out = capsys.readouterr().out
    assert "before + 0-2, 9-11 + after" in out
    weights = [line.partition(" MB")[0].split()[-1] for line in out.splitlines() if ", data 0, tensor 0" in line]
    assert weights == ["328", "170"]  # megabytes: 38.6M words and 0.79M places more


def test_a_page_has_the_layouts_and_what_other_numbers_do(capsys, tmp_path, monkeypatch):
    file, parts = tmp_path / "plan.html", []
    monkeypatch.setattr(
        f"{cost_curves.__module__}.save_page", lambda file, title, shown: (parts.extend(shown), file)[1]
    )
    assert main(["plan", "gpt2", "--tokens", "10B", "--cluster", "h100", "--micro", "8", "--html", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().out
    shown = {part.title: part for part in parts}
    for title in ("samples in a batch", "tokens in a sample"):
        assert {f"Cost against {title}", f"Time against {title}"} <= shown.keys()
    [curve] = shown["Cost against $ for an hour of a device"].curves.values()
    assert curve[4].y == pytest.approx(16 * curve[0].y)
    [batch] = shown["Cost against samples in a batch"].curves.values()
    assert [point.x / batch[2].x for point in batch] == [0.25, 0.5, 1, 2, 4]


def test_a_timetable_can_have_the_order_of_a_run():
    fill_and_drain = actions("fill_and_drain", "1f1b", 2, 1, 4)
    passes = timetable("1f1b", stages=2, microbatches=4, orders=fill_and_drain)
    assert [done.kind for done in passes if done.rank == 1] == ["F"] * 4 + ["B"] * 4
    assert idle(passes) == idle(timetable("gpipe", stages=2, microbatches=4))
    with pytest.raises(PlannerError, match="wait for each other in a circle"):
        timetable("1f1b", stages=2, microbatches=4, orders=[order[::-1] for order in fill_and_drain])
