"""An unsplit copy of the module that takes the same steps as the placed one."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.sandbox.computed_tensors import copies_of_computed
from lightning_3d.sandbox.snapshot import Watched, put_changes
from lightning_3d.sandbox.trees import copied, loss_of

_ELSE = "Use verify='replicas', or no verify."


class UnsplitCopy:
    """Made before `module` is placed. The user's hooks are not run for it: it copies what they change.

    It does not copy weights: other checks compare those of shards.
    """

    def __init__(self, module: LightningModule) -> None:
        known = [module.__dict__.get("_trainer"), module.__dict__.get("_fabric"), module.__dict__.get("_device_mesh")]
        memo = {id(each): each for each in known if each is not None}
        memo.update(copies_of_computed(module))
        try:
            self.module: Any = copy.deepcopy(module, memo)
        except Exception as error:
            raise UnsupportedError(
                f"verify='first_step' needs a copy of the module, and {type(module).__name__} cannot be copied"
                f" ({type(error).__name__}: {error}). Remove what cannot be copied (a lock, an open file) from its"
                f" attributes. {_ELSE}"
            ) from error
        self.module.trainer = module._trainer  # no copy of a LightningModule has one, whatever memo deepcopy gets
        self.originals = list(module.modules())
        self.hooked: set[int] = set()
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Remember the state of `module`. What differs at the next `follow` was changed by its hooks."""
        self.attributes = Watched(module)
        self.buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}

    def follow(self, module: nn.Module) -> None:
        """Copy the changes of `module`, which trains, since the last look."""
        put_changes(self.module, copied(self.attributes.changes()))
        modes = {name: part.training for name, part in module.named_modules()}
        buffers = dict(module.named_buffers())
        for name, part in self.module.named_modules():
            part.training = modes.get(name, part.training)
        for name, buffer in self.module.named_buffers():
            self._follow_buffer(name, buffer, buffers.get(name))
        for name, parameter in module.named_parameters():
            mine = self.module.get_parameter(name)
            mine.requires_grad_(parameter.requires_grad)
            for key, hook in (parameter._backward_hooks or {}).items():
                if key not in self.hooked:
                    self.hooked.add(key)
                    mine.register_hook(hook)

    def _follow_buffer(self, name: str, mine: Tensor, now: Tensor | None) -> None:
        seen, version = self.buffers.get(name, (None, 0))
        if now is None or now.is_meta or now.shape != mine.shape:  # another stage's, or a part
            return
        if now is not seen or now._version != version:
            with torch.no_grad():
                mine.copy_(now)

    def loss(self, args: tuple[Any, ...]) -> Tensor | None:
        """The loss of a step on a copy of the batch, which a step may change."""
        handles = [part.register_forward_pre_hook(_refuse) for part in self.originals]
        try:
            return loss_of(self.module.training_step(*copied(args)))
        except Exception as error:
            raise UnsupportedError(
                f"verify='first_step' also runs training_step on a copy of the module, where it failed"
                f" ({type(error).__name__}: {error}). If it does not fail without verify, a lambda or an inner function"
                f" uses the original module instead of the copy: make it a method. {_ELSE}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()


def _refuse(part: nn.Module, _: Any) -> None:
    raise RuntimeError(f"it called {type(part).__name__} of the module itself")
