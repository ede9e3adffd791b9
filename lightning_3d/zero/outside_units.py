"""Large modules outside of the blocks, as units of their own: embeddings and heads are freed when they are not used.

An embedding is gathered for its call. A head, or another module, is gathered from its first call until its backward.
Each is gathered once for a step, as the root's parameters are, and nothing waits for it at the start.

[Note: reads] A step may read such a weight without a call of its module: `F.linear(x, self.embed.weight)`. A read of a
gathered weight keeps it until the end of backward. At the first read of a sharded one all ranks gather it together, and
from then on it is gathered for whole steps, as the root's parameters are. A read is noticed where Python looks into
`_parameters`. Gradients that come after the reduction of a unit are reduced at the end of backward.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import distributed as dist
from torch import nn

from lightning_3d.errors import PeerError
from lightning_3d.module.torch_private import in_backward
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks import talk
from lightning_3d.zero import fsdp_private, fsdp_unit_private
from lightning_3d.zero.shard_units import looks_up


class OutsideUnit:
    """One sharded module outside of the blocks. It has parameters of its own, and no module inside that has some."""

    def __init__(
        self, module: nn.Module, name: str, ranks: dist.ProcessGroup, gathered: Callable[[Any], None], undo: UndoStack
    ) -> None:
        (self.group,) = fsdp_private.groups_at(module)
        self.name, self.ranks, self.gathered = name, ranks, gathered
        self.in_step = self.held = self.whole_steps = False
        self.early = True
        """True until a call in this step has its backward reduce the gradients."""
        fsdp_unit_private.reduce_in_backward(self.group, lambda: self.early and not self.whole_steps, self._reduces)
        fsdp_unit_private.hook_outputs(fsdp_private.state_of(module))
        if looks_up(module):
            fsdp_unit_private.not_in_backward(self.group)
        vars(module)["_parameters"] = _Parameters(self, module._parameters)
        undo.callback(lambda: vars(module).update(_parameters=dict(module._parameters)))

    def begin(self) -> None:
        self._release()
        self.in_step = True
        if self.whole_steps:
            self._gather()

    def end(self) -> None:
        """End a step, or a backward in it."""
        if self.held:
            fsdp_private.reshard([self.group])
        self._release()
        self.in_step = False

    def before_look(self) -> None:
        """Keep what is gathered until the end of backward: the code outside of the module sees it."""
        if not self.whole_steps and self.group.is_unsharded and not fsdp_unit_private.in_forward(self.group):
            self.hold()

    def hold(self) -> None:
        """Keep what is gathered until the end of the strategy's backward."""
        self.held = True
        fsdp_unit_private.free_in_backward(self.group, False)

    def before_read(self) -> None:
        """Gather the parameters for code that reads them."""
        self.before_look()
        if not self.in_step or self.group.is_unsharded or fsdp_unit_private.in_forward(self.group):
            return
        self._meet()
        if not in_backward():
            self.whole_steps = True
            fsdp_unit_private.keep_gathered(self.group)
        self._gather()

    def _gather(self) -> None:
        fsdp_private.gather(self.group)
        self.gathered(self.group)

    def _meet(self) -> None:
        """Wait for the other ranks, which must gather at the same time."""
        if self.ranks.size() == 1:
            return
        try:
            talk.meet(f"A read of {self.name}", dist.get_process_group_ranks(self.ranks))
        except PeerError as error:
            raise PeerError(
                f"The step reads a parameter of {self.name} without a call of {self.name}. zero_stage=3 keeps it"
                f" sharded between calls: all ranks read it, or none. zero_stage=2 has it on every rank. ({error})"
            ) from error

    def _reduces(self) -> None:
        self.early = False

    def _release(self) -> None:
        self.held, self.early = False, True
        fsdp_unit_private.free_in_backward(self.group, True)


class _Parameters(dict[str, Any]):
    """The parameters of a module, which tell its unit when Python looks at them. See [Note: reads]."""

    def __init__(self, unit: OutsideUnit, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.unit = unit

    def __getitem__(self, name: str) -> Any:
        self.unit.before_read()
        return super().__getitem__(name)

    def items(self) -> Any:
        self.unit.before_look()
        return super().items()

    def values(self) -> Any:
        self.unit.before_look()
        return super().values()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
