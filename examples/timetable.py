"""`make pictures`: the timetable of a real run of four processes, one stage of a pipeline each, as a picture.

`python examples/timetable.py FILE` draws it into FILE, by default docs/timetable.png.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from gpt_from_scratch import ByteGPT, StandardLibrary
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lightning_3d import Monitor3D, Strategy3D
from lightning_3d.cli import main as lightning_3d

STEPS = 6
"""Two that warm up, three that are timed, and one more."""


def main(file: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module="lightning_3d")
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=4, max_epochs=1, limit_train_batches=STEPS, enable_checkpointing=False,
            enable_model_summary=False, enable_progress_bar=False, logger=CSVLogger(folder, "run", "0"),
            strategy=Strategy3D(pipeline_parallel_size=4, num_microbatches=8, start_method="fork"),
            callbacks=[Monitor3D(timetable_steps=3)],
        )  # fmt: skip
        trainer.fit(ByteGPT(width=256, layers=8), datamodule=StandardLibrary(batch_size=32))
        lightning_3d(["timeline", f"{folder}/run/0", "--plot", str(file)])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/timetable.png"))
