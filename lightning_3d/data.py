"""What the ranks of one data rank must share so that they see the same samples."""

import os
from functools import partial

from lightning.fabric.utilities.seed import pl_worker_init_function


def seed_workers_by_data_rank(dataloader: object, data_rank: int) -> None:
    """Under `seed_everything(workers=True)` seed dataloader workers by data rank.

    Lightning would seed them by global rank, so that tensor and pipeline peers augment the same sample differently.
    """
    wanted = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if wanted and getattr(dataloader, "worker_init_fn", False) is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)  # type: ignore[attr-defined]
