"""Learning and proving how a step is cut, on one microbatch, before any of that shape is trained on."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.errors import DivergenceError, PipelineSplitError
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.backward import leaves_below
from lightning_3d.pipeline.logs import Record
from lightning_3d.pipeline.rehearsal import Rehearsal, Trace, differ, fingerprint
from lightning_3d.pipeline.step import loss_of, play
from lightning_3d.pipeline.traced import untrace

if TYPE_CHECKING:
    from lightning_3d.pipeline.runner import Pipeline

Flights = dict[int, tuple[list[Tensor], Any]]


def rehearse(pipeline: "Pipeline", step: str, args: tuple[Any, ...], seed: int) -> Trace:
    """Run the whole step, then the step in stages, and compare.

    Every rank of the pipeline calls this with the same microbatch. Random streams, buffers and the module's own plain
    attributes are as before afterwards; nothing is logged.
    """
    with as_before(pipeline.module), seeds.set_aside():
        whole, trace, result = _run_whole(pipeline, step, args, seed)
        _agree(pipeline, trace, seed)
        flights: Flights = {}
        problem = _run_in_stages(pipeline, step, args, seed, whole, trace, result, flights)
        problems = [text for text in pipeline.wire.agree(problem) if text]
        if problems:
            raise PipelineSplitError(problems[0])
        return replace(trace, unreached=_unreached(pipeline, flights))


def _run_whole(pipeline: "Pipeline", step: str, args: tuple[Any, ...], seed: int) -> tuple[Rehearsal, Trace, Any]:
    whole = Rehearsal(pipeline.split, pipeline.wire, pipeline.stage_rank, seed)
    record = Record()
    with whole, pipeline.gates.directed(whole), pipeline.taps.recording(record, whole.use_at_end), torch.enable_grad():
        result = pipeline.call(step, args, seed)
        whole.use_at_end(result)
    return whole, whole.trace_of_step(), fingerprint(untrace(result))


def _agree(pipeline: "Pipeline", trace: Trace, seed: int) -> None:
    """All ranks must have learnt the same, or messages would not match."""
    seeds_drawn = set(pipeline.wire.agree(seed))
    if len(seeds_drawn) > 1:
        raise DivergenceError(
            f"The ranks of a pipeline drew {len(seeds_drawn)} different random seeds for one step. Seed torch's default"
            " generator alike on all of them: they run the same step on the same batch."
        )
    text = repr([[(item.node, item.spec) for item in part.after] for part in trace.parts])
    if len(set(pipeline.wire.agree(text))) > 1:
        raise PipelineSplitError(
            "The ranks of a pipeline saw different tensors cross the cuts in the rehearsal. They must have the same"
            " batch, and the step must not depend on the rank."
        )


def _run_in_stages(
    pipeline: "Pipeline", step: str, args: tuple[Any, ...], seed: int, whole: Rehearsal, trace: Trace, result: Any,
    flights: Flights,
) -> str | None:  # fmt: skip
    """Relay the microbatch through the stages without backward. What is wrong on this rank, if anything.

    `flights` is given what each stage of this rank began with and what it ended with.
    """
    problem = None
    received: list[Tensor] = []
    for stage in range(pipeline.split.num_stages):
        if stage in pipeline.my_stages:
            try:
                output = play(
                    pipeline, trace, trace.parts[stage], f"stage {stage}", step, args, seed, received, Record(),
                    whole.arguments,
                )  # fmt: skip
                if stage == pipeline.split.num_stages - 1 and differ(fingerprint(output), result):
                    problem = problem or "Cut into stages, the step returns another result than whole."
                flights[stage] = (received, output)
            except PipelineSplitError as error:
                problem, output = problem or str(error), None
        if stage < pipeline.split.num_stages - 1:
            received = _relay(pipeline, stage, trace, output if stage in pipeline.my_stages else None)
    return problem


def _unreached(pipeline: "Pipeline", flights: Flights) -> frozenset[str]:
    """Parameters of this rank that no backward from the loss comes to, followed back from stage to stage.

    On one device they get no gradient, and optimizers leave them alone. Here zeros come over the wire for what a later
    stage makes of them.
    """
    run: set[int] = set()
    found: set[int] = set()
    used: list[bool] | None = None
    for stage in reversed(range(pipeline.split.num_stages)):
        if stage in flights:
            received, output = flights[stage]
            if used is None:
                loss = loss_of(output)
                ends = [] if loss is None else [loss]
            else:
                run |= leaves_below(output)
                ends = [tensor for tensor, wanted in zip(output, used, strict=True) if wanted]
            below = leaves_below(ends)
            found |= below
            used = [id(tensor) in below for tensor in received]
        used = pipeline.wire.share(used, pipeline.stage_rank[stage], ("reached", stage))
    here = [name for name, parameter in pipeline.module.named_parameters() if not parameter.is_meta]
    return frozenset(name for name in here if id(pipeline.locate(name)) in run - found)


def _relay(pipeline: "Pipeline", stage: int, trace: Trace, output: list[Tensor] | None) -> list[Tensor]:
    specs = trace.specs(stage)
    source, target = pipeline.stage_rank[stage], pipeline.stage_rank[stage + 1]
    tensors = output if output is not None else [spec.empty(pipeline.wire.device).zero_() for spec in specs]
    tensors = [tensor.detach() for tensor in tensors]
    what = f"stage {stage + 1}: rehearsal, microbatch 0, receiving activations from stage {stage}"
    if source != target:
        if pipeline.wire.rank == source:
            pipeline.wire.send(tensors, target, stage, what)
            pipeline.wire.finish()
        if pipeline.wire.rank == target:
            tensors = pipeline.wire.start_receive(specs, source, stage, what).wait()
    return [tensor.requires_grad_(spec.requires_grad) for tensor, spec in zip(tensors, specs, strict=True)]


@contextmanager
def as_before(module: Any) -> Iterator[None]:
    """Put back buffers and plain attributes that a step changes."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    plain = (int, float, str, bool, list, dict, set, tuple, type(None))
    inner = {"_parameters", "_buffers", "_modules", "_hparams"}
    kept = {
        name: copy.copy(value)
        for name, value in module.__dict__.items()
        if type(value) in plain and name not in inner and not name.endswith("_hooks")
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for name, value in kept.items():
            current = module.__dict__.get(name)
            if isinstance(current, list):
                current[:] = value if isinstance(value, list) else current
            elif isinstance(current, dict | set) and type(current) is type(value):
                current.clear()
                current.update(value)
            else:
                module.__dict__[name] = value
