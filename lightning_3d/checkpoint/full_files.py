"""A sharded checkpoint as one file that a stock Trainer resumes from. Offline, a tensor at a time.

Weights of a checkpoint in the layout of Hugging Face. Offline, a tensor at a time. For adapters of PEFT a checkpoint
has PEFT's own configuration, and its own name for each tensor: PEFT is asked at the save, where the module is there.
`export` needs neither of them.
"""

import json
import os
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_3d.checkpoint.collect import OPTIMIZERS, WEIGHTS, to_numbers
from lightning_3d.checkpoint.locks import unguessable_name
from lightning_3d.checkpoint.remote_path import Place, RemotePath, located
from lightning_3d.checkpoint.safetensors_files import NAMES, write_part
from lightning_3d.checkpoint.single_file import load_file, save_with_checksum
from lightning_3d.checkpoint.stored import (
    RANKS,
    NamedOptimizer,
    Opened,
    StoredDict,
    StoredTensor,
    existing,
    groups,
    read_tensors,
)
from lightning_3d.errors import CheckpointError, ConfigurationError
from lightning_3d.module.torch_private import saved_buffers

IN_MEMORY_BYTES = 2**20
"""Tensors up to this size are not worth a file of their own."""


def consolidate(directory: Any, out: Any, *, weights_only: bool | None = None) -> None:
    """Write the checkpoint in `directory` to the file `out`, exactly as Lightning itself would save it.

    Only one tensor at a time is in memory. The directory of `out` needs room for the state twice, or the folder for
    temporary files if `out` is remote. `weights_only=False` also unpickles what has no plain form (some
    hyperparameters), which may run any code in it.
    """
    out, found = located(out), existing(directory)
    if out.is_dir():
        raise CheckpointError(f"{out} is a directory; name the file to write.")
    if found.is_file():
        raise CheckpointError(f"{directory} is one file already, from which a stock Trainer resumes. Copy it.")
    opened = Opened.open(found)
    opened.verify()
    state = opened.state(weights_only)
    out.parent.mkdir(parents=True, exist_ok=True)
    room = out.parent if isinstance(out, Path) else None
    with tempfile.TemporaryDirectory(dir=room, prefix=f".{out.name}.") as scratch:
        whole = _Scratch(Path(scratch)).whole
        plain = {key: value for key, value in state.items() if key != OPTIMIZERS}
        plain |= {key: read_tensors(state.get(key, {}), whole) for key in (RANKS, WEIGHTS)}
        if OPTIMIZERS in state:
            plain[OPTIMIZERS] = [read_tensors(numbered(each), whole) for each in state[OPTIMIZERS]]
        with open(Path(scratch) / "whole", "xb") as file:
            save_with_checksum(plain, file)
        if isinstance(out, RemotePath):
            out.store.put_file(f"{scratch}/whole", out.url)
        else:
            os.replace(Path(scratch) / "whole", out)


class _Scratch:
    """Full tensors in files, so that they need no memory of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def whole(self, stored: StoredTensor) -> Tensor:
        if stored.nbytes <= IN_MEMORY_BYTES:
            return stored.read_full()
        self.count += 1
        file = str(self.folder / str(self.count))
        mapped = torch.from_file(file, shared=True, size=stored.shape.numel(), dtype=stored.dtype).view(stored.shape)
        stored.read_into(mapped)
        return mapped


def numbered(optimizer: NamedOptimizer) -> dict[str, Any]:
    """The state of an optimizer as torch numbers it on one device, tensors still on disk."""
    state = {key: optimizer.stored(key) for key in optimizer}
    names = [[name] for group in state["param_groups"] for name in group["params"]]
    return to_numbers(state, names, "an optimizer")


CONFIGS = "lightning_3d_configs"
"""Under this key a checkpoint has the configurations of the Hugging Face models in the module."""
SHARD_BYTES = 5 * 10**9
COMPILED = "_orig_mod."
"""What `torch.compile(module)` puts before the names of the module."""


def configs_of(module: nn.Module) -> dict[str, str]:
    """Name of each Hugging Face model in `module` -> its configuration as JSON. The outermost ones."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        config: Any = getattr(child, "config", None)
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and hasattr(child, "save_pretrained") and hasattr(config, "to_json_string"):
            found[name] = config.to_json_string()
    return found


def export(
    directory: Any, out: Any, *, to: str = "safetensors", prefix: str | None = None, adapters: bool = False
) -> list[Place]:
    """Write the weights of the checkpoint `directory`, of either format, to the folder `out`; returns the files.

    If the module had a Hugging Face model, `from_pretrained` loads `out`. Names are those of the uncompiled module.

    Args:
        to: only "safetensors".
        prefix: of the names to export, left off in `out`; by default that of the Hugging Face model, if there is one.
        adapters: write adapters of PEFT, each as PEFT itself saves it, in place of all weights.
    """
    if to != "safetensors":
        raise ConfigurationError(f'to={to!r} is not a format to export to; there is "safetensors".')
    state = _state(existing(directory))
    notes = {name.replace(COMPILED, ""): text for name, text in state.get(ADAPTERS, {}).items()}
    if adapters:
        return _export_adapters(directory, state, notes, located(out), prefix)
    if notes and prefix is None:
        raise CheckpointError(
            f"The module of {directory} had adapters of PEFT ({', '.join(notes)}). `from_pretrained` would not find its"
            " weights by their names. Export the adapters with --adapters. For one model without adapters, call"
            " merge_and_unload() after fit, and save_pretrained. With --prefix all names are exported as they are."
        )
    configs = {f"{name}.".replace(COMPILED, ""): text for name, text in state.get(CONFIGS, {}).items()}
    if prefix is None:
        prefix = next(iter(configs)) if len(configs) == 1 else ""
    prefix = prefix.replace(COMPILED, "")
    stored = _stored_weights(state)
    wanted = {
        key.removeprefix(prefix): tensor
        for key, tensor in stored.items()
        if key.startswith(prefix) and isinstance(tensor, StoredTensor | Tensor)
    }
    if not wanted:
        raise CheckpointError(f"{directory} has no weights whose names begin with {prefix!r}.")
    out = located(out)
    out.mkdir(parents=True, exist_ok=True)
    written = _write(out, wanted)
    config = configs.get(f"{prefix.rstrip('.')}.")
    if config is not None:
        written.append(_put(out / "config.json", config))
    return written


def _stored_weights(state: dict[str, Any]) -> dict[str, Any]:
    weights = state.get(WEIGHTS, {})
    return {
        key.replace(COMPILED, ""): weights.stored(key) if isinstance(weights, StoredDict) else weights[key]
        for key in weights
    }


def _export_adapters(
    directory: Any, state: dict[str, Any], notes: dict[str, str], out: Place, prefix: str | None
) -> list[Place]:
    wanted = {name: json.loads(text) for name, text in notes.items() if name.startswith(prefix or "")}
    models = {name.rpartition(".")[0] for name in wanted}
    stored, written = _stored_weights(state), []
    ours = {
        name: {
            theirs: f"{name.rpartition('.')[0]}.{own}".replace(COMPILED, "") for theirs, own in note["names"].items()
        }
        for name, note in wanted.items()
        if note["names"] is not None
    }
    computed = [name for name in wanted if name not in ours or not stored.keys() >= set(ours[name].values())]
    if len(models) != 1 or computed:
        reason = f"{computed[0]} is not in the state as PEFT saves it" if computed else f"it has {sorted(models)}"
        raise CheckpointError(
            f"--adapters writes the adapters of one PEFT model, and {directory} has none to write: {reason}. Choose a"
            " model with --prefix, or call save_pretrained of the PEFT model after fit."
        )
    for name, note in wanted.items():
        adapter = name.rpartition(".")[2]
        folder = out if adapter == "default" else out / adapter
        folder.mkdir(parents=True, exist_ok=True)
        written += _write(folder, {theirs: stored[own] for theirs, own in ours[name].items()}, WEIGHTS_FILE)
        written.append(_put(folder / CONFIG, json.dumps(note["config"], indent=2, sort_keys=True)))
    return written


class _Mapped(TorchCheckpointIO):
    """Leaves tensors on disk until they are read."""

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _state(path: Place) -> dict[str, Any]:
    if path.is_file():
        local = isinstance(path, Path)
        return load_file(_Mapped() if local else TorchCheckpointIO(), str(path), True, local=local)
    opened = Opened.open(path)
    opened.verify()
    return opened.state()


def _write(out: Place, tensors: dict[str, StoredTensor | Tensor], stem: str = "model") -> list[Place]:
    shards = groups({name: tensor.nbytes for name, tensor in tensors.items()}, SHARD_BYTES)
    files: list[Place] = []
    where: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors"
        header = {key: (NAMES[tensors[key].dtype], tensors[key].shape) for key in names}
        file = out / name
        new = unguessable_name(file if isinstance(file, Path) else Path(tempfile.gettempdir()) / name)
        try:
            write_part(new, header, (read_tensors(tensors[key]) for key in names))
            if isinstance(file, Path):
                new.replace(file)
            else:
                file.store.put_file(str(new), file.url)
        finally:
            new.unlink(missing_ok=True)
        files.append(file)
        where |= dict.fromkeys(names, name)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        index_text = json.dumps({"metadata": total, "weight_map": where}, indent=2)
        files.append(_put(out / f"{stem}.safetensors.index.json", index_text))
    return files


def _put(path: Place, text: str) -> Place:
    path.write_bytes(text.encode())
    return path


def with_configs(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    notes = {CONFIGS: configs_of(module), ADAPTERS: adapters_of(module)}
    return {**checkpoint, **{key: note for key, note in notes.items() if note}}


ADAPTERS = "lightning_3d_adapters"
"""Under this key a checkpoint has a note for each adapter of a PEFT model in the module."""
CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model"


def adapters_of(module: nn.Module) -> dict[str, str]:
    """Name of each adapter, behind that of its model -> its note as JSON. Layers without a PEFT model have one note."""
    model_class = getattr(sys.modules.get("peft"), "PeftModel", ())
    layer_class = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    models: list[tuple[str, Any]] = [(n, m) for n, m in module.named_modules() if isinstance(m, model_class)]
    inside = tuple(f"{name}." if name else "" for name, _ in models)
    layers = (name for name, part in module.named_modules() if isinstance(part, layer_class))
    injected = next((name for name in layers if not name.startswith(inside)), None)
    notes = {
        f"{name}.{adapter}": {"config": _plain(model, config), "names": _names(model, adapter)}
        for name, model in models
        for adapter, config in model.peft_config.items()
    } | ({} if injected is None else {f"{injected}.injected": {"config": {}, "names": None}})
    return {name: json.dumps(note, default=str) for name, note in notes.items()}


def _plain(model: Any, config: Any) -> dict[str, Any]:
    """As PEFT's `save_pretrained` writes it. Without a type of task, the class of the base says how to load it."""
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    base = type(model.get_base_model())
    loads = {"base_model_class": base.__name__, "parent_library": base.__module__}
    return {**content, "inference_mode": True} | ({} if config.task_type else {"auto_mapping": loads})


def _names(model: Any, adapter: str) -> dict[str, str] | None:
    """PEFT's name of each tensor in an adapter's file -> its name in `model`. None where a tensor is computed."""
    from peft import get_peft_model_state_dict
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    config = model.peft_config[adapter]
    known: dict[str, Tensor] = dict(chain(model.named_parameters(remove_duplicate=False), saved_buffers(model)))
    if config.is_prompt_learning:
        names = [name for name in known if name.startswith(f"prompt_encoder.{adapter}.")]
        return {"prompt_embeddings": names[0]} if names == [f"prompt_encoder.{adapter}.embedding.weight"] else None
    targets = getattr(config, "target_modules", None) or ()
    tokens = config.peft_type == "TRAINABLE_TOKENS" or getattr(config, "trainable_token_indices", None) is not None
    embeds = not tokens and not isinstance(targets, str) and any(name in targets for name in EMBEDDING_LAYER_NAMES)
    # "auto" would ask the hub for the size of the vocabulary
    chosen = get_peft_model_state_dict(model, known, adapter, save_embedding_layers=embeds)
    ours = {id(tensor): name for name, tensor in reversed(known.items())}
    if any(id(tensor) not in ours for tensor in chosen.values()):
        return None
    return {name: ours[id(tensor)] for name, tensor in chosen.items()}
