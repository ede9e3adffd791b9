"""The rule that notes which parameters the user's code reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_3d.sandbox.interceptor import Call, Rule


class NoteReads(Rule):
    """Note parameters whose values a call reads. A call for their shape, dtype or device does not.

    Args:
        names: the names of each parameter to note.
        counts: returns True where the read of a parameter by a function is to be noted.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, Sequence[str]], counts: Callable[[nn.Parameter, Any], bool]
    ) -> None:
        self.names, self.counts = names, counts
        self.found: dict[str, None] = {}
        """Names, in the order of the first reads."""

    def after(self, call: Call, result: Any) -> None:
        if not any(isinstance(leaf, Tensor | float) for leaf in tree_leaves(result)):
            return
        for leaf in call.tensors():
            if isinstance(leaf, nn.Parameter) and leaf in self.names and self.counts(leaf, call.func):
                self.found.update(dict.fromkeys(self.names[leaf]))
