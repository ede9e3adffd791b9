"""Refuses a loader that gives batches of another shape once Lightning has built it anew with its own sampler.

Lightning calls the loader's class again with the arguments of the user's call, and its distributed sampler on top. A
class that chooses by `sampler=None`, as that of scvi-tools does, then collates what its dataset has already batched.

Read in Lightning 2.6.6: `DataConnector._prepare_dataloader`, called for the loaders of every loop before its steps.
"""

from typing import Any

from torch.utils.data import DataLoader

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.first_batch import promised_samples


def check_remade_loaders(trainer: Any, undo: UndoStack) -> None:
    """Compare each loader that Lightning builds anew with the one it was given. `undo` reverts it."""
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepared(loader: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(loader, *args, **kwargs)
        if made is not loader and isinstance(loader, DataLoader) and _batches(made) != _batches(loader):
            raise UnsupportedError(
                f"Lightning builds the {type(loader).__name__} anew, with a sampler that divides it over the data"
                f" ranks. The loader itself {_batches(loader)}, and the new one {_batches(made)}: batches would have"
                " another shape than on one device. Give the loader a sampler that is a torch DistributedSampler,"
                " made with trainer.distributed_sampler_kwargs: Lightning keeps that one. For a package that asks for"
                " the name of the strategy, see docs/packages.md."
            )
        return made

    undo.set(connector, "_prepare_dataloader", prepared)


def _batches(loader: DataLoader[Any]) -> str:
    if loader.batch_sampler is None:
        return "takes what its dataset gives for a batch"
    return f"collates {promised_samples(loader) or 'several'} samples of its dataset"
