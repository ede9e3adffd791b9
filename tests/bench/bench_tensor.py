"""A step in tensor parallel shards against the same Llama with a hand-written `parallelize_module` plan.

`python -m tests.bench.bench_tensor [width] [steps]`: two gloo ranks, steps of both interleaved, medians printed.
"""

import copy
import statistics
import sys
import time
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests import workers


def llama(width):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4, use_cache=False,
            num_attention_heads=8, num_key_value_heads=4,
        )
    )  # fmt: skip


def by_hand(module, mesh):
    for layer in module.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in columns}
        parallelize_module(
            layer, mesh, plan | {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        )


def step(module, batch):
    start = time.perf_counter()
    module.zero_grad()
    loss = module(input_ids=batch, labels=batch).loss
    loss.backward()
    return time.perf_counter() - start, loss.item()


def race(width, steps):
    torch.manual_seed(0)
    ours, batch = llama(width), torch.randint(0, 1000, (2, 64))
    theirs = copy.deepcopy(ours)
    mesh = init_device_mesh("cpu", (2,))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_tensor(ours, 2, calls=record_calls(ours, lambda: ours(input_ids=batch, labels=batch)))
    planning = time.perf_counter() - start
    plan = type(plan)(plan.size, plan.units, {}, {n: s for n, s in plan.splits.items() if n not in plan.vocabulary}, {})
    apply_tensor(ours, plan, mesh, UndoStack())
    by_hand(theirs, mesh)
    times = {"ours": [], "by hand": []}
    for number in range(steps + 3):
        for name, module in (("ours", ours), ("by hand", theirs)):
            took, loss = step(module, batch)
            if number >= 3:
                times[name].append(took)
    return {name: statistics.median(took) for name, took in times.items()} | {"planning": planning, "loss": loss}


if __name__ == "__main__":
    width, steps = (int(text) for text in (*sys.argv[1:], "256", "20")[:2])
    found = workers.run(race, width, steps, world=2, group=True, timeout=300)[0]
    print({name: round(value, 4) for name, value in found.items()}, f"ratio {found['ours'] / found['by hand']:.2f}")
