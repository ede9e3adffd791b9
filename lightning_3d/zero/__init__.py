"""ZeRO: what the data axis shards, as a table of knobs on FSDP2; stage 0 replicates."""

from lightning_3d.zero.replicated import ReplicatedData as ReplicatedData
from lightning_3d.zero.sharded import ShardedData as ShardedData
from lightning_3d.zero.stepping import step_as_on_one_device as step_as_on_one_device
from lightning_3d.zero.sync import DataParallel as DataParallel
from lightning_3d.zero.sync import NoData as NoData
from lightning_3d.zero.users_step import check_state as check_state
