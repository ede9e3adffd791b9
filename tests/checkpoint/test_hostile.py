"""Damaged and hostile checkpoints: nothing runs, nothing absurd is allocated, each is a CheckpointError."""

import json
import os
import pickle
import random
import resource
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_3d.checkpoint.keeper import Keeper
from lightning_3d.checkpoint.manifest import _crc
from lightning_3d.checkpoint.safetensors_files import checksum
from lightning_3d.checkpoint.stored import read_tensors
from lightning_3d.errors import CheckpointError
from tests.checkpoint.made import save

ADDRESS_SPACE = 2 * 2**30
"""More than is mapped already by so much may not be asked for."""


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "state_dict.weight": torch.randn(64, 32, generator=generator),
        "state_dict.bias": torch.randn(33, generator=generator),
        "state_dict.scale": torch.tensor(2.0),
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.ckpt"
    rest = {"global_step": 3, "loops": {"list": [1, 2.5, (3, None)], "bytes": b"abc"}, "epoch": 1}
    assert save(path, tensors(), rest) == [None, None]
    return path


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "file.ckpt"
    torch.save({"state_dict": tensors(), "global_step": 3}, path)
    return path


@pytest.fixture
def limited():
    """Little memory: a size that lies is an error of ours before it is one of the system."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def load(path):
    """Everything that can be read of it."""
    return read_tensors(Keeper()._load(path, None, TorchCheckpointIO()))


def sign(path, change=lambda content: None):
    """Make sizes and checksums true again after other files were changed, as an attacker would; then `change`."""
    content = json.loads((path / "manifest.json").read_text())
    content.pop("crc")
    for file in content["files"]:
        if (path / str(file[0])).is_file():
            file[1:] = [(path / file[0]).stat().st_size, checksum(path / file[0])]
    change(content)
    (path / "manifest.json").write_text(json.dumps({**content, "crc": _crc(content)}))


def part(path, index=0):
    return sorted(path.glob("part-*"))[index]


def state(path):
    return next(path.glob("state-*"))


def reheader(path, header, length=None):
    raw = part(path).read_bytes()
    data = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    part(path).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def cut(file, at):
    def damage(path):
        target = file(path)
        target.write_bytes(target.read_bytes()[: int(at * target.stat().st_size)])

    return damage


def flip(file, seed):
    def damage(path):
        target, rng = file(path), random.Random(seed)
        raw = bytearray(target.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        target.write_bytes(raw)

    return damage


def named(change):
    return lambda path: sign(path, change)


def rename_file(name):
    def change(content):
        old = content["files"][0][0]
        content["files"][0][0] = name
        content["state"] = name if content["state"] == old else content["state"]

    return named(change)


def entry(change):
    """Change what the manifest says of one tensor."""
    return named(lambda content: content["tensors"].__setitem__("state_dict.weight", change))


def pieces(*boxes, shape=(64, 32), dtype="F32"):
    return entry([dtype, list(shape), [list(box) for box in boxes]])


def said(value):
    """Have the state say `value`, signed."""

    def damage(path):
        text = value if isinstance(value, bytes) else json.dumps({"rest": {"x": value}, "ranks": []}).encode()
        state(path).write_bytes(text)
        sign(path)

    return damage


def bomb_in(file, signed):
    def damage(path):
        file(path).write_bytes(pickle.dumps(Bomb(str(path.parent / "executed"))))
        if signed:
            sign(path)

    return damage


def in_header(change):
    def damage(path):
        raw = part(path).read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        name = next(key for key in header if key != "__metadata__")
        header[name] = {**header[name], **change}
        reheader(path, header)
        sign(path)

    return damage


def raw_header(text, length=None):
    def damage(path):
        reheader(path, text, length)
        sign(path)

    return damage


def swap_for_link(path):
    target = part(path)
    target.unlink()
    target.symlink_to("/etc/passwd")


def with_objects(path):
    (path / "objects-1.pt").write_bytes(b"")
    torch.save({"x": Bomb(str(path.parent / "executed"))}, path / "objects-1.pt")
    said({"!": "object", "v": "x"})(path)

    def change(content):
        content["files"].append(
            ["objects-1.pt", (path / "objects-1.pt").stat().st_size, checksum(path / "objects-1.pt")]
        )
        content["objects"] = "objects-1.pt"

    sign(path, change)


MANIFEST = lambda path: path / "manifest.json"  # noqa: E731
FILES = {"manifest": MANIFEST, "state": state, "part0": part, "part1": lambda path: part(path, 1)}
BIG = 2**61
CASES = {}
for label, file in FILES.items():
    CASES |= {f"cut-{label}-{at}": cut(file, at) for at in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)}
    CASES |= {f"flip-{label}-{seed}": flip(file, seed) for seed in range(20)}
    CASES |= {f"bomb-{label}": bomb_in(file, False), f"gone-{label}": lambda path, file=file: file(path).unlink()}
    CASES[f"grown-{label}"] = lambda path, file=file: file(path).write_bytes(file(path).read_bytes() + b"0")
for label in ("state", "part0", "part1"):
    CASES[f"signed-bomb-{label}"] = bomb_in(FILES[label], True)
for index, name in enumerate(
    ["../up", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "x\0y", "~root", "manifest.json", ".hidden", "n" * 400, None, 3,
     ["x"], {"x": 1}, "file:///etc/passwd", "part\n", "pärt"]
):  # fmt: skip
    CASES[f"name-{index}"] = rename_file(name)
for index, change in enumerate(
    [
        {"shape": [BIG, BIG]}, {"shape": [-1, 32]}, {"shape": [1.5]}, {"shape": "64"}, {"shape": None}, {"shape": [True]},
        {"dtype": "F128"}, {"dtype": ["F32"]}, {"dtype": "F64"}, {"dtype": None}, {"data_offsets": [0, BIG]},
        {"data_offsets": [-8, 0]}, {"data_offsets": [0]}, {"data_offsets": "ab"}, {"data_offsets": [8, 0]},
        {"data_offsets": [10**30, 10**30 + 8]}, {"shape": [10**40]},
    ]
):  # fmt: skip
    CASES[f"header-{index}"] = in_header(change)
for index, text in enumerate(
    [
        b"", b"[]", b"{", b"null", b'"x"', b"[" * 200000, b'{"a":' * 200000, b"\xff\xfe", b"{}", b"9" * 5000,
        b"{" + b" " * 10**6,
    ]
):  # fmt: skip
    CASES[f"raw-header-{index}"] = raw_header(text)
for length in (2**64 - 1, 2**63, BIG, 10**9, 2**31, 2**20):
    CASES[f"header-length-{length}"] = raw_header(b"{}", length)
for index, damage in enumerate(
    [
        pieces(), pieces((0, [0, 0], [64, 32])), pieces((0, [0, 0], [32, 32]), (0, [0, 0], [32, 32])),
        pieces((0, [0, 0], [32, 32]), (1, [16, 0], [32, 32])), pieces((0, [0, 0], [32, 32]), (1, [33, 0], [32, 32])),
        pieces((0, [0], [64])), pieces((0, [0, 0], [BIG, 32]), shape=(BIG, 32)), pieces((99, [0, 0], [64, 32])),
        pieces((-1, [0, 0], [64, 32])), pieces((True, [0, 0], [64, 32])), pieces((0, [-1, 0], [65, 32])),
        pieces((0, [0, 0], [64, 32]), dtype="OBJ"), pieces((0, [0, 0], [64, 32]), dtype="F64"),
        pieces((0, [0, 0], [64, 32]), shape=(64.0, 32)), entry(None), entry([]), entry("x"), entry([1, 2, 3]), entry({}),
        pieces(*[(0, [0, column], [1 << 40, 1]) for column in range(2000)], shape=(1 << 40, 2000)),
    ]
):  # fmt: skip
    CASES[f"pieces-{index}"] = damage
for index, (key, value) in enumerate(
    [
        ("format", "other"), ("version", 99), ("version", None), ("version", "1" * 100), ("files", None), ("files", {}),
        ("files", [[1, 2]]), ("files", []), ("tensors", []), ("tensors", None), ("state", None), ("state", "nothing"),
        ("state", []), ("objects", "nothing"), ("objects", 5), ("ranks", -1), ("ranks", "x"), ("ranks", 1e400),
    ]
):  # fmt: skip
    CASES[f"manifest-{index}"] = named(lambda content, key=key, value=value: content.__setitem__(key, value))
for index, value in enumerate(
    [
        {"!": "tensor", "v": "nothing"}, {"!": "tensor", "v": []}, {"!": "tensor"}, {"!": "object", "v": "x"},
        {"!": "os.system", "v": "touch executed"}, {"!": []}, {"!": {"!": "set"}}, {"!": None}, {"!": "set", "v": [[1]]},
        {"!": "dict", "v": [[[1], 2]]}, {"!": "dict", "v": 3}, {"!": "bytes", "v": "*"}, {"!": "bytes", "v": 3},
        {"!": "dtype", "v": "torch.nothing"}, {"!": "dtype", "v": []}, {"!": "complex", "v": [1, 2, 3]},
        {"!": "timedelta", "v": [10**30, 0, 0]}, {"!": "size", "v": ["a"]}, {"!": "deque", "v": 1},
        {"!": "numpy", "v": ["O", [1], {"!": "bytes", "v": "AAAAAAAAAAA="}]},
        {"!": "numpy", "v": ["<f8", [BIG], {"!": "bytes", "v": "AAAAAAAAAAA="}]},
        {"!": "numpy", "v": ["<f8", [1], 5]}, {"!": "numpy", "v": []}, {"!": "ordered", "v": {"a": 1}},
    ]
):  # fmt: skip
    CASES[f"state-{index}"] = said(value)
for index, text in enumerate(
    [b"", b"[]", b"null", b"{}", b'{"rest":[]}', b"[" * 10**6, b'{"rest":' * 10**5, b'{"rest":{"x":' + b"9" * 10**5 + b"}}",
     b"\x80\x04]q", b"\xff" * 100, b'{"rest":{"a":"' + b"a" * 1000, b'{"rest":' + b'{"a":' * 900 + b"1" + b"}" * 900]
):  # fmt: skip
    CASES[f"state-raw-{index}"] = said(text)
CASES |= {"link": swap_for_link, "signed-objects-bomb": with_objects}


def test_there_are_at_least_200_cases():
    assert len(CASES) >= 200


def test_the_good_one_loads(good):
    loaded = load(good)
    for name, tensor in tensors().items():
        assert torch.equal(loaded["state_dict"][name.removeprefix("state_dict.")], tensor)
    assert loaded["loops"]["list"] == [1, 2.5, (3, None)]


@pytest.mark.parametrize("case", CASES)
def test_nothing_runs_and_the_error_is_clear(good, tmp_path, limited, case):
    path = tmp_path / "bad.ckpt"
    shutil.copytree(good, path)
    CASES[case](path)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert 20 < len(str(caught.value)) < 1500
    assert not (tmp_path / "executed").exists()


def test_the_bomb_would_have_gone_off(tmp_path):
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "executed"))))
    assert (tmp_path / "executed").exists()


def _zip_bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**8)


SINGLE = {
    "pickle": bomb_in(lambda path: path, False),
    "inside": lambda path: torch.save({"state_dict": {}, "x": Bomb(str(path.parent / "executed"))}, path),
    "zip-bomb": _zip_bomb,
    "list": lambda path: torch.save([1, 2], path),
}
SINGLE |= {f"cut-{at}": cut(lambda path: path, at) for at in (0, 0.001, 0.1, 0.5, 0.9, 0.999)}
SINGLE |= {
    f"noise-{seed}": lambda path, s=seed: path.write_bytes(random.Random(s).randbytes(5000)) for seed in range(5)
}


@pytest.mark.parametrize("case", SINGLE)
def test_single_files(good_file, tmp_path, limited, case):
    path = tmp_path / "bad.ckpt"
    shutil.copy(good_file, path)
    SINGLE[case](path)
    warnings.simplefilter("ignore")  # pytest puts the filters back
    with pytest.raises(CheckpointError):
        load(path)
    assert not (tmp_path / "executed").exists()
