"""What the bench for GPUs computes itself, where there is none."""

import pytest

from tests.bench.bench_gpu import SMALL, Large, flops, hidden_share, measure
from tests.workers import run


def _kernel(name, begin, end):
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_the_hidden_share_is_that_of_messages_beside_other_kernels():
    events = [_kernel("gemm", 0, 10), _kernel("add", 8, 14), _kernel("gemm", 20, 30), {"cat": "cpu_op", "name": "x"}]
    assert hidden_share(events) is None
    assert hidden_share([*events, _kernel("ncclDevKernel_AllReduce", 12, 22)]) == pytest.approx(0.4)
    assert hidden_share([*events, _kernel("ncclDevKernel_AllReduce", 14, 20)]) == 0
    copied = {**_kernel("Memcpy HtoD (Pinned -> Device)", 10, 20), "cat": "gpu_memcpy"}
    assert hidden_share([*events, copied]) == pytest.approx(0.4)


def test_operations_are_six_for_each_parameter_and_token():
    module = Large(**SMALL)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert flops(module) == 8 * 16 * (6 * parameters + 6 * 4 * 16 * 64)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [None, {"zero_stage": 3}])
def test_it_runs_on_cpus_too(strategy):
    world = 1 if strategy is None else 2
    for rank in run(measure, strategy, world, True, world=world, timeout=200):
        assert rank["seconds"] > 0
        assert (rank["kept"] > 0) == (strategy is not None)
