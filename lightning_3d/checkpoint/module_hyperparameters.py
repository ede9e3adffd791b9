"""Hyperparameters that are modules, which a checkpoint leaves out: their weights are in it by name.

`save_hyperparameters()` in `__init__(self, net)` refers to the network itself. During training its blocks have hooks
and shards of weights. A pickle of it would fail, or contain the shards of one rank.
"""

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d.sandbox.trees import leaves

KEYS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)


def without_modules(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return `checkpoint` without hyperparameters that contain a part of `module` with parameters."""
    parts = {id(part) for part in module.modules() if next(part.parameters(), None) is not None}
    result = dict(checkpoint)
    for key in KEYS:
        values = checkpoint.get(key)
        if isinstance(values, dict):
            names = [name for name, value in values.items() if any(id(leaf) in parts for leaf in leaves(value))]
            result[key] = {name: value for name, value in values.items() if name not in names}
            if names:
                _warn(names)
    return result


def _warn(names: list[str]) -> None:
    rank_zero_warn(
        f"Checkpoints have no hyperparameter {', '.join(names)}: it is a module, whose weights are in the checkpoint by"
        f" name. Pass it to load_from_checkpoint(..., {names[0]}=...). Without this warning:"
        f" save_hyperparameters(ignore={names})."
    )
