"""`resume="auto"`: the newest whole checkpoint of this run, in a layout for as many ranks as there are."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.strategy.run_note import NOTE, RunNote, refit
from tests.faults.drill import Net
from tests.parity import QUIET
from tests.workers import run


def fit(folder, world, steps, strategy=None, trainer=None, pinned=True, environment=None, callbacks=()):
    """One start of a run; where it began, what it accumulated, and the weights it ended with."""
    os.environ.update(environment or {})
    seed_everything(3, verbose=False)
    keep = ModelCheckpoint(dirpath=f"{folder}/kept" if pinned else None, every_n_train_steps=4, save_top_k=-1)
    flags = {**QUIET, "use_distributed_sampler": True, "enable_checkpointing": True, "limit_val_batches": 0}
    flags |= {"max_steps": steps, "max_epochs": -1, "default_root_dir": folder, **(trainer or {})}
    chosen = Strategy3D(**{"resume": "auto", "quiet": True, "timeout": 60.0, **(strategy or {})})
    job = Trainer(**flags, devices=world, strategy=chosen, callbacks=[keep, *callbacks])
    module, began = Net(dropout=0.0), []
    module.on_train_start = lambda: began.append(job.global_step)
    job.fit(module)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return {
        "began": began[0] if began else None, "step": job.global_step, "accumulate": job.accumulate_grad_batches,
        "limit": job.limit_train_batches, "layout": tuple(chosen.layout.sizes.values()), "weights": weights,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(fit, str(tmp_path_factory.mktemp("whole")), 4, 14, world=4)[0]


def begun(folder):
    """A run of four data ranks that ended after the checkpoint of step 8, in the middle of its second epoch."""
    assert run(fit, str(folder), 4, 9, world=4)[0]["began"] == 0


def test_same_ranks(tmp_path, whole):
    begun(tmp_path)
    (got, *_) = run(fit, str(tmp_path), 4, 14, world=4)
    assert got["began"] == 8
    assert torch.equal(got["weights"], whole["weights"])


def test_half_of_the_ranks_accumulate_twice_and_back_again(tmp_path, whole):
    begun(tmp_path)
    (got, _) = run(fit, str(tmp_path), 2, 12, {}, {"limit_train_batches": 6}, world=2)
    assert (got["began"], got["accumulate"], got["layout"]) == (8, 2, (1, 2, 1))
    assert got["limit"] == 12  # as many samples
    (back, *_) = run(fit, str(tmp_path), 4, 14, world=4)
    assert (back["began"], back["accumulate"]) == (12, 1)
    torch.testing.assert_close(back["weights"], whole["weights"], rtol=1e-5, atol=1e-5)


def refused(folder, world, strategy, trainer, callbacks):
    with pytest.raises(ConfigurationError) as caught:
        fit(folder, world, 14, strategy, trainer, callbacks=callbacks)
    return str(caught.value)


def test_what_the_user_set_is_not_overruled(tmp_path):
    begun(tmp_path)
    cases = [
        ({"data_parallel_size": 2}, {}, (), "data_parallel_size=2 is set"),
        ({}, {"accumulate_grad_batches": 4}, (), "accumulate_grad_batches=4 is set where the run had 1"),
        ({}, {}, (GradientAccumulationScheduler({0: 2}),), "GradientAccumulationScheduler"),
    ]
    for strategy, trainer, callbacks, says in cases:
        for text in run(refused, str(tmp_path), 2, strategy, trainer, callbacks, world=2):
            assert says in text
            assert "4 data ranks" in text


def test_a_given_path_is_taken_as_it_is(tmp_path):
    begun(tmp_path)
    path = sorted((tmp_path / "kept").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)[0]
    for got in run(_fit_from, str(tmp_path), str(path), world=2):
        assert got == (4, 1)


def _fit_from(folder, path):
    original = Trainer.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", lambda self, module: original(self, module, ckpt_path=path))
        got = fit(folder, 2, 6)
    return got["began"], got["accumulate"]


def test_without_a_directory_of_its_own_a_run_is_known_by_its_job(tmp_path):
    first = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = {**first, "TORCHELASTIC_RESTART_COUNT": "1"}
    other = {**first, "TORCHELASTIC_RUN_ID": "b"}
    begins = [
        run(fit, str(tmp_path), 1, steps, {}, {"logger": True}, False, there, world=1)[0]["began"]
        for steps, there in ((5, first), (9, again), (5, other))
    ]
    assert begins == [0, 4, 0]


def test_nothing_there_is_a_first_start(tmp_path):
    assert run(fit, str(tmp_path), 1, 4, world=1)[0]["began"] == 0
    note = RunNote.read(Path(tmp_path, "kept", NOTE))
    assert note == RunNote((str(tmp_path / "kept"),), 1, 1)


def test_a_misspelt_choice():
    with pytest.raises(ConfigurationError, match="resume='always'"):
        Strategy3D(resume="always")


def test_nothing_is_saved_within_the_first_window_of_a_resumed_run(tmp_path, whole):
    begun(tmp_path)
    (got, _) = run(fit, str(tmp_path), 2, 10, world=2)  # accumulates, and ends before it has saved anything
    assert (got["began"], got["accumulate"]) == (8, 2)
    (got, *_) = run(fit, str(tmp_path), 4, 14, world=4)
    assert got["began"] == 8
    torch.testing.assert_close(got["weights"], whole["weights"], rtol=1e-5, atol=1e-5)


def test_three_ranks_that_four_batches_cannot_be_dealt_to_become_a_pipeline(tmp_path, whole):
    begun(tmp_path)
    (got, *_) = run(fit, str(tmp_path), 3, 14, world=3)
    assert (got["began"], got["accumulate"], got["layout"]) == (8, 4, (3, 1, 1))
    torch.testing.assert_close(got["weights"], whole["weights"], rtol=1e-5, atol=1e-5)


def test_a_layout_is_chosen_among_those_that_keep_the_global_batch(tmp_path):
    auto = {"layout": "auto"}
    (unbroken, _) = run(fit, str(tmp_path / "unbroken"), 2, 10, auto, world=2)
    assert unbroken["layout"] == (1, 2, 1)
    run(fit, str(tmp_path), 2, 5, auto, world=2)
    (got,) = run(fit, str(tmp_path), 1, 9, auto, world=1)
    assert (got["began"], got["accumulate"], got["layout"]) == (4, 2, (1, 1, 1))
    (same, _) = run(fit, str(tmp_path), 2, 10, auto, world=2)
    assert (same["began"], same["accumulate"], same["layout"]) == (8, 1, (1, 2, 1))
    torch.testing.assert_close(same["weights"], unbroken["weights"], rtol=1e-5, atol=1e-5)


def test_more_ranks_than_batches_become_another_axis_under_a_chosen_layout(tmp_path):
    run(fit, str(tmp_path), 1, 5, {"layout": "auto"}, world=1)
    (got, _) = run(fit, str(tmp_path), 2, 6, {"layout": "auto"}, world=2)
    assert (got["began"], got["accumulate"]) == (4, 1)
    assert got["layout"][1] == 1, "one data rank, as before"


def sizes(layout):
    return layout.data_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size


@pytest.mark.parametrize(
    ("tensor", "pipeline", "windows", "world", "expected", "accumulate"),
    [
        (2, 1, 4, 4, (2, 2, 1), 2),  # half of the data ranks, twice the batches
        (2, 1, 4, 2, (1, 2, 1), 4),
        (2, 2, 4, 16, (4, 2, 2), 1),  # all are back
        (1, 1, 4, 3, (1, 1, 3), 4),  # 3 does not divide 4: the pipeline takes them
        (4, 1, 1, 2, (1, 2, 1), 1),  # not even one copy as it was
        (2, 2, 2, 2, (1, 2, 1), 2),
        (1, 1, 12, 3, (3, 1, 1), 4),
    ],
)
def test_data_goes_first_and_the_global_batch_stays(tensor, pipeline, windows, world, expected, accumulate):
    wanted = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    layout, batches = refit(wanted, windows, world, blocks=8)
    assert sizes(layout) == expected
    assert batches == accumulate


def test_where_nothing_fits_it_says_what_would():
    with pytest.raises(LayoutError, match=r"5 ranks cannot resume.*4 batches.*Start 1, 2, 4 ranks"):
        refit(Layout(), 4, 5, blocks=2)


@pytest.mark.parametrize("blocks", [4, 5])
def test_a_v_needs_two_blocks_for_each_rank(blocks):
    v = Layout(pipeline_parallel_size=2, schedule="zbv_zero_bubble")
    assert sizes(refit(v, 4, 4, blocks)[0]) == (2, 1, 2)
    with pytest.raises(LayoutError, match="3 ranks cannot resume"):
        refit(v, 4, 3, blocks)
    assert sizes(refit(v, 4, 3, blocks=6)[0]) == (1, 1, 3)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 24), st.integers(1, 48), st.integers(1, 12))
def test_every_answer_keeps_the_global_batch(tensor, pipeline, windows, world, blocks):
    wanted = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, zero_stage=2)
    try:
        layout, accumulate = refit(wanted, windows, world, blocks)
    except LayoutError:
        data, rest = divmod(world, tensor * pipeline)
        assert rest or windows % data  # never where the data axis alone can do it
        return
    assert layout.world_size == world
    assert layout.data_parallel_size * accumulate == windows
    assert layout.zero_stage == 2
    assert tensor % layout.tensor_parallel_size == 0
    assert layout.pipeline_parallel_size in (1, pipeline) or layout.pipeline_parallel_size <= blocks
