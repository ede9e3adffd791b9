"""What the planner expects of a layout on this machine, for `make demo`: its rates are measured first, in a second."""

import os
from dataclasses import replace
from types import MappingProxyType

import torch

from lightning_3d import Layout
from lightning_3d.tools.commands.calibrate import matrix_rate, memory_rate
from lightning_3d.tools.planner import Catalogue, Cluster, Job, Plan
from lightning_3d.tools.planner.memory import rank_parameters
from lightning_3d.tools.planner.priced_layout import price_layout
from lightning_3d.tools.planner.profile_module import profile_module


def forecast(layout: Layout, batch: int) -> Plan:
    """The demo's GPT on as many processes as `layout` has, which share this machine's cores."""
    job = Job(
        profile=profile_module(
            "gpt_from_scratch.ByteGPT", (), precision="32", tokens=None, inputs=f"{batch}x129:int64"
        ),
        samples=batch,
        batch=batch,
        precision="32",
    )
    assert isinstance(layout.num_microbatches, int)
    return price_layout(
        job,
        this_machine(layout.world_size),
        layout,
        micro=batch // layout.data_parallel_size // layout.num_microbatches,
    )


def this_machine(processes: int) -> Cluster:
    """One process to a device; where there are more processes than cores each gets its share of them."""
    share = min(1.0, (os.cpu_count() or 1) / processes)
    cpu, usual = torch.device("cpu"), Catalogue.load().find("cpu")
    rate = matrix_rate(cpu, torch.float32, 512) * share
    device = replace(
        usual,
        peak_tflops=MappingProxyType({"fp32": rate / 1e12}),
        matrix_share=1.0,
        memory_gb_per_s=memory_rate(cpu) * share / 1e9,
        block_launch_us=usual.block_launch_us / share,
        start_us=usual.start_us / share,
        step_us=usual.step_us / share,
    )
    return Cluster(accelerator=device, nodes=1, devices_per_node=processes)


def states_between_steps(plan: Plan) -> list[float]:
    """Bytes of weights, gradients and Adam's moments on a rank of the first and of the last stage."""
    ends = (0, plan.layout.pipeline_parallel_size - 1)
    each = plan.job.per_parameter.total / plan.layout.data_parallel_size  # ZeRO shares all of them between steps
    return [rank_parameters(plan.job.profile, plan.layout, stage) * each for stage in ends]


def beside_the_plan(plan: Plan, held: list[int], seconds: float) -> str:
    """Plan and measurement, line by line."""
    planned = states_between_steps(plan)
    rows = [("a step", f"{plan.time.total * 1e3:.0f} ms", f"{seconds * 1e3:.0f} ms")]
    for rank, which in (("fullest", max), ("emptiest", min)):
        sizes = (f"{which(sizes) / 1e6:.2f} MB" for sizes in (planned, held))
        rows.append((f"weights, gradients and Adam on the {rank} rank", *sizes))
    return "\n".join(f"{what:<48} {left:>10} {right:>10}" for what, left, right in (("", "planned", "measured"), *rows))
