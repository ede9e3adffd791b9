"""Several ranks on one card: real kernels in every layout, where NCCL would refuse the second rank of a device."""

from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class SharedCard(CUDAAccelerator):
    """Gives each rank the first card. Their messages need `process_group_backend="gloo"`."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cuda", 0)] * devices

    def __repr__(self) -> str:
        return "SharedCard()"
