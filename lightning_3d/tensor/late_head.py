"""Output heads that no rank divides: large logits are computed when they are used."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, is_plain
from lightning_3d.module.torch_private import backward_hooks, own_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_product import Product, is_large
from lightning_3d.tensor.late_tensor import LateTensor, compute_late, is_part, may_wait
from lightning_3d.tensor.recompute import save_states


def patch_heads(module: nn.Module, blocks: Iterable[str], undo: UndoStack) -> None:
    """Make plain linear heads of `module`, outside of `blocks`, compute large results late. `undo` restores them.

    A block's own linears are no heads. ZeRO 3 also frees a block's weights after its forward.
    """
    undo.callback(save_states())
    inside = {id(part) for name in blocks for part in module.get_submodule(name).modules()}
    for name, part in module.named_modules():
        if id(part) not in inside and is_plain_linear(part) and not part.weight.is_meta:
            add_layer(LateHead(module, name), undo)


class LateNote:
    """Tells the user once that a head computes late."""

    def __init__(self, name: str) -> None:
        self.name, self.noted = name, False

    def once(self, logits: Tensor) -> Tensor:
        """Return `logits`, after the line about them the first time."""
        if not self.noted:
            self.noted = True
            rank_zero_info(
                f"{self.name or 'The head'} gives {logits.numel() * logits.dtype.itemsize / 2**30:.1f} GiB of logits:"
                " F.cross_entropy computes them in parts, any other use computes all."
            )
        return logits


class LateHead(ForwardLayer, rank=Layer.LATE):
    """The forward of the `nn.Linear` called `name` in `root`."""

    def __init__(self, root: nn.Module, name: str) -> None:
        super().__init__(root.get_submodule(name))
        self.hooks, self.note = hooks_around(root, name), LateNote(name)

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        if not (expects_loss(module, self.hooks) and may_wait()):
            return self.next(compute_late(input))
        if is_part(input) or not is_large(input, module.out_features):
            return self.next(input)
        rows, product = Product.of(compute_late(input), module.weight, module.bias)
        split = TensorSplit.even(rows.dim() - 1, module.out_features, 1)
        return self.note.once(LateTensor.of(rows, split, None, product=product))


def hooks_around(root: nn.Module, name: str) -> list[Mapping[int, object]]:
    """The backward hooks of the module called `name` in `root`, and of those that contain it.

    Not the modules: Dynamo cannot reach the wrapper of `torch.compile(model)` from inside of it.
    """
    parts = name.split(".") if name else []
    modules = [root.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return [hooks for module in modules for hooks in backward_hooks(module)]


def expects_loss(head: nn.Module, hooks: Sequence[Mapping[int, object]]) -> bool:
    """Return True in a training step without backward hooks around `head`, which get the gradient of full results."""
    return head.training and torch.is_grad_enabled() and not any(hooks)


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for torch's linear with a parameter as weight. A computed one (spectral_norm) changes on access."""
    return isinstance(module, nn.Linear) and "weight" in own_parameters(module) and is_plain(module, nn.Linear)
