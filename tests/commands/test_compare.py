"""The table and the picture that `lightning-3d compare` makes of a sweep."""

import json

import pytest

from lightning_3d.cli import main
from lightning_3d.tools.commands.compare import JobReport, compared, read_jobs, sweep_curves, sweep_pictures

LAYOUT = {"data_parallel_size": 2, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 1}


def job(folder, name, overrides, **report):
    home = folder / name
    home.mkdir(parents=True)
    if overrides:
        (home / ".hydra").mkdir()
        (home / ".hydra" / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))
    if report:
        layout = {**LAYOUT, "said": "data 2 x tensor 1 x pipeline 1, ZeRO 1"}
        said = {"layout": layout, "devices": 2, "device": "NVIDIA A100-SXM4-80GB", "seconds": 1800.0, **report}
        (home / "lightning_3d.json").write_text(json.dumps(said))


@pytest.fixture
def sweep(tmp_path):
    job(
        tmp_path, "0", ["lr=1", "layout=a"], step_seconds=0.25, memory_bytes=2e9, steps=100, step_samples=16,
        metrics={"loss": 3.5, "val_loss": 4.0},
    )  # fmt: skip
    job(tmp_path, "1", ["lr=1", "layout=b"])
    job(tmp_path, "10", ["lr=1", "layout=c"], step_seconds=None, memory_bytes=1e9, metrics={"acc": 0.5})
    job(tmp_path, "2", ["lr=1", "layout=d"], step_seconds=0.5, memory_bytes=1e9, metrics={"loss": 3.25})
    return tmp_path


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_each_job_has_a_line_in_the_order_of_the_sweep(sweep, capsys):
    assert main(["compare", str(sweep), "--price", "2"]) == 0
    header, first, failed, third, last, why = rows(capsys.readouterr().out)
    more = ["samples", "steps", "samples/s", "memory", "device-hours", "cost", "overrides"]
    assert header == ["job", "layout", "devices", "loss", "step", *more]
    said = ["data", "2", "x", "tensor", "1", "x", "pipeline", "1,", "ZeRO", "1"]
    assert first == ["0", *said, "2", "4", "250", "ms", "16", "100", "64", "2", "GB", "1", "$2.00", "layout=a"]
    assert failed[:4] == ["1", "did", "not", "finish"]
    assert why[:5] == ["job", "1", "did", "not", "finish:"]
    assert third[0] == "2"
    assert "3.25" in third
    assert last == ["10", *said, "2", "-", "-", "-", "-", "-", "1", "GB", "1", "$2.00", "layout=c"]


def test_layouts_that_trained_on_other_batches_are_warned_of(tmp_path, capsys):
    for name, samples in (("0", 16), ("1", 32)):
        job(
            tmp_path, name, [f"layout={name}"], step_seconds=0.25, memory_bytes=2e9, steps=9, step_samples=samples,
            metrics={"loss": 3.5},
        )  # fmt: skip
    assert main(["compare", str(tmp_path)]) == 0
    assert "trained on batches of 16, 32 samples a step" in capsys.readouterr().out
    assert sweep_pictures(read_jobs(tmp_path), None)[0].labels == ("0: layout=0", "1: layout=1")


def test_a_job_whose_overrides_cannot_be_read_does_not_refuse_the_others(sweep, capsys):
    (sweep / "1" / ".hydra" / "overrides.yaml").write_text("a: {b")
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "job 1 did not finish: no list of overrides" in out
    assert len(out.splitlines()) == 6


def test_a_metric_of_the_user_and_the_price_of_the_catalogue(sweep):
    text = compared(read_jobs(sweep), metric="acc")
    assert "acc" in text.splitlines()[0]
    assert "0.5" in rows(text)[4]
    assert all(row[-2].startswith("$") for row in rows(text)[1:] if "finish" not in row)
    with pytest.raises(ValueError, match="no job logged 'nope': there is acc, loss, val_loss"):
        compared(read_jobs(sweep), metric="nope")


def test_a_picture_is_drawn(sweep, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["compare", str(sweep), "--plot", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_jobs_that_keep_no_overrides_are_found_by_their_reports(tmp_path):
    job(tmp_path, "here", [], step_seconds=0.25, memory_bytes=2e9, metrics={"loss": 3.5})
    assert [job.name for job in read_jobs(tmp_path)] == ["here"]


def test_several_folders_are_in_one_table(tmp_path, capsys):
    for folder, step in (("outputs/few", 0.5), ("outputs/many", 0.25)):
        job(
            tmp_path,
            folder,
            ["lr=1", f"devices={folder[-1]}"],
            step_seconds=step,
            memory_bytes=2e9,
            metrics={"loss": 3.5},
        )
    job(tmp_path, "multirun/7", ["lr=1"], step_seconds=1.0, memory_bytes=2e9, metrics={"loss": 3.5})
    folders = [str(tmp_path / name) for name in ("outputs/many", "outputs/few", "multirun", "multirun/7")]
    assert main(["compare", *folders]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["job", "outputs/many", "outputs/few", "multirun/7"]
    assert main(["compare", *folders[:2]]) == 0
    assert [(row[0], row[-1]) for row in rows(capsys.readouterr().out)[1:]] == [
        ("many", "devices=y"),
        ("few", "devices=w"),
    ]


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"train_loss": 1.0, "val_loss": 2.0}, 2.0),
        ({"loss_step": 1.0, "loss_epoch": 2.0}, 2.0),
        ({"accuracy": 1.0}, None),
        ({"loss_step": 1.0}, 1.0),
    ],
)
def test_what_is_taken_for_the_loss(metrics, found):
    assert JobReport(name="0", overrides=(), report={"metrics": metrics}).metric(None) == found


def test_folders_without_jobs_are_one_line(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["compare", str(tmp_path)]) == 2
    assert "has no job of a Hydra sweep" in capsys.readouterr().err
    job(tmp_path, "0", ["lr=1"])
    assert main(["compare", str(tmp_path)]) == 2
    assert "Strategy3D writes it when `fit` ends" in capsys.readouterr().err


def test_a_page_has_a_table_and_the_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, batch, seconds in (("0", 8, 0.25), ("1", 16, 0.5)):
        job(tmp_path, name, [f"batch={batch}", "lr=1"], step_seconds=seconds, memory_bytes=2e9, metrics={"loss": 3.5})
    job(tmp_path, "2", ["batch=<script>"])
    (tmp_path / "2" / "lightning_3d_failed.json").write_text(json.dumps({"reason": "<script>alert(1)</script>"}))
    file = tmp_path / "page.html"
    assert main(["compare", str(tmp_path), "--price", "2", "--html", str(file)]) == 0
    text = file.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text
    assert 'data-key="0.25"' in text
    jobs = read_jobs(tmp_path)
    shown = {each.title: each for each in (*sweep_pictures(jobs, None), *sweep_curves(jobs, 2.0))}
    assert all(f'alt="{title}"' in text for title in shown)
    assert "Cost against lr" not in shown
    assert [point.x for point in shown["Time against batch"].curves["jobs"]] == [8.0, 16.0]
    assert shown["Memory of the fullest rank"].limit == 80
    [price, _] = shown["Cost against the price of a device"].curves.values()
    assert price[2] == (2.0, 2.0, "")


def test_a_loss_that_is_no_number_has_no_point(tmp_path):
    job(tmp_path, "0", ["a=1"], step_seconds=0.25, memory_bytes=2e9, metrics={"loss": float("nan")})
    job(tmp_path, "1", ["a=1e999"], step_seconds=None, memory_bytes=2e9, metrics={"loss": 3.0})
    assert sweep_pictures(read_jobs(tmp_path), None)[0].parts == {"loss": (None, 3.0)}
