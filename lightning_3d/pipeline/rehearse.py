"""Learning and proving how a step is cut, on one microbatch, before any of that shape is trained on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_3d.errors import DivergenceError, PipelineSplitError
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.attributes import Attributes
from lightning_3d.pipeline.buffers import changed, marks, open_buffers, undone
from lightning_3d.pipeline.gates import hooked_inside
from lightning_3d.pipeline.holders import contents_kept, holders
from lightning_3d.pipeline.prints import Print, differ, fingerprint, unlike
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.rehearsal import Rehearsal, Trace
from lightning_3d.pipeline.relay import Relay
from lightning_3d.pipeline.schedule import SPLIT
from lightning_3d.pipeline.traced import untrace
from lightning_3d.pipeline.whole import Whole

if TYPE_CHECKING:
    from lightning_3d.pipeline.runner import Pipeline


def rehearse(pipeline: "Pipeline", step: str, args: tuple[Any, ...], seed: int, uncut: Whole | None = None) -> Trace:
    """Run the whole step, then the step in stages, and compare; the latter once for all shapes that are cut alike.

    Every rank of the pipeline calls this with the same microbatch. Random streams, buffers and the modules' own plain
    attributes are as before afterwards; nothing is logged.

    Args:
        uncut: what the same step did before the module was cut; then gradients are compared too.
    """
    with seeds.set_aside():
        with as_before(pipeline.module):
            whole, trace, result = _run_whole(pipeline, step, args, seed)
        _agree(pipeline, trace, seed)
        key = (step, trace.pattern, pipeline.trained)
        if uncut is not None or key not in pipeline.proven:
            pipeline.proven[key] = _run_in_stages(pipeline, step, args, seed, whole, trace, result, uncut)
    return replace(trace, unreached=pipeline.proven[key])


def _run_in_stages(
    pipeline: "Pipeline",
    step: str,
    args: tuple[Any, ...],
    seed: int,
    whole: Rehearsal,
    trace: Trace,
    result: Any,
    uncut: Whole | None,
) -> frozenset[str]:
    relay = Relay(pipeline, trace)
    with as_before(pipeline.module):
        relay.forward(step, args, seed, whole, result)
        if uncut is not None:
            relay.problem = _unlike_uncut(uncut, whole, result) or relay.problem or _other_buffer(pipeline, uncut)
    _raise_if_any(pipeline, relay.problem)
    unreached = relay.unreached()
    if (uncut is not None and uncut.grads) or pipeline.schedule in SPLIT:
        stages = [grads for rank in pipeline.wire.agree(relay.backward()) for grads in rank]
        _raise_if_any(pipeline, relay.problem)
        if uncut is not None:
            _compare_gradients(pipeline, stages, uncut)
    return unreached


def _raise_if_any(pipeline: "Pipeline", problem: str | None) -> None:
    """Every rank raises what is wrong on any."""
    problems = [text for text in pipeline.wire.agree(problem) if text]
    if problems:
        raise PipelineSplitError(problems[0])


def _run_whole(pipeline: "Pipeline", step: str, args: tuple[Any, ...], seed: int) -> tuple[Rehearsal, Trace, Any]:
    whole = Rehearsal(pipeline.split, pipeline.wire, pipeline.stage_rank, seed)
    record = Record()
    attributes = Attributes(pipeline.module, pipeline.counts)
    before = marks(pipeline.module, open_buffers(pipeline.module, list(pipeline.split.holders)))
    with whole, pipeline.gates.directed(whole), pipeline.taps.recording(record, whole.use_at_end), torch.enable_grad():
        result = pipeline.call(step, args, seed)
        whole.use_at_end((result, list(attributes.changes().values())))
    trace = replace(whole.trace_of_step(), changed=changed(pipeline.module, before))
    return whole, trace, fingerprint(untrace(result))


def _agree(pipeline: "Pipeline", trace: Trace, seed: int) -> None:
    """All ranks must have learnt the same, or messages would not match."""
    seeds_drawn = set(pipeline.wire.agree(seed))
    if len(seeds_drawn) > 1:
        raise DivergenceError(
            f"The ranks of a pipeline drew {len(seeds_drawn)} different random seeds for one step. Seed torch's default"
            " generator alike on all of them: they run the same step on the same batch."
        )
    text = repr([trace.changed, *([(item.node, item.spec) for item in part.after] for part in trace.parts)])
    if len(set(pipeline.wire.agree(text))) > 1:
        raise PipelineSplitError(
            "The ranks of a pipeline saw different tensors cross the cuts in the rehearsal. They must have the same"
            " batch, and the step must not depend on the rank."
        )


def _unlike_uncut(uncut: Whole, whole: Rehearsal, result: Any) -> str | None:
    """What differs from the module before it was cut."""
    for at, unit in enumerate(uncut.calls):
        if at in whole.arguments and differ(whole.arguments[at], uncut.arguments[at], uncut.rounding):
            return f"{unit!r} gets other inputs once the module is cut. {_BESIDE}"
    if differ(result, uncut.result, uncut.rounding):
        return f"The step returns another result once the module is cut. {_BESIDE}"
    return None


def _compare_gradients(pipeline: "Pipeline", stages: list[dict[str, Print]], uncut: Whole) -> None:
    name = unlike(uncut.grads, stages, uncut.rounding)
    if name is None:
        return
    differs = f"Cut into stages, the step gives {name!r} another gradient than the whole module does"
    hooked = hooked_inside(pipeline.module, list(pipeline.split.holders))
    if hooked:
        nearest = max(hooked, key=lambda inner: len(inner) if name.startswith(f"{inner}.") else 0)
        raise PipelineSplitError(
            f"{differs}: {nearest!r}, which is inside of a block, has a forward hook, and what a hook takes there is"
            " missing in the loss on every other stage (the router's loss of Hugging Face's mixtures of experts is made"
            " of such values: output_router_logits=True). Return it from the block, leave that term out, or use"
            " pipeline_parallel_size=1."
        )
    raise PipelineSplitError(
        f"{differs}, from the same outputs. Code between the blocks changes gradients in a way that was not seen (a"
        " hook on a node of the graph, say): move it into a block, or use a hook of the tensor."
    )


def _other_buffer(pipeline: "Pipeline", uncut: Whole) -> str | None:
    """What is wrong with the buffers of this rank's blocks, and on the last stage with those around blocks."""
    outside = set(open_buffers(pipeline.module, list(pipeline.split.holders)))
    for name, buffer in pipeline.module.named_buffers():
        mine = not buffer.is_meta and (name not in outside or pipeline.holds_last)
        if mine and name in uncut.buffers and differ(fingerprint(buffer), uncut.buffers[name], uncut.rounding):
            return (
                f"Cut into stages, the step leaves another value in the buffer {name!r} than whole. Give the module"
                " that owns it a parameter, so that it is placed on a stage, or change it behind the last block."
            )
    return None


_BESIDE = (
    "A block before it must be telling it something beside its arguments (a tensor kept on a module, or taken by a hook"
    " inside of a block), or the step draws from a random generator of its own, or changes its batch in place. Pass it"
    " from block to block, or keep both on one stage with pipeline_split; draw from torch's default generator; write"
    " x = x * 2 instead of x.mul_(2)."
)


@contextmanager
def as_before(module: Any) -> Iterator[None]:
    """Put back buffers and plain attributes that a step changes, also those of objects that the user keeps (meters).

    Tensors too: a result that a block leaves on itself would look to a later block of another stage like the one that
    its own step leaves.
    """
    buffers = [name for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta]
    with ExitStack() as stack:
        for holder in holders(module):
            stack.enter_context(contents_kept(holder))
            stack.enter_context(Attributes(holder).apart())
        stack.enter_context(undone(module, buffers))
        yield
