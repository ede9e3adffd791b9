"""Modules that `configure_model` loads from safetensors files: tensors are read where their shards are computed."""

import os
import re
import shutil
import sys

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.checkpoint import safetensors_files
from lightning_3d.checkpoint.pretrained_private import read_on_use
from lightning_3d.errors import CheckpointError
from lightning_3d.sandbox import build_recorder, deferred
from lightning_3d.sandbox.deferred import Deferred, deferring, move_later, realize
from lightning_3d.strategy import placing
from lightning_3d.tensor import apply
from lightning_3d.tensor.geometry import TensorSplit, local_part
from tests.parity import long, make_trainer
from tests.strategy.test_billion import counted
from tests.workers import WorkerError, run
from tests.zoo.base import Base

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
}


@pytest.fixture
def saved(tmp_path):
    def save(kind="llama"):
        seed_everything(1, verbose=False)
        model = KINDS[kind]()
        model.save_pretrained(tmp_path / kind, max_shard_size="20KB")
        assert len(list((tmp_path / kind).glob("*.safetensors"))) > 2
        return model, tmp_path / kind

    return save


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(deferred, "SMALL", 0)
    monkeypatch.setattr(build_recorder, "ROOM", 0)


def _deferred(build):
    with deferring(read_on_use):
        return build()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_are_those_of_from_pretrained(kind, dtype, saved, small, monkeypatch):
    model, folder = saved(kind)
    opened, read = sys.modules["transformers.modeling_utils"].safe_open, []
    monkeypatch.setattr(safetensors_files, "_read", counted(read))
    module = _deferred(lambda: type(model).from_pretrained(folder, dtype=dtype))
    assert all(isinstance(parameter, Deferred) for parameter in module.parameters())
    if dtype is None:
        assert read == []  # other dtypes are converted once before they are freed
    realize(module.parameters())
    wanted = type(model).from_pretrained(folder, dtype=dtype)
    for name, value in wanted.state_dict().items():
        assert value.dtype == module.state_dict()[name].dtype
        assert torch.equal(module.state_dict()[name], value), name
    for mine, other in zip(module.buffers(), wanted.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert sys.modules["transformers.modeling_utils"].safe_open is opened


class NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten.stack, torch.ops.aten.cat)
        return func(*args, **(kwargs or {}))


def test_experts_are_read_into_their_place(saved, small, monkeypatch):
    """Each is a tensor of a file. Those of a rank are read, and no others, without copies on the way."""
    model, folder = saved("mixtral")
    module = _deferred(lambda: type(model).from_pretrained(folder))
    read, wanted = [], model.state_dict()
    monkeypatch.setattr(safetensors_files, "_read", counted(read))
    for name, experts in module.named_parameters():
        if "experts" in name and "layers.0" in name:
            realize([experts], lambda _: (1, 3))
            assert sum(read) == experts.nbytes // 2
            assert torch.equal(experts[1:3], wanted[name][1:3])
            read.clear()
        elif "experts" in name:
            with NoCopies():
                realize([experts])
            assert sum(read) == experts.nbytes
            assert torch.equal(experts, wanted[name])
            read.clear()


def test_a_parameter_that_moves_to_a_device_is_read_in_rows_too(saved, small, monkeypatch):
    model, folder = saved("mixtral")
    module, read = _deferred(lambda: type(model).from_pretrained(folder)), []
    monkeypatch.setattr(safetensors_files, "_read", counted(read))
    experts = module.model.layers[0].mlp.experts.down_proj
    move_later(experts, torch.device("cpu"))
    realize([experts], lambda _: (1, 3))
    assert sum(read) == experts.nbytes // 2
    assert torch.equal(experts[1:3], model.model.layers[0].mlp.experts.down_proj[1:3])


def test_load_file_and_load_state_dict(saved, small):
    import safetensors.torch

    _, folder = saved()
    file = sorted(folder.glob("*.safetensors"))[0]

    def build():
        tensors = safetensors.torch.load_file(file)
        module = nn.ParameterDict({name.replace(".", "/"): torch.zeros_like(value) for name, value in tensors.items()})
        module.load_state_dict({name.replace(".", "/"): value for name, value in tensors.items()})
        return module, tensors

    module, tensors = _deferred(build)
    assert all(isinstance(parameter, Deferred) for parameter in module.parameters())
    wanted = safetensors.torch.load_file(file)
    assert all(torch.equal(tensors[name], value) for name, value in wanted.items())
    assert all(torch.equal(module[name.replace(".", "/")], value) for name, value in wanted.items())


def _linear(file):
    import safetensors.torch

    module = nn.Linear(6, 4, bias=False)
    module.load_state_dict({"weight": safetensors.torch.load_file(file)["weight"]})
    return module


@pytest.mark.parametrize("change", ["removed", "replaced", "written", "cut"])
def test_a_file_that_is_gone_is_read_and_one_that_has_changed_is_an_error(change, small, tmp_path):
    import safetensors.torch

    file, wanted = tmp_path / "a.safetensors", torch.arange(24.0).view(4, 6)
    safetensors.torch.save_file({"weight": wanted}, file)
    module = _deferred(lambda: _linear(file))
    assert isinstance(module.weight, Deferred)
    if change == "removed":
        file.unlink()
    elif change == "replaced":
        safetensors.torch.save_file({"weight": wanted * 0}, tmp_path / "b.safetensors")
        (tmp_path / "b.safetensors").rename(file)
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-4] if change == "cut" else content[:-96] + bytes(96))
        os.utime(file, ns=(1, 1))  # a write within the resolution of the clock
        with pytest.raises(CheckpointError, match="was written to after this module was built from it"):
            realize(module.parameters())
        return
    realize(module.parameters())
    assert torch.equal(module.weight, wanted)


def test_a_tensor_of_another_dtype_is_read_by_the_library(small, tmp_path):
    import safetensors.torch

    file, scale = tmp_path / "a.safetensors", torch.ones(4).to(torch.float8_e8m0fnu)
    safetensors.torch.save_file({"weight": torch.arange(24.0).view(4, 6), "scale": scale}, file)
    module, found = _deferred(lambda: (_linear(file), safetensors.torch.load_file(file)["scale"]))
    assert isinstance(module.weight, Deferred)
    assert torch.equal(found.view(torch.uint8), scale.view(torch.uint8))


class Pretrained(Base):
    def __init__(self, folder):
        super().__init__()
        self.folder, self.model = folder, None

    def configure_model(self):
        if self.model is None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def tensors(self):
        return (torch.randint(0, 37, (self.samples, 8), generator=torch.Generator().manual_seed(3)),)

    def loss(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class Own(Callback):
    """Bytes of the matrices of this rank."""

    def __init__(self, found):
        self.found = found

    def on_train_start(self, trainer, module):
        own = [each.to_local() if hasattr(each, "to_local") else each for each in module.parameters()]
        self.found += [each.nbytes for each in own if each.dim() > 1 and not each.is_meta]


def fit(kind, folder, world, strategy, *args):
    """Losses, bytes of files that were read, and bytes of the matrices of this rank."""
    before = deferred.SMALL, build_recorder.ROOM, safetensors_files._read, safetensors_files.PAGE_BYTES
    read, own = [], []
    deferred.SMALL, build_recorder.ROOM, safetensors_files._read = 0, 4096, counted(read)
    safetensors_files.PAGE_BYTES = 8
    try:
        module = kind(folder, *args)
        flags = {"callbacks": [Own(own)], "max_epochs": 1, "limit_val_batches": 0}
        make_trainer(world, strategy, quiet=True, **flags).fit(module)
        return {"losses": module.seen, "read": sum(read), "own": sum(own)}
    finally:
        deferred.SMALL, build_recorder.ROOM, safetensors_files._read, safetensors_files.PAGE_BYTES = before


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("llama", 2, {"zero_stage": 3}),
        long("llama", 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        long("llama", 4, {"tensor_parallel_size": 2, "zero_stage": 3}),
        long("llama", 2, {"pipeline_parallel_size": 2}),
        long("mixtral", 2, {"zero_stage": 3}),
        long("mixtral", 2, {"tensor_parallel_size": 2}),
        ("mixtral", 2, {"expert_parallel_size": 2, "zero_stage": 0}),
        long("mixtral", 4, {"expert_parallel_size": 2, "zero_stage": 3}),
    ],
)
def test_pretrained_modules_train_as_on_one_device(kind, world, strategy, saved):
    model, folder = saved(kind)
    (wanted,) = run(fit, Pretrained, str(folder), 1, None, world=1)
    size = sum(parameter.nbytes for parameter in model.parameters())
    everywhere = run(fit, Pretrained, str(folder), world, strategy, world=world)
    for got in everywhere:
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-4, atol=1e-5)
    vectors = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() == 1)
    for got in everywhere:  # plans and proofs run on other numbers, but read vectors: at most ten times
        assert got["own"] < got["read"] <= got["own"] + 10 * vectors
    if strategy == {"zero_stage": 3}:
        assert sum(got["read"] for got in everywhere) == size  # each row once, on the rank that owns it


def _fit_own_file(folders, world, strategy):
    """`fit` on the file that this rank has at a path which all ranks share, as on nodes with disks of their own."""
    before, warn, said = os.getcwd(), placing.rank_zero_warn, []
    os.chdir(folders[int(os.environ["RANK"])])
    placing.rank_zero_warn = said.append
    try:
        return {**fit(Pretrained, "llama", world, strategy), "said": said}
    finally:
        os.chdir(before)
        placing.rank_zero_warn = warn


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, {"zero_stage": 3}),
        long(2, {"zero_stage": 0}),
        long(2, {"tensor_parallel_size": 2}),
        long(4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
)
def test_another_file_at_the_same_path_on_one_rank_gives_the_values_of_rank_0(world, strategy, saved, tmp_path):
    _, folder = saved()
    older = tmp_path / "older" / "llama"
    shutil.copytree(folder, older)
    for file in older.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-64:] = bytes(64)  # names, shapes and places stay
        file.write_bytes(content)
    folders = [str(tmp_path)] * (world - 1) + [str(older.parent)]
    (wanted,) = run(fit, Pretrained, str(folder), 1, None, world=1)
    for got in run(_fit_own_file, folders, world, strategy, world=world):
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-4, atol=1e-5)
        assert any("Ranks read other values of" in text for text in got["said"])


def test_a_mark_depends_on_each_byte_of_a_small_tensor_and_on_few_of_a_large_one(tmp_path):
    file, place = tmp_path / "bytes", {"file": tmp_path / "bytes", "start": 8, "dtype": torch.uint8}
    content = bytearray(os.urandom(2**20))
    file.write_bytes(content)
    small, large = safetensors_files.Slot(shape=(9000,), **place), safetensors_files.Slot(shape=(2**20 - 8,), **place)
    before = safetensors_files.marked(small).mark, safetensors_files.marked(large).mark
    content[8 + 4500] ^= 1
    file.write_bytes(content)
    assert safetensors_files.marked(small).mark != before[0]
    assert safetensors_files.marked(large).mark == before[1]
    content[-1] ^= 1
    file.write_bytes(content)
    assert safetensors_files.marked(large).mark != before[1]


def _shards(folder, dim, sections, page):
    """Bytes that a tensor rank reads for its shards of some matrices, and whether they are right."""
    before, read = (deferred.SMALL, safetensors_files._read, safetensors_files.PAGE_BYTES), []
    deferred.SMALL, safetensors_files._read, safetensors_files.PAGE_BYTES = 0, counted(read), page
    try:
        module = _deferred(lambda: transformers.LlamaForCausalLM.from_pretrained(folder))
    finally:
        deferred.SMALL = before[0]
    wanted = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    mesh = init_device_mesh("cpu", (2,))
    shards = {}
    for name, each in module.named_parameters():
        if "up_proj" in name:
            split = TensorSplit.even(dim, each.shape[dim], 2, sections)
            shards[name] = apply._shard(each, split, mesh), local_part(wanted[name], split, mesh.get_local_rank())
    read.clear()
    try:
        realize(shard for shard, _ in shards.values())
    finally:
        _, safetensors_files._read, safetensors_files.PAGE_BYTES = before
    assert all(torch.equal(shard.to_local(), part) for shard, part in shards.values())
    return sum(read)


@pytest.mark.parametrize(
    ("dim", "sections", "page", "share"),
    [(0, None, 4096, 0.5), (0, (20, 12), 4096, 0.5), (1, None, 32, 0.5), (1, (10, 6), 8, 0.5), (1, None, 4096, 1)],
)
def test_a_tensor_rank_reads_its_rows_and_columns(dim, sections, page, share, saved):
    """Where half a row is less than a page, it reads all of it."""
    model, folder = saved()
    whole = sum(each.nbytes for name, each in model.named_parameters() if "up_proj" in name)
    assert run(_shards, str(folder), dim, sections, page, world=2, group=True) == [share * whole] * 2


def _broken(folder, world):
    deferred.SMALL = 0
    make_trainer(world, {"zero_stage": 3}, quiet=True, max_steps=1, limit_val_batches=0).fit(Pretrained(folder))


def test_a_file_that_was_cut_short_is_named_on_every_rank(saved):
    _, folder = saved()
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WorkerError) as raised:
        run(_broken, str(folder), 2, world=2)
    found = re.findall(rf"CheckpointError: {re.escape(str(file))} is damaged or was cut short", str(raised.value))
    assert len(found) >= 2
    with pytest.raises(CheckpointError, match="was cut short"):
        _deferred(lambda: transformers.LlamaForCausalLM.from_pretrained(folder))


def test_another_shape_is_an_error_on_every_rank(saved):
    _, folder = saved()
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 37', '"vocab_size": 41'))
    with pytest.raises(WorkerError, match=r"(?s)rank 0.*size mismatch.*rank 1.*size mismatch|ignore_mismatched_sizes"):
        run(_broken, str(folder), 2, world=2)
