"""ZeRO: what the data axis shards, as a table of knobs on FSDP2; stage 0 replicates."""

from lightning_3d.zero.local_step import step_on_shards as step_on_shards
from lightning_3d.zero.local_step import step_with_shared_loss as step_with_shared_loss
from lightning_3d.zero.replicated import ReplicatedData as ReplicatedData
from lightning_3d.zero.sharded import ShardedData as ShardedData
from lightning_3d.zero.sync import DataParallel as DataParallel
from lightning_3d.zero.sync import NoData as NoData
from lightning_3d.zero.whole_step import step_on_wholes as step_on_wholes
