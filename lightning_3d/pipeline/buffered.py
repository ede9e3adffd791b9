"""Whether microbatches leave in buffers what a whole batch does."""

from collections.abc import Callable
from typing import Any

from lightning_3d.pipeline.microbatch import split_batch
from lightning_3d.sandbox.fingerprint import Print, differ, fingerprint
from lightning_3d.sandbox.snapshot import changed, marks, undone

_ROUNDING = 1e-3
_NAMED = 3


def buffers_differ(
    module: Any, loss_of: Callable[[Any, int], float | None], batch: Any, sizes: list[int]
) -> str | None:
    """What to tell a user whose buffers two microbatches, one after the other, change otherwise than both together.

    Args:
        module: of the step, whole. Its buffers are as before afterwards.
        loss_of: runs the step on some rows of the batch, with random streams from a seed.
        batch: all of it.
        sizes: of the microbatches.
    """
    names = [name for name, _ in module.named_buffers()]
    if len(sizes) < 2 or not names:
        return None

    def left(pieces: list[Any], seed: int) -> dict[str, list[Print]]:
        with undone(module, names):
            before = marks(module, names)
            for piece in pieces:
                loss_of(piece, seed)
            return {name: fingerprint(module.get_buffer(name)) for name in changed(module, before)}

    both = split_batch(batch, [sizes[0] + sizes[1], *sizes[2:]])[:1]
    whole = left(both, 0)
    if not whole:
        return None
    again = left(both, 1)
    apart = left(split_batch(batch, sizes)[:2], 0)
    sure = [name for name in whole if name in again and not differ(again[name], whole[name], _ROUNDING)]  # not random
    other = [name for name in sure if name not in apart or differ(apart[name], whole[name], _ROUNDING)]
    if not other:
        return None
    more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
    return (
        f"what they leave in {', '.join(other[:_NAMED])}{more} is not what a whole batch leaves there: each microbatch"
        " changes a buffer once more (running statistics, a power iteration, a count of steps). Change it in"
        " on_train_batch_end instead, or run the whole batch at once with num_microbatches=1."
    )
