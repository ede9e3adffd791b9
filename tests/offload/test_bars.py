"""Memory and speed of a training with weights and states on a disk, of real size."""

import shutil

import pytest
import torch
from lightning.pytorch import seed_everything

from tests.bench.bench_offload import CASES, GPT, measure
from tests.workers import run


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
