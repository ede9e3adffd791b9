"""The recorded timetable of a pipeline: every pass once, in the order and on the ranks of the schedule, on one clock."""

import json
import time
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Monitor3D, Strategy3D
from lightning_3d.cli import main
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import PassTimes
from lightning_3d.monitor import pass_record
from lightning_3d.monitor.pass_record import FILE, PassRecord, RecordedStep, read_record, write_record
from lightning_3d.pipeline.pass_clock import Pass, PassClock
from lightning_3d.tools.pictures.timeline_pictures import timelines, timetable
from tests.monitor.test_monitor import Net
from tests.parity import QUIET, make_trainer
from tests.workers import run

SLOW = 0.03


class SlowNet(Net):
    """The second half of its blocks, which is stage 1, sleeps in forward."""

    def on_fit_start(self):
        for block in list(self.blocks)[2:]:
            block.register_forward_pre_hook(lambda *_: time.sleep(SLOW / 2))


class Watching(Callback):
    """Notes in which batches passes are timed."""

    def __init__(self):
        self.on = []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.on.append(trainer.strategy.pipeline.clock is not None)


def fit(folder, steps, strategy, max_steps=4, slow=True):
    trainer = Trainer(
        **QUIET, devices=2, max_steps=max_steps, limit_val_batches=0, default_root_dir=folder,
        callbacks=[Monitor3D(timetable_steps=steps), watching := Watching()],
        strategy=Strategy3D(pipeline_parallel_size=2, zero_stage=0, timeout=60, **strategy),
    )  # fmt: skip
    trainer.fit(SlowNet() if slow else Net())
    return watching.on


@pytest.mark.parametrize(("steps", "max_steps", "numbers"), [(1, 4, [2]), (9, 4, [2, 3])])
def test_a_run_records_its_passes(tmp_path, steps, max_steps, numbers):
    timed = run(fit, str(tmp_path), steps, {"num_microbatches": 4, "loss_scope": "microbatch"}, max_steps, world=2)
    assert timed == [[number in numbers for number in range(max_steps)]] * 2
    record = read_record(tmp_path / FILE)
    assert (record.schedule, record.ranks, record.stages_per_rank) == ("1f1b", 2, 1)
    assert [step.number for step in record.steps] == numbers
    for step in record.steps:
        ideal = timetable("1f1b", stages=2, microbatches=4)
        for rank in range(2):
            own = sorted(done for done in step.passes if done.rank == rank)
            assert [done[3:] for done in own] == [done[3:] for done in ideal if done.rank == rank]
            assert all(left.end <= right.start for left, right in pairwise(own))
        ends = {done[3:]: done for done in step.passes}
        for index in range(4):  # on one clock: a pass begins after the one that it waits for
            assert ends[1, index, "F"].start >= ends[0, index, "F"].end
            assert ends[0, index, "B"].start >= ends[1, index, "B"].end
        lengths = [done.end - done.start for done in step.passes if done.kind == "F" and done.stage == 1]
        assert min(lengths) >= SLOW  # the work, and not the wait for it


def test_a_head_on_the_full_batch_is_a_pass_of_its_own(tmp_path):
    run(fit, str(tmp_path), 1, {"num_microbatches": 2, "loss_scope": "batch"}, 3, False, world=2)
    [step] = read_record(tmp_path / FILE).steps
    assert step.order == "fill_and_drain"
    last = [done.kind for done in sorted(step.passes) if done.rank == 1]
    assert last == ["F", "F", "H", "B", "B"]


def test_a_record_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.warns(UserWarning, match=f"{FILE} cannot be written .*The run goes on without it"):
        write_record(PassRecord(schedule="1f1b", ranks=2, stages_per_rank=1, steps=()), tmp_path / FILE)


def unstaged(folder):
    trainer = make_trainer(
        1, {}, max_steps=1, limit_val_batches=0, default_root_dir=folder, callbacks=[Monitor3D(timetable_steps=1)]
    )
    with pytest.raises(ConfigurationError, match="nothing is cut into stages here"):
        trainer.fit(Net())


def test_without_stages_there_is_nothing_to_record(tmp_path):
    run(unstaged, str(tmp_path), world=1)
    with pytest.raises(ConfigurationError, match="timetable_steps=-1 is no number of batches"):
        Monitor3D(timetable_steps=-1)


def recorded(folder, ranks=2, microbatches=4, schedule="1f1b", factor=1.5):
    """A record in `folder`: the ideal timetable, in which every pass begins late."""
    folder.mkdir(parents=True, exist_ok=True)
    times = PassTimes(forward=0.001, backward_input=0.001, backward_weight=0.001)
    ideal = timetable(schedule, stages=ranks, microbatches=microbatches, times=times)
    passes = [Pass(done.start * factor, done.start * factor + done.end - done.start, *done[2:]) for done in ideal]
    chunks = len({done.stage for done in ideal}) // ranks
    step = RecordedStep(number=2, order=schedule, microbatches=microbatches, passes=tuple(passes))
    record = PassRecord(schedule=schedule, ranks=ranks, stages_per_rank=chunks, steps=(step,))
    write_record(record, folder / FILE)
    return record


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv_zero_bubble", "dualpipev"])
def test_the_ideal_beside_an_ideal_record_is_the_same(tmp_path, schedule):
    record = recorded(tmp_path, schedule=schedule, factor=1.0)
    [step] = read_record(tmp_path / FILE).steps
    assert [done[2:] for done in step.passes] == [done[2:] for done in record.steps[0].passes]
    both = timelines(schedule, ranks=2, chunks=record.stages_per_rank, microbatches=4, recorded=step.passes, name="n")
    assert [done[2:] for done in both.ideal] == [done[2:] for done in step.passes]
    assert [t for done in both.ideal for t in done[:2]] == pytest.approx(
        [t for d in step.passes for t in d[:2]], abs=1e-6
    )


def test_the_command_prints_idle_shares_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    recorded(tmp_path / "run" / "version_0")
    drawn = ["--plot", str(tmp_path / "t.png"), "--html", str(tmp_path / "t.html")]
    assert main(["timeline", str(tmp_path / "run"), *drawn]) == 0
    lines = capsys.readouterr().out.splitlines()
    # (m + p - 1) passes of 3 ms are 15 ms; the last of them began at 13 ms, and now at 19.5
    assert lines[0] == "Batch 2: 1f1b, 2 ranks, 4 microbatches, recorded: 21.5 ms, idle 44.2%"
    assert lines[1] == "Ideal (the same work in equal passes, no messages): 15 ms, idle 20.0%"
    assert lines[4].split() == ["0", "12", "ms", "9.5", "ms", "44.2%", "20.0%"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "t.html").read_text().count("<img") == 2
    assert main(["timeline", str(tmp_path / "run"), "--step", "7"]) == 2
    assert "--step 7 is not recorded: give one of 2" in capsys.readouterr().err


def test_folders_without_a_record_or_with_several_are_one_line(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 2
    assert "Monitor3D(timetable_steps=3)" in capsys.readouterr().err
    for name in ("a", "b"):
        recorded(tmp_path / name)
    assert main(["timeline", str(tmp_path)]) == 2
    assert "has 2 records: give one of" in capsys.readouterr().err


def changed(**values):
    return lambda record: record.update(values)


def changed_step(**values):
    return lambda record: record["steps"][0].update(values)


def changed_pass(at, value):
    def change(record):
        record["steps"][0]["passes"][0][at] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(ranks=10**6), changed(ranks=-1), changed(ranks=True), changed(stages_per_rank=10**5), changed(steps=[]),
        changed(schedule="<script>"), changed(schedule=["1f1b"]), changed(schedule="gpipe", stages_per_rank=2),
        changed(steps=7), changed(steps=[{}]), changed_step(microbatches=10**6), changed_step(microbatches=3),
        changed_step(order="__import__"), changed_step(passes={}), changed_step(passes=[[0, 1, 0, 0, 0, "F"]] * 16),
        changed_step(number="\x1b[2J"), changed_pass(0, float("nan")), changed_pass(1, 10**400),
        changed_pass(1, float("inf")), changed_pass(0, -1), changed_pass(2, 1), changed_pass(3, -1), changed_pass(3, 9),
        changed_pass(4, "0"), changed_pass(5, "X"), changed_pass(5, ["F"]), changed_pass(4, 99),
        lambda record: record.pop("ranks"), lambda record: record["steps"][0]["passes"][0].append(1),
    ],
)  # fmt: skip
def test_a_record_is_data_and_each_value_is_checked(tmp_path, capsys, change):
    recorded(tmp_path)
    record = json.loads((tmp_path / FILE).read_text())
    change(record)
    (tmp_path / FILE).write_text(json.dumps(record))
    started = time.monotonic()
    assert main(["timeline", str(tmp_path)]) == 2
    assert time.monotonic() - started < 5
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err


def test_passes_that_wait_for_each_other_in_a_circle_are_refused(tmp_path, capsys):
    recorded(tmp_path)
    record = json.loads((tmp_path / FILE).read_text())
    for done in record["steps"][0]["passes"]:
        done[:2] = [0.1 - done[1], 0.1 - done[0]]
    (tmp_path / FILE).write_text(json.dumps(record))
    assert main(["timeline", str(tmp_path)]) == 2
    assert "wait for each other in a circle" in capsys.readouterr().err


@pytest.mark.long
def test_the_largest_record_is_read_in_seconds(tmp_path, capsys):
    recorded(tmp_path, ranks=2, microbatches=2**15)
    started = time.monotonic()
    assert main(["timeline", str(tmp_path)]) == 0
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "7", "null", "[]", "\udcff"])
def test_a_file_that_is_no_record_is_one_line(tmp_path, capsys, text):
    (tmp_path / FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["timeline", str(tmp_path)]) == 2
    assert "is no record of Monitor3D" in capsys.readouterr().err


def test_a_file_that_is_too_large_is_not_read(tmp_path, capsys, monkeypatch):
    recorded(tmp_path)
    monkeypatch.setattr(pass_record, "MOST_BYTES", 100)
    assert main(["timeline", str(tmp_path / FILE)]) == 2
    assert "it is larger than 100 bytes" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_marks_are_events_and_nothing_waits_before_the_end():
    clock, device = PassClock(torch.device("cuda"), 0), torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clock.begin_step("1f1b", 1)
        for kind in ("F", "B"):
            with clock.timing(kind, 0, 0):
                for _ in range(20):
                    matrix = matrix @ matrix * 1e-4
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = time.time()
    [step] = clock.take()
    forward, backward = step.passes
    assert forward.start < forward.end <= backward.start < backward.end
    assert backward.end <= time.time()
    assert forward.end - forward.start > 0.001
    assert forward.start < before
