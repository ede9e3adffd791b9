"""Whether what a step keeps in attributes is, joined from microbatches, what it keeps of a whole batch."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.microbatch import split_batch
from lightning_3d.sandbox.counts import Counts
from lightning_3d.sandbox.fingerprint import differ, fingerprint
from lightning_3d.sandbox.snapshot import Attributes, Changes, join_changes
from lightning_3d.sandbox.trees import form, map_leaves

_BATCHES = 2
"""What the first one keeps, the second may read (the hidden state of a recurrent net, a queue)."""
_ROUNDING = 1e-3


def joins_differ(module: Any, loss_of: Callable[[Any, int], float | None], batch: Any, sizes: list[int]) -> str | None:
    """What to tell a user whose attributes microbatches change in another way than a whole batch does.

    Args:
        module: of the step. Its attributes must be put back by the caller.
        loss_of: runs the step on some rows of the batch, with random streams from a seed.
        batch: all of it.
        sizes: of the microbatches, of which the first two are compared with both together.

    Raises `UnsupportedError` where microbatches fail with what those of the batch before left.
    """
    if len(sizes) < 2:
        return None
    both = split_batch(batch, [sizes[0] + sizes[1], *sizes[2:]])[0]
    counts = Counts()
    whole = _kept(module, loss_of, [both], [sizes[0] + sizes[1]], 0, counts)
    if not whole:
        return None
    again = _kept(module, loss_of, [both], [sizes[0] + sizes[1]], 1, counts)
    sure = {name: change for name, change in whole.items() if name in again and not _unlike(again[name], change)}
    try:
        apart = _kept(module, loss_of, split_batch(batch, sizes)[:2], sizes[:2], 0, counts)
    except Exception as error:  # of any kind: it is the user's code, on values of other shapes
        fail = f": the next batch's microbatches fail with it ({type(error).__name__}: {error})"
        raise UnsupportedError(f"pipeline_parallel_size cuts batches, but {_said(list(whole), fail)}") from error
    other = [name for name, change in sure.items() if name not in apart or _unlike(apart[name], change)]
    return _said(other, "") if other else None


def _kept(
    module: Any,
    loss_of: Callable[[Any, int], float | None],
    pieces: list[Any],
    sizes: list[int],
    seed: int,
    counts: Counts,
) -> dict[str, Any]:
    """The attributes that a few batches of these microbatches change, as they leave them."""
    with Attributes(module).apart() as kept:
        for _ in range(_BATCHES):
            attributes, runs = Attributes(module, counts), list[Changes]()
            for piece in pieces:
                with attributes.apart() as changes:
                    loss_of(piece, seed)
                runs.append(changes)
            attributes.put(join_changes(runs, sizes, attributes.before, counts))
    return {f"self.{'.'.join(map(str, path))}": value for path, (_, value) in kept.items()}


def _unlike(one: Any, other: Any) -> bool:
    one, other = map_leaves(_as_tensor, one), map_leaves(_as_tensor, other)
    return form(one) != form(other) or differ(fingerprint(one), fingerprint(other), _ROUNDING)


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if isinstance(leaf, int | float) else leaf


def _said(names: list[str], more: str) -> str:
    return (
        f"what training_step keeps in {', '.join(names)} is then not what it keeps of a whole batch{more}: numbers are"
        " averaged over microbatches and tensors joined along dimension 0, which is not what a sum over samples, a"
        " maximum or the hidden state of a recurrent net needs. Keep it in on_train_batch_end, from what the step"
        " returns, or run the whole batch at once with num_microbatches=1."
    )
