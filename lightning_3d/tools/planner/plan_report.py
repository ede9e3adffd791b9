"""Plans as tables for people."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from lightning_3d.layout import Layout
from lightning_3d.module.amounts import show_bytes, show_count, show_dollars, show_seconds
from lightning_3d.optim.state_bytes import number_bytes
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import PlannedMemory, layers_on_rank
from lightning_3d.tools.planner.priced_layout import Plan

Columns = dict[str, tuple[Callable[[Plan], Any], Callable[[Any], str]]]
"""Name of a column of the table of plans -> its value, and the text of the value."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    cells = [
        [text.rjust(width) if _is_number(text) else text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for row in (header, *rows)
    ]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def plans_table(plans: Sequence[Plan], columns: Columns) -> str:
    """One line per plan. Where it is too wide, what all plans share is said above, then the least columns go."""
    shown = {
        name: [show(value(plan)) for plan in plans]
        for name, (value, show) in columns_that_differ(plans, columns).items()
    }
    wide, above = room(), ""
    if len(plans) > 1 and _width(shown) > wide:
        shared = {name: texts[0] for name, texts in shown.items() if len({*texts}) == 1}
        above = f"all: {', '.join(f'{name} {text}' for name, text in shared.items())}\n" if shared else ""
        shown = {name: texts for name, texts in shown.items() if name not in shared}
    for name in LEAST:
        if _width(shown) > wide:
            shown.pop(name, None)
    return above + table(tuple(shown), list(zip(*shown.values(), strict=True)))


def _width(shown: dict[str, list[str]]) -> int:
    return sum(2 + max(map(len, (name, *texts))) for name, texts in shown.items()) - 2


def room() -> int:
    """Columns of the terminal; very many where the output is none."""
    return get_terminal_size().columns if sys.stdout.isatty() else 1000


def folded(text: str) -> str:
    """`text` with lines that break between words where the terminal ends."""
    lines = (wrap(line, room(), subsequent_indent="  ", **UNBROKEN) for line in text.splitlines())
    return "\n".join(map("\n".join, lines))


def columns_that_differ(plans: Sequence[Plan], columns: Columns) -> Columns:
    """`columns` without those that say the usual of every plan."""

    def usual(name: str) -> bool:
        value, show = columns[name]
        return all(show(value(plan)) == QUIET.get(name) for plan in plans)

    return {name: column for name, column in columns.items() if not usual(name)}


UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
LEAST = ("MFU", "limited by", "step", "schedule", "recompute", "cost")
"""Columns that a narrow terminal does without, the first first."""
QUIET = {"schedule": "-", "recompute": "none", "offload": "none", "context": "1", "experts": "1", "cost": "-"}
"""Text of a column that says nothing."""


def recompute_name(plan: Plan) -> str:
    """`full`, or with the blocks of the first pipeline rank that are computed again: `full 3/8`."""
    share, blocks = plan.job.options.recomputed, layers_on_rank(plan.job.profile, plan.layout)
    part = f" {round(share * blocks)}/{blocks}" if plan.layout.recompute == "full" and share < 1 else ""
    return plan.layout.recompute + part


_DEFAULTS = {field.name: field.default for field in fields(Layout)}
COLUMNS: Columns = {
    "data": (lambda plan: plan.layout.data_parallel_size, str),
    "tensor": (lambda plan: plan.layout.tensor_parallel_size, str),
    "pipe": (lambda plan: plan.layout.pipeline_parallel_size, str),
    "ZeRO": (lambda plan: plan.layout.zero_stage, str),
    "context": (lambda plan: plan.job.options.context, str),
    "experts": (lambda plan: plan.job.options.experts, str),
    "schedule": (lambda plan: schedule_name(plan.layout), str),
    "micro": (lambda plan: (plan.microbatches, plan.micro), lambda sizes: f"{sizes[0]}x{sizes[1]}"),
    "recompute": (recompute_name, str),
    "offload": (lambda plan: plan.job.options.offload or plan.layout.offload, str),
    "per rank": (lambda plan: (plan.peak.total, plan.tight), lambda size: show_bytes(size[0]) + " tight" * size[1]),
    "step": (lambda plan: plan.time.total, show_seconds),
    "MFU": (lambda plan: plan.mfu, "{:.1%}".format),
    "time": (lambda plan: plan.seconds, show_seconds),
    "cost": (lambda plan: plan.dollars, lambda dollars: "-" if dollars is None else show_dollars(dollars)),
    "limited by": (lambda plan: plan.time.limit, str),
}
COMPARED: Columns = {
    "accelerator": (lambda plan: plan.cluster.accelerator.name, str),
    "devices": (lambda plan: plan.cluster.devices, str),
    **COLUMNS,
}
"""With the columns in which plans on several accelerators differ."""


def call_of(plan: Plan) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Arguments of the Trainer, those of the strategy, and the loader's batch, to train as priced.

    The data axis takes the rest of the devices.
    """
    options = plan.job.options
    given = {name: value for name, value in vars(plan.layout).items() if name != "data_parallel_size"}
    if plan.layout.recompute == "full" and options.recomputed < 1:
        kept = max(memory.activations + memory.head for memory in plan.memory)
        given |= {"recompute": "auto", "recompute_budget": f"{kept / 1e9:.3g}GB"}
    given |= {"context_parallel_size": options.context, "expert_parallel_size": options.experts}
    given |= {"grad_compression": options.compression} if options.compression else {}
    given |= {"offload": {options.offload: "cpu"}} if options.offload else {}
    trainer = {
        "devices": plan.cluster.devices_per_node,
        "num_nodes": plan.cluster.nodes,
        "precision": plan.job.precision,
    }
    if not plan.layout.pipelined and plan.microbatches > 1:
        trainer["accumulate_grad_batches"] = plan.microbatches
    strategy = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
    return trainer, strategy, plan.micro * (plan.microbatches if plan.layout.pipelined else 1)


def strategy_line(plan: Plan) -> str:
    if plan.job.options.not_run:
        return f"not run by this package: {', '.join(plan.job.options.not_run)}"
    trainer, strategy, batch = call_of(plan)
    call = f"Trainer({_arguments(trainer)}, strategy=Strategy3D({_arguments(strategy)}))"
    return f"{call} with a loader of batch_size={batch}"


def strategy_block(plan: Plan) -> list[str]:
    """Lines to copy: the call that trains as priced, and the same for Hydra."""
    if plan.job.options.not_run:
        return [strategy_line(plan)]
    trainer, strategy, batch = call_of(plan)
    overrides = " ".join(f"++trainer.{name}={value}" for name, value in trainer.items())
    parts = ("_target_:lightning_3d.Strategy3D", *(f"{name}:{_hydra(value)}" for name, value in strategy.items()))
    hydra = f'{overrides} "++trainer.strategy={{{", ".join(parts)}}}"'
    return [
        "to train so:",
        *_indented(f"strategy = Strategy3D({_arguments(strategy)})"),
        *_indented(f"trainer = Trainer({_arguments(trainer)}, strategy=strategy)"),
        *_indented(f"loader = DataLoader(dataset, batch_size={batch})"),
        "with Hydra:",
        *_indented(hydra, end=" \\"),
    ]


def _indented(code: str, end: str = "") -> list[str]:
    """`code` in lines of at most 80 columns, that break between arguments; all but the last have `end`."""
    lines = wrap(code, 78, initial_indent="    ", subsequent_indent="        ", **UNBROKEN)
    return [*(line + end for line in lines[:-1]), lines[-1]]


def _arguments(given: dict[str, Any]) -> str:
    texts = {name: json.dumps(value) if isinstance(value, str) else repr(value) for name, value in given.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{each}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def sent_line(plan: Plan) -> str:
    """Bytes that the fullest rank sends in a step, by axis."""
    most = max(map(plan.sent, plan.layout.ends), key=lambda sent: sum(sent.values()))
    parts = [f"{show_bytes(size)} {axis.partition('_')[0]}" for axis, size in most.items()]
    return f"sent by a rank in a step: {', '.join(parts) or 'nothing'}"


def setup_line(plan: Plan) -> str:
    host = plan.job.profile.parameters * number_bytes(plan.job.precision).weight
    return f"set-up: each rank builds the unsplit module, {show_bytes(host)}, unless `configure_model` builds it"


def schedule_name(layout: Layout) -> str:
    if not layout.pipelined:
        return "-"
    return layout.schedule + (f" v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else "")


def memory_table(plan: Plan) -> str:
    """Memory per rank, a line for the first and one for the last pipeline rank; turned where that is too wide."""
    parts = (field.name for field in fields(PlannedMemory))
    names = [name for name in parts if any(getattr(memory, name) for memory in plan.memory)]
    ranks = ["every rank"] if len(plan.memory) == 1 else ["first stage", "last stage"]
    rows = [("memory", "total", *names)] + [
        (rank, show_bytes(memory.total), *(show_bytes(getattr(memory, name)) for name in names))
        for rank, memory in zip(ranks, plan.memory, strict=True)
    ]
    text = table(rows[0], rows[1:])
    if max(map(len, text.splitlines())) <= room():
        return text
    turned = list(zip(*rows, strict=True))
    return table(turned[0], turned[1:])


def time_line(plan: Plan) -> str:
    """Where the seconds of a step go, largest first."""
    parts = sorted(((seconds, name) for name, seconds in asdict(plan.time).items() if seconds > 0), reverse=True)
    return ", ".join(f"{name} {100 * seconds / plan.time.total:.1f}%" for seconds, name in parts)


def job_lines(job: Job) -> list[str]:
    profile = job.profile
    active = f" ({show_count(profile.active)} active)" if profile.active < profile.parameters else ""
    what = f"{profile.name}: {show_count(profile.parameters)} parameters{active}, {profile.layers} blocks"
    slices = job.options.context  # of each sample; the job counts them
    if profile.tokens > 1:
        what += f", {profile.tokens * slices} tokens a sample"
    data = (
        f"{show_count(job.samples * profile.tokens)} tokens"
        if profile.tokens > 1
        else f"{show_count(job.samples)} samples"
    )
    steps = f"{data} in {job.steps:,.0f} steps of {job.batch // slices:,} samples, {job.precision}, {job.optimizer}"
    return [what, steps]


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in ("$", "-")
