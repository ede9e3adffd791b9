"""A job folder of Hydra that takes no file: what a run would write there is a warning, and no error."""

import json

import pytest
import torch

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.strategy.fit_report import Measured, write, write_failure

MEASURED = Measured(step_seconds=0.1, seconds=1.0, memory_bytes=10, steps=3, step_samples=8)


def report(folder):
    write(folder, MEASURED, Layout(), {}, torch.device("cpu"))


def failure(folder):
    write_failure(folder, 0, ZeroDivisionError("the step's own error"))


@pytest.mark.parametrize(("writes", "name"), [(report, "lightning_3d.json"), (failure, "lightning_3d_failed.json")])
def test_a_folder_that_takes_no_file_is_warned_of(tmp_path, writes, name):
    (tmp_path / "file").touch()
    (tmp_path / name).mkdir()
    for folder in (tmp_path, tmp_path / "file"):  # what is in the way is a folder, then a file
        with pytest.warns(UserWarning, match=f"{name} cannot be written .*The run goes on without it"):
            writes(folder)


def test_a_report_takes_the_place_of_a_failure(tmp_path):
    failure(tmp_path)
    assert json.loads((tmp_path / "lightning_3d_failed.json").read_text())["rank"] == 0
    report(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["lightning_3d.json"]


def test_a_refusal_that_all_ranks_raise_is_that_of_the_first(tmp_path):
    refused = UnsupportedError("not on this rank")
    refused.rank = 3
    for rank in (3, 0):
        write_failure(tmp_path, rank, refused)
        assert json.loads((tmp_path / "lightning_3d_failed.json").read_text())["rank"] == 3
