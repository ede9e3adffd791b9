import pytest
from tests.parity import assert_parity
@pytest.mark.parametrize("name", ["MLP","GPT","Encoder","Llama"])
@pytest.mark.parametrize("kw", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2), dict(tensor_parallel_size=2, zero_stage=1, _w=4), dict(pipeline_parallel_size=2, zero_stage=1, _w=4),dict(pipeline_parallel_size=2, zero_stage=0, _w=4),dict(pipeline_parallel_size=2, tensor_parallel_size=2, _w=4)], ids=str)
def test_x(name, kw):
    kw=dict(kw); w=kw.pop("_w",2)
    assert_parity(name, w, kw, trainer={"gradient_clip_val":0.5}, timeout=60)
