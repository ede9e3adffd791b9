"""The laws of compressed gradients: exact bytes, no loss over time, the same bits on every rank."""

import pytest
import torch
import torch.distributed as dist

from lightning_3d.axes.ledger import Ledger
from lightning_3d.comm import compression as compression_module
from lightning_3d.comm.compression import CODECS, Half, Int8
from lightning_3d.comm.grad_sync import CommConfig, build_collectives, build_compression
from lightning_3d.errors import CheckpointError, ConfigurationError
from lightning_3d.layout import COMPRESSED_BYTES
from tests.axes.rings import ring
from tests.workers import on_ranks

KINDS = ["bf16", "fp16", "int8", "powersgd"]


def _compression(kind, **options):
    ledger = Ledger()
    collectives = ring(dist.new_group(), ledger)
    return build_compression(CommConfig(grad_compression=kind, **options), collectives), ledger


def _mine(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def _mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _same_on_all(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in others)


@pytest.mark.parametrize("kind", COMPRESSED_BYTES)
def test_a_codec_sends_the_bytes_that_the_planner_prices(kind):
    rows = torch.randn(2, 4096)
    assert CODECS[kind].encode(rows, [4096]).nbytes == COMPRESSED_BYTES[kind] * rows.numel()


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("bf16", 96 * 64 * 2),
        ("fp16", 96 * 64 * 2),
        ("int8", 2 * (3 * 1024 + 3 * 4)),  # two halves of 3072 numbers and 3 scales
        ("powersgd", (96 + 64) * 2 * 4),
    ],
)
@on_ranks(2)
def test_bytes_on_two_ranks(kind, size):
    compression, ledger = _compression(kind, powersgd_rank=2)
    compression.all_reduce([_mine(96, 64)], ["w"])
    assert ledger.bytes() == size  # 2 (N - 1) / N = 1


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_quadratic_converges(kind):
    """Each rank pulls towards its own matrix; together they must reach the mean, as without compression."""
    compression, _ = _compression(kind, powersgd_rank=1)
    target, weight = _mine(12, 10), torch.zeros(12, 10)
    best, errors = _mean(target), []
    for _ in range(400):
        gradient = weight - target
        compression.all_reduce([gradient], ["w"])
        weight -= 0.05 * gradient
        errors.append((weight - best).norm().item() / best.norm().item())
    assert _same_on_all(weight)
    assert errors[-1] < 0.02


def _lost_in_many_steps(compression):
    """Over many steps the sum of what was applied is the sum of the gradients, up to what one step still holds."""
    gradient, applied = _mine(24, 16), torch.zeros(24, 16)
    for _ in range(50):
        sent = gradient.clone()
        compression.all_reduce([sent], ["w"])
        applied += sent
    return ((applied / 50 - _mean(gradient)).norm() / _mean(gradient).norm()).item()


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 1e-3), ("fp16", 1e-4), ("int8", 1e-3), ("powersgd", 0.5)])
@on_ranks(3)
def test_error_feedback_gives_back_what_was_lost(kind, tolerance):
    assert _lost_in_many_steps(_compression(kind, powersgd_rank=1)[0]) < tolerance


def _in_portions(numbers):
    """Two steps with portions of `numbers`: averages, what is still to be added, and for each message how many had ended."""
    compression_module.PORTION = numbers
    compression, ledger = _compression("int8")
    began, ended = [], []
    swap = compression.collectives.begin_swap

    def begin_swap(*given):
        began.append(len(ended))
        end = swap(*given)
        return lambda: ended.append(end())

    compression.collectives.begin_swap = begin_swap
    for step in range(2):
        gradients = [_mine(40, 30, seed=10 * step + index) for index in range(4)]
        compression.all_reduce(gradients, list("abcd"))
        shards = [torch.empty(600) for _ in range(2)]
        compression.reduce_scatter(shards, [_mine(1200, seed=7 + index) for index in range(2)], list("ef"), [30, 30])
    return [*gradients, *shards], compression.state_dict(), ledger.bytes(), began


@on_ranks(2)
def test_portions_travel_while_others_are_encoded_and_change_no_bit():
    whole, kept, sent, _ = _in_portions(1 << 20)
    parts, kept_in_parts, sent_in_parts, began = _in_portions(1000)
    assert sent == sent_in_parts
    assert all(map(torch.equal, whole, parts))
    assert kept.keys() == kept_in_parts.keys()
    assert all(torch.equal(kept[key], kept_in_parts[key]) for key in kept)
    assert began[:4] == [0, 0, 1, 1]  # the next portion leaves before the one before it has arrived


@on_ranks(2)
def test_powersgd_is_exact_where_the_rank_suffices():
    """A mean that has no more than `powersgd_rank` dimensions is found exactly, and what is small stays exact."""
    compression, _ = _compression("powersgd", powersgd_rank=2)
    shared = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    gradient, bias = shared @ _mine(2, 30), _mine(30)
    mean, bias_mean = _mean(gradient), _mean(bias)
    compression.all_reduce([gradient, bias], ["w", "b"])
    torch.testing.assert_close(bias, bias_mean)
    torch.testing.assert_close(gradient, mean, atol=1e-4, rtol=1e-4)
    full, _ = _compression("powersgd", powersgd_rank=30)
    gradient = _mine(40, 30)
    mean = _mean(gradient)
    full.all_reduce([gradient], ["w"])
    torch.testing.assert_close(gradient, mean)


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.01), ("fp16", 0.001), ("int8", 0.03), ("powersgd", 0.8)])
@on_ranks(3)
def test_reduce_scatter(kind, tolerance):
    """Reduce-scatter gives this rank's part of what a compressed mean is."""
    compression, ledger = _compression(kind, powersgd_rank=8)
    size, rank = dist.get_world_size(), dist.get_rank()
    weight, bias = _mine(8 * size, 32), _mine(size)
    outputs = [torch.empty(8 * 32), torch.empty(1)]
    expected = [_mean(tensor).view(size, -1)[rank] for tensor in (weight, bias)]
    compression.reduce_scatter(outputs, [weight.view(-1), bias], ["w", "b"], [32, 1])
    error = (torch.cat(outputs) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert error < tolerance
    assert ledger.bytes() > 0


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_the_memory_is_training_state(kind):
    """Going on from a state is the same as never having stopped."""
    first, _ = _compression(kind, powersgd_rank=1)
    second, _ = _compression(kind, powersgd_rank=1)
    for step in range(3):
        first.all_reduce([_mine(12, 10, seed=step)], ["w"])
    second.load_state_dict(first.state_dict())
    results = []
    for compression in (first, second):
        gradient = _mine(12, 10, seed=9)
        compression.all_reduce([gradient], ["w"])
        results.append(gradient)
    assert torch.equal(*results)
    with pytest.raises(CheckpointError, match="not a tensor"):
        second.load_state_dict({"w": 3})


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.01), ("int8", 0.03)])
@on_ranks(4)
def test_only_what_leaves_a_node_is_encoded(kind, tolerance):
    """Two nodes of two ranks: gradients of odd sizes, as an average and as shards of one."""
    config = CommConfig(grad_sync="hierarchical", ranks_per_node=2, grad_compression=kind)
    ledger = Ledger()
    collectives = build_collectives(config, dist.new_group(), ledger, "data")
    compression = build_compression(config, collectives)
    weight, bias = _mine(31, 33), _mine(7)
    means = _mean(weight), _mean(bias)
    compression.all_reduce([weight, bias], ["w", "b"])
    assert _same_on_all(weight) and _same_on_all(bias)
    sent = {axis: ledger.bytes(f"data.{axis}") for axis in ("inside", "between")}
    shards, wholes = [torch.empty(8 * 32), torch.empty(2)], [_mine(32, 32).view(-1), _mine(8)]
    shares = [_mean(whole).view(4, -1)[dist.get_rank()] for whole in wholes]
    compression.reduce_scatter(shards, wholes, ["v", "c"], [32, 1])
    errors = [
        ((got.view(-1) - mean.view(-1)).norm() / mean.norm()).item()
        for got, mean in zip([weight, bias, *shards], [*means, *shares], strict=True)
    ]
    assert max(errors) < tolerance
    rows = 512 + 4  # a rank's half of both gradients, padded
    encoded = {"bf16": 2 * rows, "int8": rows + 2 * 4 * 2}[kind]  # int8: a scale for each half of each gradient
    assert sent["inside"] == 2 * 4 * rows  # one of two parts, there and back, in fp32
    assert sent["between"] == encoded


@on_ranks(4)
def test_nothing_is_lost_between_nodes():
    config = CommConfig(grad_sync="hierarchical", ranks_per_node=2, grad_compression="int8")
    collectives = build_collectives(config, dist.new_group(), Ledger(), "data")
    assert _lost_in_many_steps(build_compression(config, collectives)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_overflow_shows_and_is_forgotten(kind):
    """An overflow reaches every rank (a loss scaler looks for it) and leaves the memory clean."""
    compression, _ = _compression(kind)
    gradient = _mine(12, 10)
    if dist.get_rank() == 0:
        gradient[0, 0] = float("inf")
    compression.all_reduce([gradient], ["w"])
    assert not gradient.isfinite().all()
    assert all(value.isfinite().all() for value in compression.memory.values())


@pytest.mark.parametrize("codec", [Half(torch.bfloat16), Half(torch.float16), Int8(8)], ids=["bf16", "fp16", "int8"])
@pytest.mark.parametrize("width", [1, 8, 21])
def test_codecs_decode_what_they_encode(codec, width):
    rows = torch.randn(3, width) * torch.tensor([[1e-3], [1.0], [1e3]])
    decoded = codec.decode(codec.encode(rows, [width]), [width])
    assert decoded.shape == rows.shape
    assert ((decoded - rows).abs() <= rows.abs().amax(1, keepdim=True) / 127).all()
    assert codec.decode(codec.encode(torch.zeros(2, width), [width]), [width]).eq(0).all()


@pytest.mark.parametrize("codec", [Half(torch.bfloat16), Int8(8)], ids=["bf16", "int8"])
def test_what_a_parameter_becomes_does_not_depend_on_those_beside_it(codec):
    shared, beside = torch.randn(2, 11), 100 * torch.randn(2, 5)
    alone = codec.decode(codec.encode(shared, [11]), [11])
    after = codec.decode(codec.encode(torch.cat([beside, shared], dim=1), [5, 11]), [5, 11])[:, 5:]
    assert after.equal(alone)


def test_fp16_clamps_what_is_finite():
    codec = Half(torch.float16)
    decoded = codec.decode(codec.encode(torch.tensor([[1e6, float("-inf")]]), [2]), [2])
    assert decoded.tolist() == [[65504.0, float("-inf")]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_sync": "star"}, "'ring', 'native', 'hierarchical'"),
        ({"grad_compression": "int4"}, "'bf16', 'fp16', 'int8', 'powersgd'"),
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        CommConfig(**options)
