"""The card for a Trainer."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from tests.device.card import NAME


class CardAccelerator(Accelerator):
    """Each rank has the card of its own process."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME

    def teardown(self) -> None:
        """Nothing to end."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return "CardAccelerator()"
