"""From what the user chose to the collectives that do it."""

import torch.distributed as dist

from lightning_3d.comm.collectives import Collectives, Native, Ring
from lightning_3d.comm.config import CommConfig
from lightning_3d.comm.ledger import Ledger


def build_collectives(config: CommConfig, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> Collectives:
    """The collectives of `config.grad_sync` over the ranks of `group`. Every rank of the job must call it."""
    kind = Native if config.grad_sync == "native" else Ring
    return kind(group, ledger, axis)
