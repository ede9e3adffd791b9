"""`pytorch_lightning` is another class tree than `lightning.pytorch`: its users get one clear line."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_lightning", reason="the separate package is not installed")

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning
import lightning_3d
flags = dict(accelerator="cpu", devices=2, logger=False)
for strategy in ("3d_zero1", lightning_3d.Strategy3D()):
    try:
        pytorch_lightning.Trainer(strategy=strategy, **flags)
    except ValueError as error:
        print(error)
try:
    import lightning.pytorch
    trainer = lightning.pytorch.Trainer(strategy="3d_zero1", **flags)
    trainer.fit(pytorch_lightning.LightningModule())
except TypeError as error:
    print(error)
"""


def test_both_mixtures_are_one_line_each():
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr
    by_name, by_object, module = done.stdout.strip().splitlines()
    remedy = "lightning_3d.serve_pytorch_lightning()"  # followed in tests/launch/test_served_names.py
    assert remedy in by_name and remedy in by_object
    assert "import Trainer and LightningModule from `lightning.pytorch`" in by_name
    assert "Strategy3D for Trainer of `lightning.pytorch`, not of `pytorch_lightning`" in by_object
    assert "single import style" in module
