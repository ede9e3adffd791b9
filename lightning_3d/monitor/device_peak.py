"""The rate of floating-point operations that a device could reach."""

from typing import get_args

import torch

from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.local_cluster import catalogue_name
from lightning_3d.planner.states import Precision


def device_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of matrix products of `device`, where the catalogue has it."""
    if device.type != "cuda":
        return None
    name = catalogue_name(torch.cuda.get_device_name(device))
    known: Precision = precision if precision in get_args(Precision) else "32"  # type: ignore[assignment]
    return None if name is None else Catalogue.load().find(name).peak(known)
