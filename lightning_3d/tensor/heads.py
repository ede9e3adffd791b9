"""Heads of a module: linears as wide as an embedding has rows, whose results no other product takes.

The width alone says little: a fused matrix of queries, keys and values may be as wide by chance, and feeds a product.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.sandbox.interceptor import Call, Rule
from lightning_3d.sandbox.trees import leaves


class NoteHeads(Rule):
    """Follow the results of such linears of `module`, to find those that no other product takes."""

    def __init__(self, module: nn.Module) -> None:
        rows = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
        self.names: dict[nn.Module, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if isinstance(child, nn.Linear) and child.out_features in rows:
                self.names.setdefault(child, []).append(name)
        self.handles = [child.register_forward_hook(self._ran) for child in self.names]
        self.called, self.taken = set[nn.Module](), set[nn.Module]()
        self.origins: Any = WeakTensorKeyDictionary()
        """The linears from which a tensor was computed."""

    @property
    def found(self) -> frozenset[str]:
        """Names of the heads that ran."""
        return frozenset(name for head in self.called - self.taken for name in self.names[head])

    def _ran(self, head: nn.Module, _: Any, result: Any) -> None:
        self.called.add(head)
        self.origins.update({tensor: frozenset((head,)) for tensor in _floating(result)})

    def after(self, call: Call, result: Any) -> None:
        if not self.called:
            return
        operands = list(_floating((call.args, call.kwargs)))
        origins = frozenset[nn.Module]().union(*(self.origins.get(tensor, ()) for tensor in operands))
        if any(isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in operands):
            self.taken |= origins
        elif origins:
            changed = operands[:1] if call.name == "__setitem__" else []
            self.origins.update(dict.fromkeys((*_floating(result), *changed), origins))


def _floating(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
