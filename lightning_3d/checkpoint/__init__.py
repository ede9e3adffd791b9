"""Checkpoints that any layout saves and any other loads."""

from lightning_3d.checkpoint.keeper import CheckpointFormat as CheckpointFormat
from lightning_3d.checkpoint.keeper import Keeper as Keeper
from lightning_3d.checkpoint.last import watching_last as watching_last
from lightning_3d.checkpoint.load import load_optimizer as load_optimizer
from lightning_3d.checkpoint.load import load_weights as load_weights
from lightning_3d.checkpoint.placement import Splits as Splits
