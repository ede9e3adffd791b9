"""Heads of a module: linears as wide as an embedding has rows, whose results no other product takes.

The width alone says little: a fused matrix of queries, keys and values may be as wide by chance, and feeds a product.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.sandbox.trees import leaves


class Ends(TorchFunctionMode):
    """While entered, follows what is computed from the results of such linears of `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        rows = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
        self.names: dict[nn.Module, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, nn.Linear) and child.out_features in rows:
                self.names.setdefault(child, []).append(name)
        self.handles = [child.register_forward_hook(self._ran) for child in self.names]
        self.called, self.taken = set[nn.Module](), set[nn.Module]()
        self.origins: Any = WeakTensorKeyDictionary()
        """From which of the linears a tensor was computed."""

    @property
    def found(self) -> frozenset[str]:
        """Names of the heads that ran."""
        return frozenset(name for head in self.called - self.taken for name in self.names[head])

    def _ran(self, head: nn.Module, _: Any, result: Any) -> None:
        self.called.add(head)
        self.origins.update({tensor: frozenset((head,)) for tensor in _floating(result)})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.called:
            return result
        operands = list(_floating((args, kwargs)))
        origins = frozenset[nn.Module]().union(*(self.origins.get(tensor, ()) for tensor in operands))
        if any(isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in operands):
            self.taken |= origins
        elif origins:
            changed = operands[:1] if getattr(func, "__name__", "") == "__setitem__" else []
            self.origins.update(dict.fromkeys((*_floating(result), *changed), origins))
        return result


def _floating(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
