"""Steps that change weights by themselves: a target network that follows, weights that are clamped, an embedding's
`max_norm`.

A run of the step ahead of training must not be seen in the weights, and where a rank computes with copies of weights
that it drops after the step (ZeRO), or runs the step in pieces (a pipeline), the change would be lost or made twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import UnsupportedError, WritesError
from lightning_3d.ranks.shards import local


class RaiseAgain(TorchFunctionMode):
    """What it has `refused` is what who entered it gets, also where code inside makes something else of the error, as
    `load_state_dict` does."""

    refused: UnsupportedError | None = None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self.refused is not None and error is not self.refused:
            raise self.refused from error


class WeightWrites(RaiseAgain):
    """While entered, sees parameters change in place, also through `.data` or another view of them.

    Args:
        named: the parameters, asked for at each write: what a module has may change within a step.
        before: called with a parameter's name and itself before what looks like a write.
        after: called with its name and the function after what was one.
    """

    def __init__(
        self,
        named: Callable[[], Iterator[tuple[str, Tensor]]],
        *,
        before: Callable[[str, Tensor], None] = lambda *_: None,
        after: Callable[[str, Any], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.named, self.before, self.after = named, before, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        targets = self._targets(func, args, kwargs or {})
        for name, parameter, _, _ in targets:
            self.before(name, parameter)
        result = func(*args, **(kwargs or {}))
        for name, _, tensor, version in targets:
            if tensor._version != version or _has_no_version(func):
                try:
                    self.after(name, func)
                except WritesError as error:
                    self.refused = error
                    raise
        return result

    def _targets(self, func: Any, args: Any, kwargs: Any) -> list[tuple[str, Tensor, Tensor, int]]:
        """What `func` may write to of parameters: name, parameter, the tensor that it is given and its version."""
        written = [kwargs.get("out"), *(args[:1] if _in_place(func) else ())]
        tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
        if not tensors:
            return []
        owners = {_memory(parameter): (name, parameter) for name, parameter in self.named()}
        return [(*owners[_memory(item)], item, item._version) for item in tensors if _memory(item) in owners]


def _in_place(func: Any) -> bool:
    """Whether a call may change its first argument, by its name: `mul_`, `__imul__`, `__setitem__`, `p.data = `."""
    name = getattr(func, "__name__", "")
    if name in ("requires_grad_", "detach_"):
        return False
    special = name.startswith("__i") or name == "__setitem__" or assigns_data(func)
    return special or (name.endswith("_") and not name.endswith("__"))


def assigns_data(func: Any) -> bool:
    """Whether a call is `tensor.data = `."""
    return bool(func == Tensor.data.__set__)  # type: ignore[attr-defined]


def _has_no_version(func: Any) -> bool:
    """Whether a call writes and the version does not tell: torch does not count those of DTensors in lists."""
    return assigns_data(func) or getattr(func, "__name__", "").startswith("_foreach")


def _memory(tensor: Tensor) -> int:
    """What a tensor and its views share. Asked for without a mode: it is no computation."""
    with torch._C.DisableTorchFunction():
        return local(tensor).untyped_storage()._cdata


@contextmanager
def writes_undone(module: nn.Module) -> Iterator[None]:
    """Put parameters back that are changed in place. Only those are copied."""
    kept: dict[Tensor, Tensor] = {}

    def keep(_: str, parameter: Tensor) -> None:
        if parameter not in kept:
            kept[parameter] = parameter.detach().clone()

    try:
        with WeightWrites(module.named_parameters, before=keep):
            yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)


def in_place(name: str, why: str) -> WritesError:
    """What to raise for the parameter `name`."""
    return WritesError(
        f"The step changes {name!r} by itself (a target network that follows, clamped weights?), {why}. Do so in"
        " on_train_batch_start or on_train_batch_end."
    )


def no_writes(named: Callable[[], Iterator[tuple[str, Tensor]]], why: str) -> WeightWrites:
    """Raise where one of these parameters is changed in place, which cannot be kept because of `why`."""

    def refuse(name: str, func: Any) -> None:
        if func is not torch.embedding_renorm_:  # `max_norm`: for each row by itself, and twice is as once
            raise in_place(name, why)

    return WeightWrites(named, after=refuse)


class RefuseDataAssignment(TorchFunctionMode):
    """Raise where code assigns to the `.data` of a DTensor, which does nothing: its values are elsewhere."""

    def __init__(self, named: Callable[[], Iterator[tuple[str, Tensor]]], why: str) -> None:
        super().__init__()
        self.named, self.why = named, why

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if assigns_data(func) and isinstance(args[0], DTensor):
            raise in_place(next((name for name, item in self.named() if item is args[0]), "a tensor"), self.why)
        return func(*args, **(kwargs or {}))
