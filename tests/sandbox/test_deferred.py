"""A module that is built without memory has the values of one that is built with it, and leaves the same streams."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_3d.sandbox import build_recorder, deferred
from lightning_3d.sandbox.deferred import Deferred, computed_on_use, deferring, empty, leave_on_host, realize


@pytest.fixture(autouse=True)
def _free_everything(monkeypatch):
    monkeypatch.setattr(deferred, "SMALL", 0)
    monkeypatch.setattr(build_recorder, "ROOM", 0)


class _Scaled(nn.Module):
    """nanoGPT's way: values of the layers, values by `apply`, a second pass by name, a tie, slices."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.apply(self._first)
        for name, parameter in self.named_parameters():
            if name.endswith("0.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / 6**0.5)
        self.blocks[0][0].weight.data[1:3].mul_(2.0)
        with torch.no_grad():
            self.blocks[1][0].weight[0] = 7.0
            self.blocks[2][0].bias.copy_(torch.linspace(0, 1, 8))

    def _first(self, part):
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.0, 0.02)


class _Initializers(nn.ParameterList):
    def __init__(self):
        super().__init__(nn.Parameter(torch.empty(8, 8)) for _ in range(7))
        nn.init.orthogonal_(self[0])
        nn.init.trunc_normal_(self[1], std=0.02)
        nn.init.kaiming_uniform_(self[2])
        nn.init.xavier_normal_(self[3])
        nn.init.eye_(self[4])
        nn.init.sparse_(self[5], 0.5)
        nn.init.dirac_(self[6].data.view(8, 8, 1))


class _Computed(nn.Module):
    """Parameters that are results of other tensors, of a generator of their own, of another parameter."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(8, 8) * 0.02)
        generator = torch.Generator().manual_seed(4)
        self.seeded = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.seeded.data.normal_(generator=generator)
        self.copied = nn.Parameter(torch.empty(8, 8))
        self.copied.data.copy_(self.scaled.detach().T)
        self.scaled.data.add_(1.0)  # which `copied` does not see
        self.decided = nn.Parameter(torch.randn(8, 8))
        if self.decided.abs().max().item() > 1:
            self.decided.data.div_(self.decided.norm().item())
        self.listed = nn.Parameter(torch.ones(2, 2) * self.decided.tolist()[0][0])
        self.register_buffer("table", self.scaled.detach().cumsum(0))


class _Parts(nn.Module):
    """Modules of torch that build in odd ways: copies, flat weights, parametrizations, memory formats."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.lstm = nn.LSTM(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
        self.twin = copy.deepcopy(self.lstm)
        self.half = nn.Linear(8, 8).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [_Scaled, _Initializers, _Computed, _Parts])
def test_values_and_streams_are_those_of_a_module_with_memory(kind):
    torch.manual_seed(3)
    wanted, stream = kind(), torch.get_rng_state()
    torch.manual_seed(3)
    with deferring():
        module = kind()
    assert torch.equal(torch.get_rng_state(), stream)
    before = [parameter for parameter in module.parameters() if isinstance(parameter, Deferred)]
    assert len(before) > 0.7 * len(list(module.parameters()))
    with torch._C.DisableTorchFunctionSubclass():
        assert {parameter.untyped_storage().nbytes() for parameter in before} == {0}
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    realize(module.parameters())
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in wanted.state_dict(keep_vars=True).items():
        mine = module.state_dict(keep_vars=True)[name]
        assert torch.equal(mine, value) and mine.stride() == value.stride() and type(mine) is type(value), name
    assert {id(parameter) for parameter in before} <= {id(parameter) for parameter in module.parameters()}


def test_a_module_that_is_lent_computes_and_differentiates_the_same():
    torch.manual_seed(3)
    wanted = _Scaled()
    torch.manual_seed(3)
    with deferring():
        module = _Scaled()
    tokens = torch.arange(5)
    for each in (wanted, module):
        with computed_on_use(module):
            x = each.embed(tokens)
            for block in each.blocks:
                x = x + block(x)
            each.head(x).square().sum().backward()
            each.head.weight.data.zero_()  # undone
    for name, parameter in wanted.named_parameters():
        mine = module.get_parameter(name)
        assert type(mine) is Deferred
        assert torch.equal(mine.grad, parameter.grad), name
    assert module.embed.weight.abs().sum() > 0


@pytest.mark.parametrize(
    "use",
    [
        lambda parameter: parameter.sum().item(),
        lambda parameter: parameter.numpy(force=True),
        lambda parameter: parameter.tolist(),
        lambda parameter: parameter.data.mul_(1.0),
        lambda parameter: parameter.detach().data_ptr(),
        lambda parameter: copy.deepcopy(parameter),
        lambda parameter: pickle.dumps(parameter),
        lambda parameter: torch.stack([parameter, parameter]),
        lambda parameter: repr(parameter),
    ],
    ids=["item", "numpy", "tolist", "data", "data_ptr", "deepcopy", "pickle", "stack", "repr"],
)
def test_the_first_use_of_a_value_computes_it(use):
    torch.manual_seed(3)
    wanted = nn.Linear(8, 8)
    torch.manual_seed(3)
    with deferring():
        module = nn.ModuleList([nn.Linear(8, 8)])
    use(module[0].weight)
    assert type(module[0].weight) is nn.Parameter
    assert torch.equal(module[0].weight, wanted.weight)


def test_what_needs_no_value_leaves_it_freed():
    with deferring():
        module = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8))
    module.to("cpu")
    module.requires_grad_(False)
    assert [parameter.shape for parameter in module[0].parameters()] == [(8, 8), (8,)]
    assert torch.empty_like(module[0].weight, device="meta").is_meta
    assert sum(parameter.numel() for parameter in module.parameters()) == 648
    assert {type(parameter) for parameter in module.parameters()} == {Deferred}
    assert not module[0].weight.requires_grad


class _Unrepeatable(nn.Module):
    def __init__(self):
        super().__init__()
        self.outside, self.numpy, self.aliased, self.plain = (nn.Parameter(torch.empty(70, 70)) for _ in range(4))
        self.outside.data.copy_(OUTSIDE)
        self.numpy.data.numpy()[:] = 3.0
        self.view = self.aliased.data[0]
        nn.init.ones_(self.aliased)
        nn.init.ones_(self.plain)


OUTSIDE = torch.randn(70, 70)


def test_what_cannot_be_computed_again_keeps_its_memory_and_is_named():
    with deferring() as built:
        module = _Unrepeatable()
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert {names[parameter]: why for parameter, why in built.in_full} == {
        "outside": "aten.copy_.default gives it a value that was made elsewhere",
        "numpy": "code outside of torch reads or writes its memory",
        "aliased": "another tensor uses its memory",
    }
    assert type(module.plain) is Deferred
    assert torch.equal(module.outside, OUTSIDE) and bool((module.numpy == 3).all()) and bool((module.view == 1).all())


def test_an_error_while_building_leaves_plain_parameters():
    module = nn.Linear(8, 8)
    with pytest.raises(ZeroDivisionError), deferring():
        module.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        1 / 0  # noqa: B018
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_a_module_in_host_memory_moves_one_parameter_at_a_time(monkeypatch):
    """What `strategy.setup` does with a module of `__init__` on GPUs. Here the "device" is the CPU too."""
    moved = []
    monkeypatch.setattr(deferred, "_moved", lambda value, device: moved.append(value.numel()) or value.clone())
    module, wanted = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), None
    wanted = copy.deepcopy(module)
    for parameter in module.parameters():
        leave_on_host(parameter, torch.device("cpu"))
    for parameter in module[0].parameters():
        empty(parameter)  # of another pipeline stage
    realize(module[1].parameters())
    assert moved == [32, 4]
    assert torch.equal(module[1].weight, wanted[1].weight)
    assert [parameter.numel() for parameter in module[0].parameters()] == [0, 0]
