from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_3d.errors import PipelineSplitError, UnsupportedError, is_meta_error
from lightning_3d.pipeline.rehearsal import Part, Trace
from lightning_3d.pipeline.stage import Cut, StagePlay
from lightning_3d.pipeline.traced_tensor import refuse_placeholders
from lightning_3d.ranks.rank_zero import alone
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import isolated_buffers
from lightning_3d.sandbox.trees import leaves, untrace

if TYPE_CHECKING:
    from lightning_3d.pipeline.pipeline import Pipeline


def play(
    pipeline: "Pipeline", trace: Trace, part: Part, title: str, name: str, args: tuple[Any, ...], seed: int,
    received: list[Tensor], record: Record, expected: Any = None, *, real: bool = False,
) -> Any:  # fmt: skip
    """One part of a step on a microbatch: what crosses the cut behind it, or the step's own output at the end.

    Only where it is `real`, and no rehearsal, is done what the step does on rank 0.
    """
    player = StagePlay(trace, part, title, received, seed, pipeline.wire.device)
    player.expected = expected
    undo = () if player.final else trace.changed
    ends = refuse_placeholders if player.final else None
    recording = pipeline.taps.recording(record, ends, speaks=real and player.final and pipeline.speaks)
    with isolated_buffers(pipeline.module, undo), player, pipeline.gates.directed(player), recording, alone():
        try:
            output = pipeline.call(name, args, seed)
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
        raise _absent(title, "what it returns has no values")
    refuse_placeholders(output)
    return untrace(output)


def _absent(title: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{title}: the step reads a weight or buffer of a block that another stage holds, which it did not before"
        f" training ({why}): does a penalty, or what is logged of weights, come in after some batches? Compute it in"
        " every step, multiplied by 0 until then, so that this stage has it too; for a penalty use the optimizer's"
        " weight_decay; or use pipeline_parallel_size=1."
    )
