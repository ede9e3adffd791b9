"""Files for others and from them: one for stock Lightning, safetensors, checkpoints of Lightning's other strategies."""

import argparse
import json
import re
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d.checkpoint.collect import to_numbers
from lightning_3d.checkpoint.full_files import consolidate, export, with_configs
from lightning_3d.errors import CheckpointError
from lightning_3d.tools.commands import consolidate as consolidate_command
from lightning_3d.tools.commands import export as export_command
from tests.checkpoint.made import save
from tests.checkpoint.trainings import build, train
from tests.parity import make_trainer
from tests.workers import WorkerError, run


def test_stock_to_3d_to_stock(tmp_path):
    """Saved by stock Lightning, resumed in 3D, consolidated, resumed by stock Lightning: as if uninterrupted."""
    (wanted,) = run(train, "GPT", 1, None, 15, world=1)
    run(train, "GPT", 1, None, 5, None, str(tmp_path / "stock.ckpt"), world=1)
    layout = {"zero_stage": 2, "checkpoint_format": "sharded"}
    (first, _) = run(train, "GPT", 2, layout, 10, str(tmp_path / "stock.ckpt"), str(tmp_path / "dir.ckpt"), world=2)
    consolidate(tmp_path / "dir.ckpt", tmp_path / "one.ckpt")
    (last,) = run(train, "GPT", 1, None, 15, str(tmp_path / "one.ckpt"), world=1)
    losses = wanted["losses"]
    torch.testing.assert_close(first["losses"], losses[5:10], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last["losses"], losses[10:], rtol=1e-5, atol=1e-5)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(last["weights"][name], weight, rtol=1e-5, atol=1e-5)


def test_consolidated_is_what_full_saves(tmp_path):
    run(train, "GPT", 2, {"zero_stage": 3, "checkpoint_format": "full"}, 5, None, str(tmp_path / "full.ckpt"), world=2)
    run(train, "GPT", 2, {"zero_stage": 3, "checkpoint_format": "sharded"}, 5, None, str(tmp_path / "d.ckpt"), world=2)
    parser = _parser(consolidate_command)
    assert consolidate_command.run(parser.parse_args([str(tmp_path / "d.ckpt"), str(tmp_path / "one.ckpt")])) == 0
    full, one = torch.load(tmp_path / "full.ckpt"), torch.load(tmp_path / "one.ckpt")
    assert full.keys() == one.keys()
    for name, tensor in full["state_dict"].items():
        assert torch.equal(one["state_dict"][name], tensor)
    ours, theirs = one["optimizer_states"][0], full["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.equal(ours["state"][number][key], value), (number, key)


def _parser(command):
    import argparse

    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser


def test_export_loads_with_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    (result, _) = run(train, "Llama", 2, {"zero_stage": 3, "checkpoint_format": "sharded"}, 2, None,
                      str(tmp_path / "d.ckpt"), world=2)  # fmt: skip
    arguments = [str(tmp_path / "d.ckpt"), "--out", str(tmp_path / "hf")]
    assert export_command.run(_parser(export_command).parse_args(arguments)) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, result["weights"][f"model.{name}"])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_export_of_compiled_models_has_their_own_names(tmp_path):
    transformers = pytest.importorskip("transformers")
    module = build("Llama")
    layers = module.model.model.layers
    layers[0] = torch.compile(layers[0])
    module.model = torch.compile(module.model)
    torch.save(with_configs({"state_dict": module.state_dict()}, module), tmp_path / "x.ckpt")
    export(tmp_path / "x.ckpt", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").is_file()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    weights = {name.replace("_orig_mod.", ""): value for name, value in module.model.state_dict().items()}
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_export_in_several_files_is_read_by_the_library(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    tensors = {f"state_dict.w{index}": torch.randn(64, 64, dtype=torch.bfloat16) for index in range(5)}
    assert save(tmp_path / "d.ckpt", tensors) == [None, None]
    monkeypatch.setattr("lightning_3d.checkpoint.full_files.SHARD_BYTES", 20000)
    files = export(tmp_path / "d.ckpt", tmp_path / "out")
    assert [file.name for file in files][-1] == "model.safetensors.index.json"
    assert len(files) == 4
    loaded = {key: value for file in files[:-1] for key, value in load_file(file).items()}
    assert loaded.keys() == {name.removeprefix("state_dict.") for name in tensors}
    assert all(torch.equal(loaded[name.removeprefix("state_dict.")], tensor) for name, tensor in tensors.items())
    with pytest.raises(CheckpointError, match="no weights"):
        export(tmp_path / "d.ckpt", tmp_path / "out", prefix="nothing.")


def test_adapters_are_written_under_the_names_that_the_checkpoint_notes(tmp_path):
    from safetensors.torch import load_file

    names = {"base_model.model.w.lora_A.weight": "base_model.model.w.lora_A.default.weight"}
    notes = {
        "net.default": json.dumps({"config": {"r": 4}, "names": names}),
        "net.other": json.dumps({"config": {"r": 8}, "names": names}),
        "encoder.default": json.dumps({"config": {}, "names": None}),
    }
    key = "state_dict.net.base_model.model.w.lora_A.default.weight"
    tensors = {key: torch.randn(4, 8), "state_dict.net.base_model.model.w.base_layer.weight": torch.randn(8, 8)}
    assert save(tmp_path / "d.ckpt", tensors, {"lightning_3d_adapters": notes}) == [None, None]
    parser = _parser(export_command)
    written = ["--adapters", "--prefix", "net", "--out", str(tmp_path / "out")]
    assert export_command.run(parser.parse_args([str(tmp_path / "d.ckpt"), *written])) == 0
    for folder, rank in ((tmp_path / "out", 4), (tmp_path / "out" / "other", 8)):
        (found,) = load_file(folder / "adapter_model.safetensors").items()
        assert found[0] == next(iter(names))
        assert torch.equal(found[1], tensors[key])
        assert json.loads((folder / "adapter_config.json").read_text()) == {"r": rank}
    with pytest.raises(CheckpointError, match="Export the adapters with --adapters"):
        export(tmp_path / "d.ckpt", tmp_path / "x")
    computed = "is not in the state as PEFT saves it"
    for prefix, reason in (("encoder", computed), (None, computed), ("no", r"it has \[\]")):
        with pytest.raises(CheckpointError, match=reason):
            export(tmp_path / "d.ckpt", tmp_path / "x", prefix=prefix, adapters=True)


PROBE = """
import resource, sys, threading, time
import torch
from lightning_3d.checkpoint.full_files import consolidate, export
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
peak, done = anonymous(), False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
consolidate(sys.argv[1], sys.argv[2]); export(sys.argv[1], sys.argv[3])
done = True; thread.join()
print(peak - before)
"""


def test_memory_is_bounded_by_one_tensor(tmp_path):
    tensors = {f"state_dict.w{index}": torch.randn(1024, 2048) for index in range(24)}  # 8 MiB each, 192 MiB in all
    assert save(tmp_path / "d.ckpt", tensors) == [None, None]
    arguments = [str(tmp_path / name) for name in ("d.ckpt", "one.ckpt", "out")]
    result = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 100 * 2**20
    assert torch.equal(torch.load(tmp_path / "one.ckpt")["state_dict"]["w7"], tensors["state_dict.w7"])


def test_a_single_file_is_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "x.ckpt"
    (result, _) = run(train, "Llama", 2, {"zero_stage": 3}, 2, None, str(path), world=2)
    assert path.is_file()
    parser = argparse.ArgumentParser()
    export_command.configure(parser)
    assert export_command.run(parser.parse_args([str(path)])) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(f"{path}-export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, result["weights"][f"model.{name}"])


@pytest.mark.parametrize("command", [consolidate, export])
def test_a_path_that_does_not_exist(tmp_path, command):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*nothing\.ckpt"):
        command(tmp_path / "nothing.ckpt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_one_file_already(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="is one file already"):
        consolidate(tmp_path / "x.ckpt", tmp_path / "out.ckpt")


def test_weights_are_saved_before_training(tmp_path):
    """Those of a module that is converted, say. Nothing has trained, so step 0 and no states are right."""
    trainer = make_trainer(2, {}, quiet=True)
    trainer.strategy.connect(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"] == []


def _as_fsdp(path, out):
    """The file that `consolidate_checkpoint` makes of a directory of FSDPStrategy: optimizer states by name."""
    checkpoint, module = torch.load(path, weights_only=False), build("MLP")
    module_names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    names = [module_names[p] for group in optimizer.param_groups for p in group["params"]]
    (state,) = checkpoint["optimizer_states"]
    state["state"] = {names[number]: value for number, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in reversed(group["params"])]
    torch.save(checkpoint, out)


@pytest.mark.parametrize("strategy", [{"zero_stage": 2}, {"zero_stage": 0, "tensor_parallel_size": 2}])
def test_optimizer_states_by_name_are_loaded(tmp_path, strategy):
    numbered, named = str(tmp_path / "numbered.ckpt"), str(tmp_path / "named.ckpt")
    run(train, "MLP", 1, None, 2, None, numbered, world=1)
    _as_fsdp(numbered, named)
    (expected, _) = run(train, "MLP", 2, strategy, 4, numbered, world=2)
    (result, _) = run(train, "MLP", 2, strategy, 4, named, world=2)
    assert result["losses"] == expected["losses"]
    for name, weight in expected["weights"].items():
        assert torch.equal(result["weights"][name], weight)
    assert result["optimizers"][0]["state"].keys() == expected["optimizers"][0]["state"].keys()


@pytest.mark.parametrize(
    ("file", "remedy"),
    [(".metadata", "consolidate_checkpoint"), ("zero_to_fp32.py", "convert_zero_checkpoint_to_fp32")],
)
def test_a_directory_of_another_strategy_is_named(tmp_path, file, remedy):
    (tmp_path / file).write_text("")
    with pytest.raises(WorkerError, match=remedy):
        run(train, "MLP", 2, {"zero_stage": 2}, 4, str(tmp_path), world=2)
    with pytest.raises(CheckpointError, match=remedy):
        consolidate(tmp_path, tmp_path / "out.ckpt")


def test_parameters_in_other_groups_are_refused():
    saved = {"state": {}, "param_groups": [{"params": ["a"]}, {"params": ["b"]}]}
    assert [group["params"] for group in to_numbers(saved, [("a",), ("b",)], "it")["param_groups"]] == [[0], [1]]
    with pytest.raises(CheckpointError, match=re.escape("in other groups")):
        to_numbers(saved, [("b",), ("a",)], "it")
