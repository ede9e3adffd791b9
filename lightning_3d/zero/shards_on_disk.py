"""Shards of parameters that are on a disk: read just before they are gathered, one unit ahead."""

from pathlib import Path
from typing import Any

from torch import nn

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.offload.disk_file import PAGE, DiskFile
from lightning_3d.offload.disk_tensors import SMALL, DiskTensor, DiskTransfers, FetchedTensors
from lightning_3d.ranks import agreement
from lightning_3d.zero.fsdp_unit_private import around_gather, shard_memory


class ShardsOnDisk:
    """The shards of FSDP2's groups in `file`."""

    def __init__(self, transfers: DiskTransfers, file: DiskFile) -> None:
        self.transfers, self.file = transfers, file
        self.items: dict[Any, list[DiskTensor]] = {}
        self.of: dict[nn.Parameter, DiskTensor] = {}
        """The tensor on the disk of each sharded parameter. Small parameters are in memory."""
        self._following: dict[Any, Any] = {}
        """The group that follows two consecutive gathers. After one alone, forward and backward differ."""
        self._last: tuple[Any, Any] = (None, None)
        self._used: dict[Any, FetchedTensors] = {}

    @classmethod
    def reserve(cls, transfers: DiskTransfers, folder: str, module: nn.Module, layout: Layout) -> "ShardsOnDisk":
        """A file in `folder` with room for this rank's shards of `module`. Collective; raises on every rank."""
        ranks = layout.shards
        here = [parameter for parameter in module.parameters() if not parameter.is_meta]

        def reserve() -> ShardsOnDisk:
            file = DiskFile(Path(folder))
            file.reserve(sum(-(-parameter.nbytes // ranks) + PAGE for parameter in here), "the parameters")
            return cls(transfers, file)

        return agreement.together(reserve, ConfigurationError)

    def add(self, group: Any) -> None:
        shards = {
            param.sharded_param: memory
            for param in group.fsdp_params
            if (memory := shard_memory(param))[0].nbytes >= SMALL
        }
        names = [tuple(parameter.shape) for parameter in shards]
        self.transfers.check(sum(memory[0].nbytes for memory in shards.values()), f"a block with shapes {names[:3]}")
        stored = [item for memory in shards.values() for item in self.transfers.store(self.file, [memory])]
        self.transfers.finish()
        if stored:
            self.items[group] = stored
            self.of |= dict(zip(shards, stored, strict=True))
            around_gather(group, self._fetch, self._put_back)

    def end(self) -> None:
        """Forget what was read ahead: the code that follows may change it."""
        self.transfers.finish()
        self._last = (None, None)

    def _fetch(self, group: Any) -> None:
        self._used[group] = self.transfers.fetch(self.items[group])
        self._following[self._last] = group
        self._last = self._last[1], group
        following = self._following.get(self._last)
        if following is not None:
            self.transfers.prefetch(self.items[following])

    def _put_back(self, group: Any) -> None:
        if (batch := self._used.pop(group, None)) is not None:
            self.transfers.put_back(batch, changed=False)
