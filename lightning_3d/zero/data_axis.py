"""The means by which a rank sends gradients and sharded parameters: groups, background thread, ledger."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.ledger import Ledger
from lightning_3d.comm import (
    BackgroundQueue,
    CommConfig,
    Compression,
    ReplicatedGradients,
    build_collectives,
    build_compression,
)
from lightning_3d.ranks import talk
from lightning_3d.ranks.groups import Axes
from lightning_3d.ranks.mesh import EXPERT_REPLICAS
from lightning_3d.zero.fsdp_seam import FullySharded


class DataAxis:
    """The data axis of one rank.

    The groups of `axes` are not those of the mesh, which the main thread uses beside the background thread.
    """

    def __init__(self, axes: Axes, config: CommConfig, *, streams: bool) -> None:
        self.axes, self.config = axes, config
        self.ledger = Ledger()
        self._replicas: list[ReplicatedGradients] = []
        self._sharded: list[FullySharded] = []
        self.engine = BackgroundQueue(threaded=not streams, ledger=self.ledger)

    def replicas(self, parameters: list[nn.Parameter]) -> ReplicatedGradients:
        """Keep `parameters` equal over the data axis."""
        return self._replicated(parameters, self.axes.data, "data_parallel", self.axes.hosts)

    def expert_replicas(self, parameters: list[nn.Parameter]) -> ReplicatedGradients | None:
        """Keep experts equal over the ranks that own the same; none where no other rank does."""
        if not parameters or self.expert_mesh is None or self.axes.expert_replicas is None:
            return None
        hosts = talk.open_hosts(self.expert_mesh.get_group())
        return self._replicated(parameters, self.axes.expert_replicas, EXPERT_REPLICAS, hosts)

    def _replicated(
        self, parameters: list[nn.Parameter], ranks: dist.ProcessGroup, axis: str, hosts: dist.ProcessGroup
    ) -> ReplicatedGradients:
        collectives = build_collectives(self.config, ranks, self.ledger, axis)
        compression = build_compression(self.config, collectives)
        replicas = ReplicatedGradients(parameters, collectives, self.engine, hosts, compression=compression)
        self._replicas.append(replicas)
        return replicas

    @property
    def native_copies(self) -> bool:
        """True where FSDP2 itself averages over the copies of hybrid shard, and overlaps that by its streams."""
        native = self.config.grad_sync == "native" and self.config.grad_compression is None
        return self.axes.replicate is not None and native

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The ranks that own the same experts, None where no other rank does."""
        axes = self.axes
        return axes.experts[EXPERT_REPLICAS] if axes.experts is not None and axes.expert_replicas is not None else None

    def attach(self, root: nn.Module, experts: Collection[nn.Module] = ()) -> FullySharded:
        """Put our collectives under every `fully_shard`-ed module of `root`; `experts` are sharded over replicas."""
        shard = build_collectives(self.config, self.axes.shard or self.axes.data, self.ledger, "data_parallel")
        replicate = None
        if self.axes.replicate is not None:
            replicate = build_collectives(self.config, self.axes.replicate, self.ledger, "data_replicate")
        compression = build_compression(self.config, shard)
        replicas = {}
        if experts and self.axes.expert_replicas is not None:
            over = build_collectives(self.config, self.axes.expert_replicas, self.ledger, EXPERT_REPLICAS)
            replicas = dict.fromkeys(experts, over)
        sharded = FullySharded(
            root, shard, self.engine, replicate, native_copies=self.native_copies, compression=compression,
            others=replicas,
        )  # fmt: skip
        self._sharded.append(sharded)
        return sharded

    @property
    def _compressions(self) -> list[Compression]:
        senders: list[FullySharded | ReplicatedGradients] = [*self._sharded, *self._replicas]
        return [sender.compression for sender in senders if sender.compression is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the next step's rounding depends on: losses of compression, order of gradients."""
        return {
            "compressions": [compression.state_dict() for compression in self._compressions],
            "orders": [replicas.state_dict() for replicas in self._replicas],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of the rank in the same place of the same layout."""
        for compression, saved in zip(self._compressions, state["compressions"], strict=True):
            compression.load_state_dict(saved)
        for replicas, saved in zip(self._replicas, state["orders"], strict=True):
            replicas.load_state_dict(saved)

    def close(self) -> None:
        self.engine.close()
