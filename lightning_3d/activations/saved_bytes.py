"""The bytes that autograd keeps for backward, counted as tensors are saved and released."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.sandbox.interceptor import storage


class SavedBytes:
    """Count saved tensors inside of the context; each memory once, and none of `excluded`.

    Tensors that a checkpoint inside saves for its recomputation are its own business and not counted.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.excluded: set[int] = set()
        self.exclude(excluded)
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of `tensors`."""
        self.excluded.update(storage(tensor) for tensor in tensors)

    def add(self, tensor: Tensor) -> "_Saved | None":
        """Count `tensor` until the result is released."""
        key = storage(tensor)
        if key in self.excluded or isinstance(tensor, nn.Parameter):
            return None
        return _Saved(self, key, tensor.untyped_storage().nbytes())

    def __enter__(self) -> "SavedBytes":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        return tensor.detach(), self.add(tensor)  # a result that its own node saves would keep itself alive

    def _unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = packed[0]
        return tensor


class _Saved:
    """A user of a memory."""

    def __init__(self, meter: SavedBytes, key: int, size: int) -> None:
        self.meter, self.key, self.size = meter, key, size
        meter.users[key] += 1
        if meter.users[key] == 1:
            meter.now += size
            meter.peak = max(meter.peak, meter.now)

    def __del__(self) -> None:
        self.meter.users[self.key] -= 1
        if not self.meter.users[self.key]:
            self.meter.now -= self.size
