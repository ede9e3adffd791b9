"""From what the user chose to the objects that do it."""

import torch
import torch.distributed as dist

from lightning_3d.comm.codecs import Half, Int8
from lightning_3d.comm.collectives import Collectives, Native, Ring
from lightning_3d.comm.compression import Compression, Elementwise
from lightning_3d.comm.config import CommConfig
from lightning_3d.comm.hierarchical import Hierarchical
from lightning_3d.comm.ledger import Ledger
from lightning_3d.comm.powersgd import PowerSGD
from lightning_3d.errors import ConfigurationError


def build_collectives(config: CommConfig, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> Collectives:
    """The collectives of `config.grad_sync` over `group`, all of whose ranks must call this."""
    if config.grad_sync == "native":
        return Native(group, ledger, axis)
    if config.grad_sync == "ring":
        return Ring(group, ledger, axis)
    if config.ranks_per_node is None:
        raise ConfigurationError('grad_sync="hierarchical" needs ranks_per_node, the data ranks in each node.')
    return Hierarchical(group, ledger, axis, config.ranks_per_node)


def build_compression(config: CommConfig, collectives: Collectives) -> Compression | None:
    """What `config.grad_compression` names, with a memory of its own."""
    feedback = config.error_feedback
    match config.grad_compression:
        case None:
            return None
        case "bf16":
            return Elementwise(collectives, Half(torch.bfloat16), error_feedback=feedback)
        case "fp16":
            return Elementwise(collectives, Half(torch.float16), error_feedback=feedback)
        case "int8":
            return Elementwise(collectives, Int8(), error_feedback=feedback)
        case "powersgd":
            return PowerSGD(collectives, config.powersgd_rank, error_feedback=feedback)
