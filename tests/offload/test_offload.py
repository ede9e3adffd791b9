"""Training with offload is training without it, bit for bit. Memory and speed with a disk, of real size."""

import gc
import os
import shutil

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_3d import Strategy3D
from lightning_3d.activations import recompute_blocks
from lightning_3d.errors import ConfigurationError, UnsupportedError
from lightning_3d.offload import disk_file
from tests.bench.bench_offload import CASES, GPT, measure
from tests.offload.trainings import Net, assert_equal, both, train
from tests.parity import QUIET, long
from tests.workers import run

STATES, ALL = {"optimizer": "disk"}, {"optimizer": "disk", "parameters": "disk"}


@pytest.mark.parametrize(
    ("world", "strategy", "offload"),
    [
        (1, {}, STATES),
        (1, {"zero_stage": 3}, ALL),
        (2, {"zero_stage": 3}, ALL),
        long(1, {"zero_stage": 3}, {"parameters": "disk"}),
        long(1, {"zero_stage": 3}, {"parameters": "cpu", "optimizer": "disk"}),
        long(2, {"zero_stage": 0}, STATES),
        long(2, {"zero_stage": 1}, ALL),
        long(2, {"zero_stage": 2}, ALL),
        long(2, {"tensor_parallel_size": 2}, STATES),
        long(2, {"tensor_parallel_size": 2, "zero_stage": 3}, ALL),
        long(2, {"pipeline_parallel_size": 2}, STATES),
        long(4, {"pipeline_parallel_size": 2, "zero_stage": 3}, ALL),
        long(4, {"tensor_parallel_size": 2, "zero_stage": 3}, ALL),
        long(2, {"zero_stage": 3, "recompute": "full"}, ALL),
    ],
    ids=str,
)
def test_layouts(world, strategy, offload, tmp_path):
    everywhere = run(both, world, strategy, offload, str(tmp_path), world=world, timeout=300)
    for offloaded, plain in everywhere:
        assert_equal(offloaded, plain)
        assert offloaded["moved"] > 0
    if world > 1 and "zero_stage" in strategy and len(strategy) == 1:
        assert everywhere[0][1]["losses"] != everywhere[1][1]["losses"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["amsgrad", "momentum", "nadam", "adagrad", "muon"])
def test_optimizers(optimizer, tmp_path):
    world = 1 + (optimizer == "muon")  # which needs full matrices
    strategy = {"zero_stage": 3}
    for offloaded, plain in run(both, world, strategy, ALL, str(tmp_path), optimizer, world=world, timeout=300):
        assert_equal(offloaded, plain)
        assert offloaded["moved"] > 0


def _refused(optimizer, folder, match):
    with pytest.raises(UnsupportedError, match=match):
        train(1, {}, STATES, folder, optimizer)


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        ("lbfgs", "LBFGS needs all parameters and states"),
        ("adafactor", r"Adafactor has a state 'row_var' of shape \(8, 1\)"),
        ("clipped", "Clipped computes a number from all parameters"),
    ],
)
def test_other_optimizers_are_refused_by_name(optimizer, match, tmp_path):
    run(_refused, optimizer, str(tmp_path), match, world=1)


class Live(Callback):
    """Looks for states in memory, after the first step: it has made them there."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        disk = trainer.strategy._parallel.disk
        if disk is None:
            return
        gc.collect()
        shapes = {tuple(p.shape) for p in module.parameters() if p.numel() * 4 > 2**16}
        grads = {p.grad.to_local().data_ptr() for p in module.parameters() if p.grad is not None}
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and tuple(each.shape) in shapes]
        assert shapes
        here = [each for each in found if each.untyped_storage().nbytes() and not disk.has(each)]
        assert {each.data_ptr() for each in here} <= grads


def test_no_states_stay_in_memory(tmp_path):
    run(train, 1, {"zero_stage": 3}, ALL, str(tmp_path), "adamw", [Live], world=1)


class Around(Callback):
    """User code between steps that reads and changes what is on the disk, and accumulates what a report says."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.9, 0.9)

    def on_train_epoch_end(self, trainer, module):
        report = trainer.strategy.memory_report()
        if trainer.strategy._parallel.disk is not None:
            states = trainer.optimizers[0].state
            assert report.ranks[0].disk > 10 * report.ranks[0].states
            assert all(rank.disk > 0 for rank in report.ranks)
            assert states


@pytest.mark.long
@pytest.mark.parametrize(("world", "trainer"), [(1, {}), (2, {"accumulate_grad_batches": 2})])
def test_callbacks_hooks_and_averaged_weights(world, trainer, tmp_path):
    for offloaded, plain in run(_watched, world, str(tmp_path), trainer, world=world, timeout=300):
        assert_equal(offloaded, plain)


def _watched(world, folder, trainer):
    return both(world, {"zero_stage": 3}, ALL, folder, callbacks=[Around, EMAWeightAveraging], **trainer)


def _resumed(world, strategy, layout, folder):
    """Train some steps, save, and train others, with and without offload in each of the two."""
    whole = train(world, strategy, None, folder)
    ends = []
    for first, second in ((ALL, None), (None, ALL), (ALL, ALL)):
        path = f"{folder}/{'disk' if first else 'memory'}.ckpt"
        saves = [lambda path=path: Saves(path)]
        train(world, {**strategy, "checkpoint_format": layout}, first, folder, callbacks=saves)
        ends.append(train(world, {**strategy, "checkpoint_format": layout}, second, folder, ckpt_path=path))
    return whole, ends


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.long
@pytest.mark.parametrize(("world", "layout"), [(1, "full"), (2, "sharded"), (2, "full")])
def test_a_run_goes_on_with_and_without_a_disk(world, layout, tmp_path):
    for whole, ends in run(_resumed, world, {"zero_stage": 3}, layout, str(tmp_path), world=world, timeout=400):
        for end in ends:
            assert end["losses"] == whole["losses"][1:]
            for key in ("weights", "states"):
                assert all(torch.equal(end[key][name], value) for name, value in whole[key].items())


def _fails(world, strategy, offload, folder, match):
    """Each rank raises the same before its first step, also where only the last rank has a reason."""
    last = os.environ["RANK"] == str(world - 1)
    missing = dict.fromkeys(offload, f"nvme:{folder}/{'missing' if last else ''}")
    seen = Net.training_step
    Net.training_step = _never
    full, found = os.statvfs, os.statvfs_result((4096, 4096, 10, 10, 10, 0, 0, 0, 0, 255))
    disk_file.os.statvfs = (lambda folder: found) if match.startswith("no room") else full
    try:
        with pytest.raises(ConfigurationError, match=match):
            train(world, strategy, missing if match == "no such folder" else offload, folder)
    finally:
        Net.training_step, disk_file.os.statvfs = seen, full


def _never(self, batch, batch_idx):
    raise AssertionError("training has begun")


@pytest.mark.parametrize(
    ("world", "strategy", "offload", "match"),
    [
        (1, {"zero_stage": 0}, {"parameters": "disk"}, "zero_stage=0 needs all of them"),
        (1, {"zero_stage": 1}, {"parameters": "cpu"}, "saves nothing with one data rank"),
        (2, {"zero_stage": 3}, ALL, "no such folder"),
        (2, {"zero_stage": 3}, STATES, "no such folder"),
        (2, {"zero_stage": 3}, ALL, "no room"),
        (1, {}, STATES, "no room for the states of AdamW"),
    ],
)
def test_failures_are_errors_of_every_rank_before_training(world, strategy, offload, match, tmp_path):
    run(_fails, world, strategy, offload, str(tmp_path), match, world=world)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("offload", "budget", "match"),
    [
        ("disk", None, "offload='disk' is not one of"),
        ({"weights": "cpu"}, None, "'weights', which is not one of"),
        ({"optimizer": "disk"}, None, "'optimizer': 'disk', which is not 'cpu' or 'nvme:' and a folder"),
        ({"activations": "nvme:/tmp"}, None, "'activations': 'nvme:/tmp', which is not 'cpu'"),
        ({"optimizer": "cpu"}, "1GB", "nothing is on one"),
        ({"optimizer": "nvme:/tmp"}, "much", "no amount of memory"),
    ],
)
def test_arguments(offload, budget, match):
    with pytest.raises(ConfigurationError, match=match):
        Strategy3D(offload=offload, offload_budget=budget)


def _activations(world, strategy):
    """Train with and without, with every activation worth a copy; the bytes that went to the host."""

    small, recompute_blocks.SMALL = recompute_blocks.SMALL, 0
    copied, of = [], recompute_blocks.OnHost.of

    def counted(tensor):
        copied.append(tensor.nbytes)
        return of(tensor)

    recompute_blocks.OnHost.of = counted
    try:
        results = both(world, strategy, {"activations": "cpu"}, None)
    finally:
        recompute_blocks.SMALL, recompute_blocks.OnHost.of = small, of
    return *results, sum(copied)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (1, {}),
        long(1, {"recompute": "full"}),
        long(1, {"recompute": "selective"}),
        long(2, {"zero_stage": 3}),
        long(2, {"tensor_parallel_size": 2}),
        long(2, {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_activations_go_to_the_host(world, strategy):
    for offloaded, plain, copied in run(_activations, world, strategy, world=world, timeout=200):
        assert_equal(offloaded, plain)
        width = 4 * 6 * 136 * 4  # bytes of what enters a block, and is kept of it
        assert copied > 2 * len(plain["losses"]) * (width // world)


@pytest.mark.long
def test_a_dry_run_needs_no_disk():
    offload = {"optimizer": "nvme:/missing", "parameters": "nvme:/missing", "activations": "cpu"}
    chosen = Strategy3D(dry_run="2xcpu", zero_stage=3, offload=offload)
    Trainer(**QUIET, devices=2, strategy=chosen, max_epochs=1).fit(Net())
    (report,) = chosen._dry_run.world.reports
    assert [rank.error for rank in report.ranks] == [None] * len(report.ranks)


def _measured(case, folder, steps):
    world, size, strategy, offload = CASES[case]
    job = (measure, world, size, strategy, offload, str(folder), "0.5GB", steps)
    return run(*job, world=world, timeout=3000, fresh=True)  # another run's heap would be counted in the peak


def _needs(folder, nbytes):
    if shutil.disk_usage(folder).free < nbytes:
        pytest.skip(f"the disk of {folder} has no {nbytes / 1e9:.0f} GB")


@pytest.mark.long
@pytest.mark.parametrize(("case", "most"), [("states", 4.4e9), ("all", 2.8e9)])
def test_resident_memory_of_400_million_parameters(case, most, tmp_path):
    """AdamW in fp32 on one process: 6.4 GB of weights, gradients and states, of which 1.6 GB are gradients."""
    _needs(tmp_path, 8e9)
    (got,) = _measured(case, tmp_path, 2)
    assert got["peak"] <= most
    assert sum(moved for _, moved, _, _ in got["steps"][1:]) > 6e9
    assert list(tmp_path.iterdir()) == []


def first_losses(size):
    """The first two losses by plain torch. The first step of AdamW needs no states: it divides a gradient by its size.

    Each gradient is freed once its parameter has stepped, since weights and gradients are 12 GB.
    """
    seed_everything(1, verbose=False)
    module = GPT(size, 2)
    module.configure_model()
    decay, rate, tiny = 0.01, 1e-4, 1e-8

    @torch.no_grad()
    def step(parameter):
        grad, parameter.grad = parameter.grad, None
        parameter.mul_(1 - rate * decay).sub_(grad.div_(grad.abs().add_(tiny)).mul_(rate))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    first, second = module.train_dataloader()
    loss = module.training_step(first, 0)
    loss.backward()
    with torch.no_grad():
        return [float(loss.detach()), float(module.training_step(second, 1))]


@pytest.mark.long
def test_one_and_a_half_billion_parameters_use_half_of_the_disk(tmp_path):
    """24 GB of weights, gradients and states on two processes.

    The loss goes from 10.1 to 34.1: the first step of Adam moves each weight of 28 wide blocks by the learning rate.
    """
    _needs(tmp_path, 30e9)
    (wanted,) = run(first_losses, "large", world=1, timeout=1200)
    for got in _measured("large", tmp_path, 3):
        assert got["losses"][:2] == pytest.approx(wanted, rel=1e-3)
        assert len(got["losses"]) == 3
        assert max(got["shares"][1:]) >= 0.5
    assert list(tmp_path.iterdir()) == []
