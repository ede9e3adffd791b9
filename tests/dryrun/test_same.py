"""What a dry run says of a rank is what the same rank of a real job holds and sends."""

import pytest

from tests.dryrun.compare import dry, real

EXACT = ("parameters", "gradients", "optimizer", "sent", "flops")


def assert_same(name, world, strategy, flags=None, *, timeout=120, peak=0.1, setup=True, exact=EXACT):
    """States, bytes and FLOPs to the last one, peaks within 10%, on every rank.

    `setup` is False where messages of peers ahead of training are larger than the module.
    """
    report = dry(name, f"1x{world}xcpu", strategy, flags, ranks=range(world))
    assert report.errors == ()
    for rank, found in zip(report.ranks, real(name, world, strategy, flags, timeout=timeout), strict=True):
        said = {key: getattr(rank, key) for key in exact}
        assert said == {key: found[key] for key in exact}, f"rank {rank.rank} ({rank.where})"
        assert rank.peak == pytest.approx(found["peak"], rel=peak)
        if setup and "tensor_parallel_size" not in strategy:  # the proof of a tensor plan takes memory too, on the host
            assert rank.setup_peak == pytest.approx(found["setup_peak"], rel=peak)


def test_sharded_data_ranks():
    assert_same("MLP", 2, {"zero_stage": 1})
    # real gradients of whole weights are parts of one message, which also says what was used
    exact = [key for key in EXACT if key != "gradients"]
    # of so few bytes, a message that ends later on a busy machine is a fifth
    assert_same("tests.same.test_optimizers:OnSpheres", 2, {"zero_stage": 3}, exact=exact, peak=0.25)


@pytest.mark.long
def test_tensor_and_pipeline_ranks():
    assert_same("GPT", 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2})


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world", "strategy", "flags"),
    [
        ("GPT", 8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}, {}),
        ("UntiedGPT", 8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 3}, {}),
        ("Llama", 8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"accumulate_grad_batches": 2}),
        ("GPT", 2, {"zero_stage": 3}, {"gradient_clip_val": 1.0}),
        ("GPT", 2, {"zero_stage": 0}, {}),
        ("Encoder", 4, {"tensor_parallel_size": 2, "sequence_parallel": True}, {}),
        ("GPT", 4, {"zero_stage": 3, "zero_shard_size": 2}, {}),
        ("GPT", 4, {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}, {}),
    ],
)
def test_other_layouts(name, world, strategy, flags):
    assert_same(name, world, strategy, flags, timeout=300)


def test_states_in_host_memory_are_no_peak_of_the_device():
    """The plan and the dry run say the same of optimizer states that wait on the host."""
    here, away = (
        dry("GPT", "1x2xcpu", {"zero_stage": 1, "offload": place}, ranks=[0]).ranks[0]
        for place in ("none", {"optimizer": "cpu"})
    )
    assert (here.offloaded, away.offloaded) == ((), ("optimizer",))
    assert away.optimizer == here.optimizer > 0
    assert away.peak <= here.peak - away.optimizer
    assert away.activations == pytest.approx(here.activations, rel=0.2)
