"""Objects that ranks tell each other.

Tensors travel as plain bytes here: pickle would send each through `torch.save`, which users (and Lightning's tests)
replace on some ranks to see how often a rank saves. Their peers would wait for an answer that cannot be read.
"""

import io
import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")
_load = pickle.loads  # as it was when this module was imported, like the Pickler below


class Pickler(pickle.Pickler):
    """Writes tensors by itself, and all else as pickle does."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or value.is_quantized:
            return NotImplemented
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (value.dtype, tuple(value.shape), raw, value.device.type, value.requires_grad)


def pickled(value: Any, pickler: type[pickle.Pickler] = Pickler) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()


def gather(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of `group` has in the place of `mine`, in the order of ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, pickled(mine), group=group)
    return [_load(each) for each in everyone]


def from_first(mine: T, group: dist.ProcessGroup | None = None, first: int = 0) -> T:
    """What the first rank of `group` (or the one numbered `first` in it) has in the place of `mine`. Collective."""
    # the others' own might not be picklable, and is not asked for
    box = [pickled(mine) if dist.get_rank(group) == first else b""]
    dist.broadcast_object_list(box, group=group, group_src=first)
    heard = box[0] and dist.get_rank(group) != first  # in a dry run nothing is
    return _load(box[0]) if heard else mine  # type: ignore[no-any-return]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes, device: str, trained: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(device).requires_grad_(trained)
