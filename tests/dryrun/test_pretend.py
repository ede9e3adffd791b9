"""The mode that counts memory and FLOPs and keeps large results from being computed."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightning_3d.sandbox.without_values import LARGE, ShapesOnly
from lightning_3d.tools.dryrun.fake_device import FakeDevice, storage_bytes


def test_a_small_tensor_into_which_a_fake_one_is_written_has_no_values():
    """Positions and masks of a step whose costs are counted have values, and what depends on weights has none."""
    with ShapesOnly(allow_non_fake_inputs=True) as mode:
        weight = torch.ones(4)
        mode.answers = False
        places = torch.zeros(4)
        assert torch.arange(4).max().item() == 3
        assert torch.zeros(LARGE).sum().shape == ()
        places[0] = (weight > 0).sum()
        for made in (places, places + 1, places.view(2, 2)):
            with pytest.raises(DataDependentOutputException):
                made.max().item()


def test_live_and_peak_bytes_are_those_of_storages():
    pretend = FakeDevice()
    with pretend:
        one = torch.zeros(256)
        view = one.view(16, 16).t()
        two = one + 1
        assert pretend.memory.live == 2048
        del two
        assert (pretend.memory.live, pretend.memory.peak) == (1024, 2048)
        assert pretend.memory.restart() == 2048 and pretend.memory.peak == 1024
        del one
        assert pretend.memory.live == 1024  # the view still needs it
        del view
    assert pretend.memory.live == 0


def test_memory_of_a_training_step_is_that_of_real_tensors():
    def peak(fake):
        pretend = FakeDevice()
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        if fake:
            for child in net.children():
                for name, parameter in list(child.named_parameters()):
                    setattr(child, name, nn.Parameter(pretend.fake_like(parameter)))
        with pretend:
            net(torch.ones(16, 8)).square().sum().backward()
        return pretend.memory.peak, pretend.flops

    assert peak(fake=True) == peak(fake=False)
    assert peak(fake=True)[1] == 2 * 16 * (8 * 32 + 32 * 4 + 8 * 32 + 2 * 32 * 4)  # the input needs no gradient


def test_what_is_large_is_not_computed_in_a_step_only():
    pretend = FakeDevice()
    with pretend:
        assert not isinstance(torch.zeros(LARGE), FakeDevice.kind)
        with pretend.step():
            assert isinstance(torch.zeros(LARGE), FakeDevice.kind)
            small = torch.arange(1000)
            assert small[7].item() == 7
            assert isinstance(small[:, None] < small[None, :].repeat(1000, 1).repeat(1, 4)[:, :1000], FakeDevice.kind)
            assert torch.zeros(LARGE, device="meta").is_meta


def test_masks_of_the_batch_select_from_what_has_no_values():
    pretend = FakeDevice()
    fake = pretend.fake_like(torch.empty(6, 3))
    with pretend:
        assert fake[torch.tensor([True, False, True, True, False, False])].shape == (3, 3)


def test_values_that_are_not_there_are_one_and_their_place_is_noted():
    pretend = FakeDevice()
    fake = pretend.fake_like(torch.empty(()))
    with pretend, pretend.step():
        assert fake.item() == 1.0 and not bool(fake > 0) and torch.tensor(5).item() == 5
    assert len(pretend.reads) == 1 and __file__ in next(iter(pretend.reads))


def test_bytes_held_count_a_storage_once():
    one = torch.zeros(10)
    assert storage_bytes([one, one[2:], torch.zeros(5)]) == 60


def test_the_fake_copy_of_a_tensor_has_its_shape_of_now():
    pretend, real = FakeDevice(), torch.zeros(3)
    with pretend:
        assert (pretend.fake_like(torch.empty(3)) + real).shape == (3,)
        real.data = torch.zeros(5)
        assert (pretend.fake_like(torch.empty(5)) + real).shape == (5,)
