"""A store as remote ones are: a file is there once it is closed, nothing is renamed, nothing is locked.

It keeps its files below a local folder, so that several processes share it: `bucket:///tmp/...`. Importing this file
makes it known to fsspec.
"""

import io
import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.checkpoint import trainings
from tests.parity import QUIET, caught_warnings


class Killed(BaseException):
    """Nothing is cleaned up after it, as after SIGKILL."""


class Bucket(LocalFileSystem):
    protocol = "bucket"
    left = None
    """Calls until the process is killed."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    @classmethod
    def call(cls):
        if cls.left is not None:
            cls.left -= 1
            if cls.left < 0:
                raise Killed

    def _open(self, path, mode="rb", **_):
        self.call()
        return Upload(path) if "w" in mode else open(path, mode)

    def pipe_file(self, path, value, mode="overwrite", **_):
        with self.open(path, "wb") as file:
            file.write(value)

    def put_file(self, lpath, rpath, **_):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def ls(self, path, detail=False, **_):
        self.call()
        return super().ls(path, detail=detail)

    def rm_file(self, path):
        self.call()
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self.call()
        super().rm(path, recursive, maxdepth)

    def _refuse(self, *_, **__):
        raise NotImplementedError("a bucket cannot do this")

    mv = mv_file = rename = cp_file = link = symlink = touch = _refuse


class Upload(io.BytesIO):
    def __init__(self, path):
        super().__init__()
        self.path = Path(path)

    def write(self, content):
        Bucket.call()
        return super().write(content)

    def close(self):
        if not self.closed:
            if Bucket.left is None or Bucket.left > 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # a store has no folders
                new = self.path.with_name(f".{os.urandom(4).hex()}")
                new.write_bytes(self.getvalue())
                new.rename(self.path)
            super().close()
            Bucket.call()


fsspec.register_implementation("bucket", Bucket, clobber=True)


def train(*args, **kwargs):
    return trainings.train(*args, **kwargs)


def fit(root, strategy, steps, folder, path=None, world=2):
    """Steps that were trained, and warnings, of a run that saves to `folder` at each step."""
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, save_last=True, filename="{step}")
    module = trainings.build("MLP")
    flags = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 0, "max_steps": steps, "max_epochs": -1}
    chosen = Strategy3D(**strategy, quiet=True)
    trainer = Trainer(**flags, devices=world, strategy=chosen, callbacks=[saver], default_root_dir=root)
    with caught_warnings() as seen:
        trainer.fit(module, ckpt_path=path)
    return len(module.seen), seen


def entries(folder):
    return sorted(each.name for each in Path(folder).iterdir())
