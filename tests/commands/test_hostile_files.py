"""Files that others wrote: they neither hang a command, nor read the environment, nor reach the terminal."""

import json
import time

import pytest
from torch import nn

from lightning_3d.cli import main
from lightning_3d.tools.planner.catalogue import MOST_LIKE
from tests.commands.test_compare import job

LEVELS = 60
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, LEVELS))
DONE = {"step_seconds": 0.25, "memory_bytes": 2e9, "metrics": {"loss": 3.5}}
pytestmark = pytest.mark.usefixtures("no_user_files")


def refused(capsys, *words):
    started = time.monotonic()
    assert main(list(words)) == 2
    assert time.monotonic() - started < 10
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "x: {<<: &x {like: h100, y: [*x]}}\n"])
def test_aliases_that_grow_are_refused_by_plan(capsys, tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    err = refused(capsys, "plan", "gpt2", "--cluster", "h100", "--hardware", str(tmp_path / "own.yaml"))
    assert "cannot be read: it stands for more than 20,000 values" in err


def test_a_file_without_an_end_is_refused_by_plan(capsys):
    err = refused(capsys, "plan", "gpt2", "--cluster", "h100", "--hardware", "/dev/zero")
    assert "/dev/zero cannot be read: it has more than 2,000,000 characters" in err


def test_aliases_that_repeat_a_little_are_read(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text("one: &one {like: h100}\ntwo: {<<: *one, memory_gb: 90}\n")
    assert main(["plan", "gpt2", "--cluster", "2xtwo", "--hardware", str(tmp_path / "own.yaml")]) == 0
    assert "of 90 GB per device" in capsys.readouterr().out


def test_aliases_that_grow_are_refused_by_compare(capsys, tmp_path):
    job(tmp_path, "0", ["lr=1"], **DONE)
    (tmp_path / "0" / ".hydra" / "overrides.yaml").write_text(BOMB)
    assert "it stands for more than" in refused(capsys, "compare", str(tmp_path))


@pytest.mark.parametrize("length", [MOST_LIKE + 2, 3000])
def test_a_long_chain_of_entries_is_refused(capsys, tmp_path, length):
    entries = "x0: {like: h100}\n" + "".join(f"x{n}: {{like: x{n - 1}}}\n" for n in range(1, length))
    (tmp_path / "own.yaml").write_text(entries)
    words = ["plan", "gpt2", "--hardware", str(tmp_path / "own.yaml"), "--cluster"]
    assert "chain of more than" in refused(capsys, *words, f"2xx{length - 1}")
    assert main([*words, "2xx9"]) == 0


def test_compare_reads_nothing_from_the_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    job(tmp_path, "0", ["key=${oc.env:SECRET}"], **DONE)
    job(tmp_path, "1", ["key=1"], **DONE)
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "swordfish" not in out
    assert "key=${oc.env:SECRET}" in out


def test_a_hardware_file_reads_nothing_from_the_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    (tmp_path / "own.yaml").write_text("x: {like: h100, title: '${oc.env:SECRET}'}\n")
    assert main(["plan", "gpt2", "--cluster", "2xx", "--hardware", str(tmp_path / "own.yaml")]) == 0
    assert "swordfish" not in capsys.readouterr().out


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_compare_shows_no_terminal_escapes(capsys, tmp_path):
    job(tmp_path, f"0{ESCAPE}", [], **DONE)
    job(tmp_path, "1", [], **{**DONE, "metrics": {f"loss{ESCAPE}": 1.0}})
    job(tmp_path, "2", ['"x=\\e[31m"'])
    (tmp_path / "2" / "lightning_3d_failed.json").write_text(json.dumps({"reason": f"bad {ESCAPE}"}))
    assert main(["compare", str(tmp_path)]) == 0
    assert main(["compare", str(tmp_path), "--metric", "none"]) == 2
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\x07" not in out + err
    assert "\\x1b]0;owned" in out
    assert "loss\\x1b" in err


def test_plan_shows_no_terminal_escapes(capsys, tmp_path):
    (tmp_path / "own.yaml").write_text('x: {like: h100, title: "\\e[31mred"}\n')
    assert main(["plan", "gpt2", "--cluster", "2xx", "--hardware", str(tmp_path / "own.yaml")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "7", '{"layout": {}}', '{"layout": 1, "metrics": []}'])
def test_a_damaged_report_is_a_job_that_did_not_finish(capsys, tmp_path, text):
    job(tmp_path, "0", ["lr=1"], **DONE)
    job(tmp_path, "1", ["lr=2"])
    (tmp_path / "1" / "lightning_3d.json").write_text(text)
    assert main(["compare", str(tmp_path)]) == 0
    assert "job 1 did not finish: lightning_3d.json" in capsys.readouterr().out


@pytest.mark.parametrize("number", [10**400, -1, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("name", ["seconds", "memory_bytes", "devices"])
def test_a_report_with_a_number_of_no_size_is_a_job_that_did_not_finish(capsys, tmp_path, name, number):
    job(tmp_path, "0", ["lr=1"], **DONE)
    job(tmp_path, "1", ["lr=2"], **{**DONE, name: number})
    assert main(["compare", str(tmp_path)]) == 0
    assert "job 1 did not finish: lightning_3d.json" in capsys.readouterr().out


def test_why_every_job_failed_is_in_the_one_line(capsys, tmp_path):
    job(tmp_path, "0", ["lr=1"])
    (tmp_path / "0" / "lightning_3d_failed.json").write_text(json.dumps({"reason": "ValueError: no\nuse"}))
    assert "job 0 did not finish: ValueError: no use" in refused(capsys, "compare", str(tmp_path))


def build() -> nn.Module:
    return nn.Linear(2, 2)


def build_without_a_word():
    raise AssertionError("it was called")


def build_a_path() -> str:
    raise AssertionError("it was called")


def test_inspect_builds_classes_and_functions_that_return_a_module(capsys):
    assert main(["inspect", f"{__name__}.build"]) == 0
    assert "6 of 6 parameters" in capsys.readouterr().out
    assert main(["inspect", "torch.nn.Linear", "--arg", "in_features=2", "--arg", "out_features=2"]) == 0


@pytest.mark.parametrize(
    "dotted",
    ["os.system", "os.path.join", "subprocess.Popen", f"{__name__}.build_without_a_word", f"{__name__}.build_a_path"],
)
def test_inspect_calls_nothing_else(capsys, tmp_path, dotted):
    mark = tmp_path / "called"
    err = refused(capsys, "inspect", dotted, "--arg", f"command=touch {mark}")
    assert f"{dotted} is not a LightningModule or nn.Module, nor a function that says it returns one" in err
    assert not mark.exists()
