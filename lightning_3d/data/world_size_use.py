"""A search for the user's data code that reads the number of all ranks instead of the data ranks."""

from types import FrameType

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

_WORLD_SIZE = Trainer.world_size.fget.__code__  # type: ignore[attr-defined]


def data_code_that_asks(asker: FrameType) -> str | None:
    """The method of a datamodule, or the dataloader hook of a module, that reads `trainer.world_size`, which runs in
    `asker`."""
    frame = asker.f_back if asker.f_code is _WORLD_SIZE else None
    while frame is not None:
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        makes_loaders = isinstance(owner, LightningModule) and name.endswith("_dataloader")
        if makes_loaders or isinstance(owner, LightningDataModule):
            return f"{type(owner).__name__}.{name}"
        frame = frame.f_back
    return None
