"""Collectives of the data axis: the ring, its background thread, the seams into FSDP2 and replication, the ledger."""

from lightning_3d.comm.background_queue import BackgroundQueue as BackgroundQueue
from lightning_3d.comm.collectives import Collectives as Collectives
from lightning_3d.comm.compression import Compression as Compression
from lightning_3d.comm.config import CommConfig as CommConfig
from lightning_3d.comm.config import build_collectives as build_collectives
from lightning_3d.comm.config import build_compression as build_compression
from lightning_3d.comm.ledger import Ledger as Ledger
from lightning_3d.comm.replicate import ReplicatedGradients as ReplicatedGradients
