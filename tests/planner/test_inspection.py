import pytest
import torch
from torch import nn

from lightning_3d.tools.planner.profile_module import count_module, profile_module
from lightning_3d.tools.planner.transformer import Transformer
from tests.dryrun.compare import dry
from tests.zoo.planned import Classifier, TinyGPT

HERE = "tests.zoo.planned"


def test_a_measured_gpt_is_the_closed_form():
    measured = profile_module(f"{HERE}.TinyGPT", ["layers=3"], precision="32", tokens=None, inputs="2x17:int64")
    shape = Transformer(layers=3, hidden=32, heads=4, vocabulary=64, sequence=16, positions=16, dropout=False).profile(
        precision="32"
    )
    assert measured.parameters == shape.parameters == sum(p.numel() for p in TinyGPT().parameters())
    assert (measured.layers, measured.first_parameters, measured.tied_parameters) == (
        3,
        shape.first_parameters,
        shape.tied_parameters,
    )
    assert measured.block_flops == shape.block_flops
    assert measured.last_flops == shape.last_flops
    assert measured.attention_flops == shape.attention_flops
    assert measured.key_elements == shape.key_elements
    assert measured.boundary_elements == shape.boundary_elements
    kept = [p.whole_bytes + p.split_bytes + p.attention_bytes for p in (measured, shape)]
    assert kept[0] == pytest.approx(kept[1], rel=0.02)
    assert measured.tensor_divides == (4,)


def test_measured_activations_are_those_of_a_real_run():
    """The bytes that autograd really keeps for one sample, parameters left out, counted on real tensors."""
    measured = profile_module(f"{HERE}.TinyGPT", [], precision="32", tokens=None, inputs="2x17:int64")
    module, seen = TinyGPT(), {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), pytest.warns(UserWarning, match="log"):
        module.training_step(torch.zeros(2, 17, dtype=torch.int64), 0)
    real = sum(size for key, (size, _) in seen.items() if key not in owned)
    predicted = 2 * (
        measured.layers * (measured.whole_bytes + measured.split_bytes + measured.attention_bytes)
        + measured.first_bytes
        + measured.last_bytes
    )
    assert predicted == pytest.approx(real, rel=0.1)


def test_a_module_without_blocks_is_one_block():
    profile = profile_module(f"{HERE}.Classifier", [], precision="32", tokens=None, inputs=None)
    assert (profile.layers, profile.tensor_splits, profile.tokens) == (1, False, 1)
    assert profile.parameters == sum(p.numel() for p in Classifier().parameters())
    assert profile.block_flops == 2 * 64 * 27 * 5 + 2 * 320 * 10


def test_counting_needs_no_run():
    profile = count_module(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), name="mlp")
    assert (profile.layers, profile.block_parameters, profile.first_parameters) == (4, 72, 0)
    assert not profile.can_split(2)


def test_what_runs_after_the_blocks_is_counted_there_wherever_it_is_declared():
    profile = profile_module(f"{HERE}.HeadFirst", [], precision="32", tokens=None, inputs="4x4:float32")
    assert (profile.first_parameters, profile.last_parameters) == (5 * 8, 9 * 2)


def test_a_dry_run_builds_modules_whose_initializers_read_values():
    (report,) = dry(f"{HERE}:HeadFirst", "1x1xcpu", {}).ranks
    assert (report.error, report.parameters) == (None, 4 * (5 * 8 + 4 * 72 + 9 * 2))
