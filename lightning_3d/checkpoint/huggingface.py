"""Weights of a checkpoint in the layout of Hugging Face. Offline, a tensor at a time."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn

from lightning_3d.checkpoint.collect import WEIGHTS
from lightning_3d.checkpoint.hold import beside
from lightning_3d.checkpoint.parts import NAMES, write_part
from lightning_3d.checkpoint.single import load_file
from lightning_3d.checkpoint.stored import Opened, StoredDict, StoredTensor, existing, materialize
from lightning_3d.errors import CheckpointError, ConfigurationError

CONFIGS = "lightning_3d_configs"
"""Under this key a checkpoint has the configurations of the Hugging Face models in the module."""
SHARD_BYTES = 5 * 10**9


def configs_of(module: nn.Module) -> dict[str, str]:
    """Name of each Hugging Face model in `module` -> its configuration as JSON. The outermost ones."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        config: Any = getattr(child, "config", None)
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and hasattr(child, "save_pretrained") and hasattr(config, "to_json_string"):
            found[name] = config.to_json_string()
    return found


def export(directory: str | Path, out: str | Path, *, to: str = "safetensors", prefix: str | None = None) -> list[Path]:
    """Write the weights of the checkpoint `directory`, of either format, to the folder `out`; returns the files.

    Where the module held a Hugging Face model, `out` is one that `from_pretrained` loads.

    Args:
        to: only "safetensors".
        prefix: of the names to export, left off in `out`; by default that of the Hugging Face model, if there is one.
    """
    if to != "safetensors":
        raise ConfigurationError(f'to={to!r} is not a format to export to; there is "safetensors".')
    state = _state(existing(directory))
    configs = state.get(CONFIGS, {})
    if prefix is None:
        prefix = f"{next(iter(configs))}." if len(configs) == 1 else ""
    weights = state.get(WEIGHTS, {})
    stored = {key: weights.stored(key) if isinstance(weights, StoredDict) else weights[key] for key in weights}
    wanted = {
        key.removeprefix(prefix): tensor
        for key, tensor in stored.items()
        if key.startswith(prefix) and isinstance(tensor, StoredTensor | Tensor)
    }
    if not wanted:
        raise CheckpointError(f"{directory} has no weights whose names begin with {prefix!r}.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = _write(out, wanted)
    if prefix.rstrip(".") in configs:
        written.append(_put(out / "config.json", configs[prefix.rstrip(".")]))
    return written


class _Mapped(TorchCheckpointIO):
    """Leaves tensors on disk until they are read."""

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _state(path: Path) -> dict[str, Any]:
    if path.is_file():
        return load_file(_Mapped(), path, True, local=True)
    opened = Opened.open(path)
    opened.verify()
    return opened.state()


def _write(out: Path, tensors: dict[str, StoredTensor | Tensor]) -> list[Path]:
    shards = list(_shards(tensors))
    files: list[Path] = []
    where: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        header = {key: (NAMES[tensors[key].dtype], tensors[key].shape) for key in names}
        new = beside(out / name)
        try:
            write_part(new, header, (materialize(tensors[key]) for key in names))
            os.replace(new, out / name)
        finally:
            new.unlink(missing_ok=True)
        files.append(out / name)
        where |= dict.fromkeys(names, name)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        index_text = json.dumps({"metadata": total, "weight_map": where}, indent=2)
        files.append(_put(out / "model.safetensors.index.json", index_text))
    return files


def _shards(tensors: dict[str, StoredTensor | Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _put(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def with_configs(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """`checkpoint` with what `export` will need."""
    configs = configs_of(module)
    return {**checkpoint, CONFIGS: configs} if configs else checkpoint
