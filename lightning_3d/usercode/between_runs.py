"""Parameters of a module that is in shards between two runs: code may ask for all but their values.

A number computed from a shard is a part of a sum, and differs by rank. No rules of a hook run here, so it is refused.
States are exchanged in full, and a forward of a module gathers what it needs.
"""

import sys
from functools import cache
from typing import Any

from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import tree_leaves
from lightning_3d.module.undo import UndoStack
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.sandbox.without_values import WithoutValues

_NAME = "lightning_3d_name"
"""Attribute of a parameter at rest: its name, for errors."""
_BY_STATES = (Tensor.detach, Tensor.copy_)
"""Functions by which torch's modules read and set states."""


class _AtRest(WithoutValues):
    """Added to the class of a parameter until the next run."""

    @classmethod
    def use_values(cls, func: Any, args: Any, kwargs: Any) -> None:
        of_state = func in _BY_STATES and sys._getframe(2).f_code.co_filename == nn.modules.module.__file__
        if func is not Tensor.__repr__ and not of_state:
            found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _AtRest)]
            weight, name = vars(found[0])[_NAME], getattr(func, "__name__", func)
            raise UnsupportedError(
                f"Code between two runs uses values of {weight} ({name}). An earlier run has left the module"
                " in shards: each rank would compute with its own. For full values, call state_dict() of the module on"
                " every rank, and to set them load_state_dict(). Do other things in a hook of the module"
                ' (on_fit_start), or use teardown="whole" in the earlier run.'
            )


@cache
def _at_rest(kind: type) -> Any:
    return type(f"{kind.__name__}AtRest", (_AtRest, kind), {"__slots__": (), "plain": kind})


class BetweenRuns:
    """Keeps a module in shards between two runs. A forward of it, or of a module inside, gathers and frees."""

    def __init__(self, parallel: ParallelModule) -> None:
        self.parallel, self.depth = parallel, 0
        self.name = type(parallel.module).__name__
        self.undo = UndoStack()
        self.undo.callback(self._resume)
        for each in parallel.module.modules():
            enter = self._enter if parallel.stages is None else self._refuse
            self.undo.callback(each.register_forward_pre_hook(enter, prepend=True).remove)
            if parallel.stages is None:
                self.undo.callback(each.register_forward_hook(self._leave, always_call=True).remove)
        self._suspend()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{self.name} cannot be copied or pickled (copy.deepcopy, torch.save): an earlier run has left it in"
            " shards, and a copy could not exchange them. Use trainer.save_checkpoint, build the module again and pass"
            ' the checkpoint as ckpt_path=. Or use teardown="whole" in the earlier run.'
        )

    def end(self) -> None:
        """Make the parameters usable, at the start of a run."""
        self.undo.close()

    def _suspend(self) -> None:
        for name, parameter in self.parallel.module.named_parameters():
            vars(parameter)[_NAME] = f"{self.name}.{name}"
            _at_rest(type(parameter)).hide(parameter)

    def _resume(self) -> None:
        for parameter in self.parallel.module.parameters():
            if isinstance(parameter, _AtRest):
                del vars(parameter)[_NAME]
                parameter.show()

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise UnsupportedError(
            f"{type(module).__name__} was called between two runs. An earlier run has left {self.name} in shards, and"
            " this rank has only its stage of the pipeline. Call it in predict_step, by trainer.predict, or use"
            ' teardown="whole" in the earlier run.'
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.depth == 0:
            self._resume()
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.parallel.data.reshard()
            self._suspend()
