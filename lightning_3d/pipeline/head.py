"""Where the head begins that runs once on the whole batch, with `loss_scope="batch"`."""

from collections.abc import Sequence

from lightning_3d.errors import PipelineSplitError
from lightning_3d.pipeline.rehearsal import Carried, Trace

_CONSTANT, _MIXED = -1, -2


def choose_head(whole: Trace, traces: Sequence[Trace]) -> tuple[int, list[int | None]]:
    """The last call of the last stage from which on the step can go on with the whole batch.

    What it goes on with must either be rows that join, or be the same whatever the batch. A first term of the loss,
    say, is neither: then the call before it is where the head begins.

    Returns:
        Index into `Trace.heads`, and the dimension along which each tensor joins, None where all have the same.
    """
    for index, head in enumerate(whole.heads):
        parts = [trace.heads[index].before for trace in traces]
        if any(len(part) != len(head.before) for part in parts):
            continue
        dims = [_joined_dim(carried, [part[at] for part in parts]) for at, carried in enumerate(head.before)]
        if _MIXED not in dims:
            return index, [None if dim == _CONSTANT else dim for dim in dims]
    raise PipelineSplitError(
        "loss_scope='batch': the last stage begins with values that each microbatch has computed from its own rows"
        " (a mean, say), so that they do not join to what the whole batch would give. Name a cut before them with"
        " pipeline_split, or use loss_scope='microbatch'."
    )


def _joined_dim(whole: Carried, parts: Sequence[Carried]) -> int:
    shapes, shape = [part.spec.shape for part in parts], whole.spec.shape
    if all(part == shape for part in shapes):
        return _CONSTANT if all(part.mark == whole.mark for part in parts) else _MIXED
    if any(len(part) != len(shape) for part in shapes):
        return _MIXED
    return next((dim for dim in range(len(shape)) if sum(part[dim] for part in shapes) == shape[dim]), _MIXED)
