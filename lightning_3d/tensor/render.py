"""A tensor plan as text: a tree of splits, and of unsplit modules with the reasons."""

import re
from collections.abc import Iterator

from torch import nn

from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.tensor_plan import TensorPlan, UnitPlan


def render_plan(plan: TensorPlan, module: nn.Module) -> str:
    """The plan for `module`, which may be on meta, as text.

    Blocks of one kind share an entry. Parameters on a rank and bytes on the wire are counted.
    """
    lines = [f"{type(module).__name__}: tensor parallel over {plan.size} ranks"]
    for names, unit in _kinds(plan):
        title = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} blocks)"
        lines.append(f"├── {title or '(the module itself)'}")
        lines += [f"│   ├── {line}" for line in _unit_lines(unit)]
        wire = unit.summed_per_position
        sent = f"{wire} elements summed per position and step, each block ({_sent(wire, plan.size)} sent)"
        lines.append(f"│   └── {sent}{', its sequence divided in between' if unit.sequence is not None else ''}")
    for name, split in plan.vocabulary.items():
        lines.append(f"├── {name}: by vocabulary, {_sizes(split)}")
    unsplit: dict[tuple[str, str], int] = {}
    for name, why in plan.unsplit.items():
        key = (re.sub(r"\d+", "*", name) or "(the module itself)", why)
        unsplit[key] = unsplit.get(key, 0) + 1
    lines += [
        f"├── {name} stays unsplit{f' ({count} of them)' if count > 1 else ''}: {why}"
        for (name, why), count in unsplit.items()
    ]
    total, local = count_parameters(plan, module)
    lines.append(f"└── parameters on a rank: {local:,} of {total:,} ({local / max(total, 1):.0%})")
    return "\n".join(lines)


def count_parameters(plan: TensorPlan, module: nn.Module) -> tuple[int, int]:
    """Number of elements of all parameters, and of those on the first tensor rank."""
    total = local = 0
    for name, parameter in module.named_parameters():
        split = plan.splits.get(name)
        total += parameter.numel()
        local += parameter.numel() if split is None else parameter.numel() // split.size * split.local_size(0)
    return total, local


def _kinds(plan: TensorPlan) -> Iterator[tuple[list[str], UnitPlan]]:
    names: list[str] = []
    previous: UnitPlan | None = None
    for name, unit in plan.units.items():
        if previous is not None and unit != previous:
            yield names, previous
            names = []
        names, previous = [*names, name], unit
    if previous is not None:
        yield names, previous


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


def _sent(elements: int, size: int) -> str:
    return f"{2 * (size - 1) * elements * 4 // size:,} bytes in fp32"
