"""Adapters of PEFT in a checkpoint: PEFT's own configuration, and its own name for each tensor.

PEFT is asked at the save, where the module is there. `export` needs neither PEFT nor the module.
"""

import json
import sys
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_3d.checkpoint.module_loading_private import saved_buffers

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
