"""Copies of tensors that a module has computed, for the `memo` of `copy.deepcopy`."""

from torch import Tensor, nn


def copies_of_computed(module: nn.Module) -> dict[int, Tensor]:
    """Copies without a graph, by identity, of the tensors with one on `module`: `weight_norm` makes such weights.

    `copy.deepcopy` refuses these tensors.
    """
    attributes = (value for part in module.modules() for value in vars(part).values())
    return {
        id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor) and not value.is_leaf
    }
