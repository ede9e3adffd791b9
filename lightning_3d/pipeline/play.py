"""Runs the part of a step that belongs to one stage, on one microbatch."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_3d.errors import PipelineSplitError, UnsupportedError, is_meta_error
from lightning_3d.pipeline.rehearsal import StagePart, StepTrace
from lightning_3d.pipeline.stage import Cut, StagePlay
from lightning_3d.pipeline.traced_tensor import refuse_placeholders
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import isolated_buffers
from lightning_3d.sandbox.trees import leaves, untrace

if TYPE_CHECKING:
    from lightning_3d.pipeline.pipeline import Pipeline


def play(
    pipeline: "Pipeline", trace: StepTrace, part: StagePart, title: str, name: str, args: tuple[Any, ...], seed: int,
    received: list[Tensor], record: Record, expected: Any = None, *, real: bool = False,
    earlier: int | None = None, draws: bool = True,
) -> Any:  # fmt: skip
    """Run one part of a step on a microbatch.

    Args:
        real: True in training. In a rehearsal, code of the step for rank 0 only does not run.
        earlier: the seed of random numbers that are drawn before the part, if it is another one.
        draws: False to raise where the step draws random numbers up to the end of the part.

    Returns:
        The tensors that cross the cut behind the part; behind the last one the output of the step.
    """
    player = StagePlay(trace, part, title, received, seed, pipeline.wire.device, earlier, draws=draws)
    player.expected = expected
    undo = () if player.final else trace.changed
    ends = refuse_placeholders if player.final else None
    recording = pipeline.recorder.recording(record, ends, speaks=real and player.final and pipeline.acts_as_rank_zero)
    with isolated_buffers(pipeline.module, undo), player, pipeline.gates.directed(player), recording, rank_local():
        try:
            output = pipeline.call(name, args, seed if earlier is None else earlier)
        except Cut:
            return player.outputs()
        except (RuntimeError, TypeError) as error:
            if is_meta_error(error):
                raise _absent(title, str(error)) from error
            raise
    if not player.final:
        raise PipelineSplitError(
            f"{title}: the step ended before it reached a block of a later stage, which in its rehearsal on the same"
            " shapes it called. Which blocks run must not depend on batch_idx, the epoch or values (`return None` for"
            " some batches): leave these batches out of the loader, multiply their loss by 0, or use"
            " pipeline_parallel_size=1."
        )
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(output)) and player.device.type != "meta":
        raise _absent(title, "its output has no values")
    refuse_placeholders(output)
    return untrace(output)


def _absent(title: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{title}: the step reads a weight or buffer of a block that another stage owns, which it did not before"
        f" training ({why}): does a penalty, or a log of weights, begin after some batches? Compute it in"
        " every step, multiplied by 0 until then, so that this stage has it too; for a penalty use the optimizer's"
        " weight_decay; or use pipeline_parallel_size=1."
    )
