"""The table of loaders in docs/callbacks.md: samples of each rank, also after a resume inside an epoch."""

import importlib.util
import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import Strategy3D
from tests.docs import test_callbacks
from tests.parity import QUIET, caught_warnings
from tests.workers import WorkerError, run

SAMPLES, ROWS, STOP = 48, 4, 2
LAYOUTS = test_callbacks.LAYOUTS | {"pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 2}}


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Seen(LightningModule):
    def __init__(self, train_dataloader, asks):
        super().__init__()
        self.train_dataloader = train_dataloader
        self.first, self.asks, self.seen = nn.Linear(1, 8), asks, []
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.blocks(self.first(batch)).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append([int(number) for number in batch.flatten()])

    def configure_optimizers(self):
        if self.asks:
            assert self.trainer.estimated_stepping_batches > STOP
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stop(Callback):
    """Saves inside the first epoch, and ends training there."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == STOP:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def stateful(folder, **flags):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=ROWS, **flags)


def web(folder, own):
    import webdataset

    files = sorted(map(str, Path(folder, "tar").glob("*.tar")))
    split = _of_this_data_rank if own else webdataset.split_by_node
    data = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=split).decode().to_tuple("json")
    return DataLoader(data.map(lambda row: torch.tensor([float(row[0])])), batch_size=ROWS)


def _of_this_data_rank(files):
    """The line of docs/callbacks.md."""
    return islice(files, dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else files


def lit(folder, own):
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(f"{folder}/lit")
    if own and dist.is_initialized():  # the line of docs/callbacks.md
        data.distributed_env = type(data.distributed_env)(dist.get_world_size(), dist.get_rank(), 1)
    return StreamingDataLoader(data, batch_size=ROWS)


LOADERS = {
    "DataLoader": lambda folder: DataLoader(Numbers(), batch_size=ROWS, shuffle=True),
    "StatefulDataLoader": lambda folder: stateful(folder),
    "StatefulDataLoader, workers": lambda folder: stateful(folder, num_workers=2),
    "litdata": lambda folder: lit(folder, own=True),
    "litdata, WORLD_SIZE": lambda folder: lit(folder, own=False),
    "webdataset": lambda folder: web(folder, own=True),
    "webdataset, split_by_node": lambda folder: web(folder, own=False),
}
PACKAGES = {"StatefulDataLoader": "torchdata", "litdata": "litdata", "webdataset": "webdataset"}


def write(name, folder):
    """The files that the loader reads."""
    if name.startswith("webdataset"):
        import webdataset

        os.makedirs(f"{folder}/tar")
        for shard in range(4):
            with webdataset.TarWriter(f"{folder}/tar/{shard}.tar") as file:
                for at in range(shard * 12, shard * 12 + 12):
                    file.write({"__key__": f"{at:05d}", "json": at})
    if name.startswith("litdata"):
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(f"{folder}/lit", chunk_size=12)
        for at in range(SAMPLES):
            writer[at] = torch.tensor([float(at)])
        writer.done()
        writer.merge()


def fitted(name, folder, layout, asks, save, resume):
    """The samples of each batch on this rank."""
    return _fit(lambda: LOADERS[name](folder), layout, asks, save, resume)


def warned(folder, save, resume):
    """Warnings about an order that another sampler gives."""
    with caught_warnings() as caught:
        _fit(lambda: stateful(folder, shuffle=True), LAYOUTS["ZeRO 1"], False, save, resume)
    return [text for text in caught if "shuffles by a sampler of its own" in text]


def _fit(make, layout, asks, save, resume):
    seed_everything(5, verbose=False)
    module = Seen(make, asks)
    strategy = Strategy3D(**layout, quiet=True, timeout=60, checkpoint_format="sharded")
    flags = {**QUIET, "use_distributed_sampler": True, "max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"])}
    flags["callbacks"] = [Stop(save)] if save else []
    Trainer(**flags, strategy=strategy).fit(module, ckpt_path=resume)
    return module.seen


def cases():
    missing = {name: not _is_installed(package) for name, package in PACKAGES.items()}
    for name in LOADERS:
        package = name.partition(",")[0]
        skip = pytest.mark.skipif(missing.get(package, False), reason=f"needs {PACKAGES.get(package)}")
        for layout in LAYOUTS:
            yield pytest.param(name, layout, marks=[skip, pytest.mark.long] if package in PACKAGES else [skip])


def _is_installed(package):
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(("name", "layout"), [*cases()])
def test_a_loader_gives_each_sample_once_and_goes_on_inside_an_epoch(name, layout, tmp_path):
    write(name, tmp_path)
    save = str(tmp_path / "a.ckpt")
    asks = name == "StatefulDataLoader"
    ways = ((None, None), (save, None), (None, save))
    if name.endswith("split_by_node") and not layout.startswith("ZeRO"):  # it reads the rank of the process
        with pytest.raises(WorkerError, match="DivergenceError"):
            run(fitted, name, str(tmp_path), LAYOUTS[layout], asks, None, None, world=2, timeout=120)
        return
    if name.endswith("WORLD_SIZE") and not layout.startswith("ZeRO"):
        says = "UnsupportedError: StreamingDataset has the samples of rank 0 of 2, and this is data rank 0 of 1"
        with pytest.raises(WorkerError) as error:
            run(fitted, name, str(tmp_path), LAYOUTS[layout], asks, None, None, world=2, timeout=120)
        assert str(error.value).count(says) == 2
        return
    runs = [run(fitted, name, str(tmp_path), LAYOUTS[layout], asks, *way, world=2, timeout=120) for way in ways]
    whole, peer = runs[0]
    divided = layout.startswith("ZeRO")
    epoch = len(whole) // 2
    assert peer == whole or divided
    used = [whole, peer] if divided else [whole]
    assert sorted(number for batches in used for batch in batches[:epoch] for number in batch) == [*range(SAMPLES)]
    resumes = test_callbacks.table("loader")[name.partition(",")[0]]["resumed inside an epoch"]
    for wanted, before, after in zip(*runs, strict=True):
        assert before == wanted[:STOP]
        expected = {"exact": wanted[STOP:], "starts again": wanted[:epoch], "this epoch": wanted[STOP:epoch]}[resumes]
        assert after[: len(expected)] == expected


@pytest.mark.long
@pytest.mark.skipif(not _is_installed("torchdata"), reason="needs torchdata")
def test_a_stateful_loader_that_shuffles_goes_on_in_another_order_with_a_warning(tmp_path):
    save = str(tmp_path / "a.ckpt")
    assert run(warned, str(tmp_path), save, None, world=2, timeout=120) == [[], []]
    first, other = run(warned, str(tmp_path), None, save, world=2, timeout=120)
    assert len(first) == 1 and not other
