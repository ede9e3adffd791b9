"""Single files: every flipped bit is found or changes nothing, and a disk that fills up is said to have."""

import errno
import resource
import zipfile

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_3d.checkpoint.keeper import Keeper
from lightning_3d.checkpoint.single_file import save_file
from lightning_3d.errors import CheckpointError
from tests.parity import long, silent

STATE = {"state_dict": {"a": torch.arange(10.0), "b": torch.arange(25).view(5, 5)}, "global_step": 3}


def same(loaded):
    return loaded["global_step"] == 3 and all(
        torch.equal(loaded["state_dict"][name], tensor) for name, tensor in STATE["state_dict"].items()
    )


@pytest.mark.parametrize("save", [pytest.param(save_file, id="ours"), long(torch.save, id="Lightning's")])
def test_each_flipped_bit_is_found_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.ckpt"
    save(STATE, path)
    raw = path.read_bytes()
    directory = zipfile.ZipFile(path).start_dir
    bits = [*range(0, directory * 8, 13), *range(directory * 8, len(raw) * 8)]
    keeper, io, found = Keeper(), TorchCheckpointIO(), 0
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with silent():
            try:
                loaded = keeper._load(path, None, io)
            except CheckpointError:
                found += 1
                continue
        assert same(loaded), f"bit {bit} of {len(raw) * 8}"
    assert found > (0.9 if save is save_file else 0.3) * len(bits)


def test_torch_and_lightning_load_what_is_sealed(tmp_path):
    path = tmp_path / "x.ckpt"
    save_file(STATE, path)
    assert same(torch.load(path, weights_only=True))
    assert same(torch.load(path, weights_only=True, mmap=True))
    assert same(TorchCheckpointIO().load_checkpoint(path))


@pytest.mark.parametrize("free", [5, 7, 11, 14, 20])
def test_a_disk_that_fills_up_is_an_error_of_the_disk(tmp_path, free):
    path = tmp_path / "x.ckpt"
    save_file(STATE, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free * 1024, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_file({"state_dict": {f"w{index}": torch.ones(3000) for index in range(3)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]
    assert same(torch.load(path, weights_only=True))


@pytest.mark.parametrize("name", ["x.ckpt.part", "x.ckpt.0123456789abcdef.part"])
def test_a_link_that_lies_there_is_not_followed(tmp_path, name):
    path, other = tmp_path / "x.ckpt", tmp_path / "other"
    other.write_text("precious")
    (tmp_path / name).symlink_to(other)
    save_file(STATE, path)
    assert other.read_text() == "precious"
    assert same(torch.load(path, weights_only=True))


def test_what_a_killed_save_left_goes_with_the_next(tmp_path):
    (tmp_path / "x.ckpt.0123456789abcdef.part").write_bytes(b"half")
    (tmp_path / "y.ckpt.0123456789abcdef.part").write_bytes(b"of another")
    save_file(STATE, tmp_path / "x.ckpt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.ckpt", "y.ckpt.0123456789abcdef.part"]
