"""Show how a module would be sharded: the tensor plan, the blocks of each stage, parameters per rank."""

import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.errors import PlannerError
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.layout import Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.parallel.parallel_plan import keep_within_stages, plan_pipeline, with_whole
from lightning_3d.parallel.state_counts import parameters_on
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.tensor_plan import TensorPlan, UnitPlan
from lightning_3d.tools.planner.module_source import FAILURES, build_inputs, build_module, error_line


def render_plan(plan: TensorPlan, module: nn.Module) -> str:
    """The plan for `module`, which may be on meta, as text.

    Blocks of one kind share an entry. Parameters on a rank and bytes on the wire are counted.
    """
    lines = [f"{type(module).__name__}: tensor parallel over {plan.size} ranks"]
    for unit, alike in groupby(plan.units.items(), itemgetter(1)):
        names = [name for name, _ in alike]
        title = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} blocks)"
        lines.append(f"├── {title or '(the module itself)'}")
        lines += [f"│   ├── {line}" for line in _unit_lines(unit)]
        wire = unit.summed_per_position
        size = f"{2 * (plan.size - 1) * wire * 4 // plan.size:,} bytes in fp32"
        sent = f"{wire} elements summed per position and step, each block ({size} sent)"
        lines.append(f"│   └── {sent}{', its sequence divided in between' if unit.sequence is not None else ''}")
    for name, split in plan.vocabulary.items():
        lines.append(f"├── {name}: by vocabulary, {_sizes(split)}")
    unsplit = Counter((re.sub(r"\d+", "*", name) or "(the module itself)", why) for name, why in plan.unsplit.items())
    lines += [
        f"├── {name} stays unsplit{f' ({count} of them)' if count > 1 else ''}: {why}"
        for (name, why), count in unsplit.items()
    ]
    total, local = sum(parameter.numel() for parameter in module.parameters()), parameters_on(module, 0, None, plan)
    lines.append(f"└── parameters on a rank: {local:,} of {total:,} ({local / max(total, 1):.0%})")
    return "\n".join(lines)


def _unit_lines(unit: UnitPlan) -> Iterator[str]:
    for name, split in unit.splits.items():
        sections = f" in {len(split.sections)} fused sections {split.sections}" if len(split.sections) > 1 else ""
        yield f"{name}: dimension {split.dim}{sections}, {_sizes(split)}"
    for name, split in unit.slices.items():
        yield f"{name}: full on each rank, which computes with {_sizes(split)}"
    for name, numbers in unit.routes.items():
        yield f"{name}: whole experts, {_sizes(numbers)}"
    if unit.owners:
        counts = [list(unit.owners.values()).count(rank) for rank in range(max(unit.owners.values()) + 1)]
        yield f"{next(iter(unit.owners))} and those beside it: whole experts, {', '.join(map(str, counts))} of a rank"
    for name in unit.mixes:
        yield f"{name}: unsplit, on the gathered channels of all ranks"
    for name in unit.emits:
        yield f"{name}: unsplit on each rank, which computes its shard from the result"
    for (name, path), values in unit.attributes.items():
        yield f"{name}{'.' if name else ''}{path}: {', '.join(map(str, dict.fromkeys(values)))}"
    for name, widths in unit.decoys.items():
        yield f"{name or 'the block'} gets its input {', '.join(map(str, dict.fromkeys(widths)))} wide"


def _sizes(split: TensorSplit) -> str:
    sizes = [split.local_size(rank) for rank in range(split.ranks)]
    shown = str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
    return f"{shown} of {split.size}"


EXAMPLE = """\
examples:
  lightning-3d inspect my_package.model.LitGPT --arg layers=4 --tensor 2 --pipeline 2
  lightning-3d inspect my_package.model.LitGPT --tensor 2 --inputs 8x128:int64
"""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="module.Class of a LightningModule or nn.Module")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="argument of module.Class")
    parser.add_argument("--inputs", metavar="SHAPE:DTYPE", help="one input of forward, as in 8x128:int64")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor_parallel_size (default 1)")
    parser.add_argument("--experts", type=int, default=1, metavar="N", help="expert_parallel_size (default 1)")
    parser.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline_parallel_size (default 1)")


def run(args: Namespace) -> int:
    """Print the plans that training would use, if it calls the blocks in the same way."""
    module = build_module(args.model, args.arg)
    layout = Layout(
        tensor_parallel_size=args.tensor, pipeline_parallel_size=args.pipeline, expert_parallel_size=args.experts
    )
    print("\n".join(describe(module, layout, args.inputs)))
    return 0


def describe(module: nn.Module, layout: Layout, inputs: str | None = None) -> Iterator[str]:
    split, tensor, experts = plan_pipeline(module, Anatomy.of(module), layout, None), None, None
    if layout.expert_parallel_size > 1:
        experts = plan_experts(module, layout.expert_parallel_size)
        yield experts.line.strip()
    if layout.tensor_parallel_size > 1:
        given = build_inputs(inputs) if inputs else getattr(module, "example_input_array", None)
        if given is not None and type(module).forward in (LightningModule.forward, nn.Module.forward):
            raise PlannerError(
                f"--inputs are those of `forward`, and {type(module).__name__} has none: leave them out, or give the"
                " module inside that has one."
            )
        calls = None if given is None else record_calls(module, lambda: _call(module, given))
        tensor = keep_within_stages(
            plan_tensor(module, layout.tensor_parallel_size, tensor_plan=with_whole(None, experts), calls=calls), split
        )
        yield render_plan(tensor, module)
    if split is not None:
        yield split.describe()
    total = sum(parameter.numel() for parameter in module.parameters())
    for stage in range(split.num_stages if split else 1):
        count = parameters_on(module, stage, split, tensor, experts)
        ranks = f"each of the {layout.tensor_parallel_size} tensor ranks" if tensor else "each rank"
        yield f"stage {stage}: {ranks} has {count:,} of {total:,} parameters ({count / max(total, 1):.0%})"


def _call(module: nn.Module, given: object) -> None:
    inputs = given if isinstance(given, tuple | list) else (given,)
    try:
        with torch.no_grad():
            module(*inputs)
    except FAILURES as error:
        raise PlannerError(f"{type(module).__name__} cannot be run on its inputs ({error_line(error)}).") from error
