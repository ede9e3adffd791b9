"""Gradients on the data axis: compression, the background thread, replication."""

from lightning_3d.comm.background_queue import BackgroundQueue as BackgroundQueue
from lightning_3d.comm.compression import Compression as Compression
from lightning_3d.comm.grad_sync import CommConfig as CommConfig
from lightning_3d.comm.grad_sync import build_collectives as build_collectives
from lightning_3d.comm.grad_sync import build_compression as build_compression
from lightning_3d.comm.replicate import ReplicatedGradients as ReplicatedGradients
