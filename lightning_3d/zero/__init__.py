"""ZeRO: what the data axis shards, as a table of knobs on FSDP2; stage 0 replicates."""

from lightning_3d.zero.data_parallel import DataParallel as DataParallel
from lightning_3d.zero.replicated import ReplicatedData as ReplicatedData
from lightning_3d.zero.sharded import ShardedData as ShardedData
