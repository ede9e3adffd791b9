"""What one strategy sends gradients and sharded parameters with: groups, background thread, ledger."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch import nn

from lightning_3d.comm import (
    CommConfig,
    Compression,
    Engine,
    FullySharded,
    Ledger,
    Replicas,
    build_collectives,
    build_compression,
)
from lightning_3d.layout import Coordinate, Layout


class Communication:
    """The data axis of one rank. Every rank must build it.

    The groups are apart from those of the mesh, since the background thread uses them while the main thread uses the
    mesh's.
    """

    def __init__(self, layout: Layout, rank: int, config: CommConfig, *, streams: bool, timeout: timedelta) -> None:
        self.layout, self.config = layout, config
        self.ledger = Ledger()
        self._replicas: list[Replicas] = []
        self._sharded: list[FullySharded] = []
        self.engine = Engine(threaded=not streams)
        here, shard = layout.coordinate(rank), layout.zero_shard_size or layout.data_parallel_size
        self._whole = _new_group(layout, here, timeout, lambda data: 0)
        self._shard = self._replicate = None
        if shard < layout.data_parallel_size:
            self._shard = _new_group(layout, here, timeout, lambda data: data // shard)
            self._replicate = _new_group(layout, here, timeout, lambda data: data % shard)

    def replicas(self, parameters: list[nn.Parameter]) -> Replicas:
        """Keep `parameters` equal over the data axis."""
        collectives = build_collectives(self.config, self._whole, self.ledger, "data_parallel")
        replicas = Replicas(
            parameters,
            collectives,
            self.engine,
            bucket_mb=self.config.bucket_mb,
            compression=build_compression(self.config, collectives),
        )
        self._replicas.append(replicas)
        return replicas

    def attach(self, root: nn.Module) -> FullySharded:
        """Put our collectives under every `fully_shard`-ed module of `root`."""
        shard = build_collectives(self.config, self._shard or self._whole, self.ledger, "data_parallel")
        replicate = None
        if self._replicate is not None:
            replicate = build_collectives(self.config, self._replicate, self.ledger, "data_replicate")
        compression = build_compression(self.config, shard)
        sharded = FullySharded(root, shard, self.engine, replicate, compression=compression)
        self._sharded.append(sharded)
        return sharded

    @property
    def compressed(self) -> list[tuple[Compression, dict[str, nn.Parameter]]]:
        """Every compression, and the parameters behind the keys of its memory."""
        senders: list[FullySharded | Replicas] = [*self._sharded, *self._replicas]
        return [(sender.compression, sender.keyed) for sender in senders if sender.compression is not None]

    def state_dict(self) -> dict[str, Any]:
        """What the next step's rounding depends on: leftovers of compression, and which gradients travel together."""
        return {
            "compressions": [compression.state_dict() for compression, _ in self.compressed],
            "orders": [replicas.state_dict() for replicas in self._replicas],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave on the rank in the same place of the same layout."""
        for (compression, _), saved in zip(self.compressed, state["compressions"], strict=True):
            compression.load_state_dict(saved)
        for replicas, saved in zip(self._replicas, state["orders"], strict=True):
            replicas.load_state_dict(saved)

    def close(self) -> None:
        self.engine.close()


def _new_group(layout: Layout, here: Coordinate, timeout: timedelta, part: Callable[[int], int]) -> dist.ProcessGroup:
    """This rank's group of data ranks with the same `part`, one for each pipeline and tensor coordinate."""
    mine = None
    for pipeline in range(layout.pipeline_parallel_size):
        for tensor in range(layout.tensor_parallel_size):
            parts: dict[int, list[int]] = {}
            for data in range(layout.data_parallel_size):
                rank = layout.rank(Coordinate(pipeline=pipeline, data=data, tensor=tensor))
                parts.setdefault(part(data), []).append(rank)
            for key, ranks in parts.items():
                group = dist.new_group(ranks, timeout=timeout)
                if (here.pipeline, here.tensor, part(here.data)) == (pipeline, tensor, key):
                    mine = group
    assert mine is not None
    return mine
