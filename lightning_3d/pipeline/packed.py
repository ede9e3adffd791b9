"""Objects of any kind on their way from the last stage, which runs a step to its end, to the other ranks."""

import pickle
import warnings
from typing import Any

from torch import Tensor

from lightning_3d import talk
from lightning_3d.pipeline.microbatch import map_leaves

_SENT = (Tensor, str, bytes, int, float, complex, bool, type(None))


class Packed(bytes):
    """An object (a figure, an image of a logger's own kind), pickled."""


def packed(what: str, value: Any) -> tuple[Any, ...]:
    """`value` as it can be sent; nothing, and a warning, where it cannot."""
    try:
        return (map_leaves(lambda leaf: leaf if isinstance(leaf, _SENT) else Packed(talk.pickled(leaf)), value),)
    except Exception as error:  # any failure to pickle means the same: it stays behind
        warnings.warn(
            f"{what} that cannot be sent to other ranks ({type(error).__name__}: {error}). Under a pipeline only the"
            " last stage has it, and loggers are on rank 0: it is left out. Do that in on_train_batch_end.",
            stacklevel=2,
        )
        return ()


def unpacked(arguments: Any) -> Any:
    return map_leaves(lambda leaf: pickle.loads(leaf) if isinstance(leaf, Packed) else leaf, arguments)
