"""Models by name: the published shapes of `conf/models/`, and plain sizes such as `7b`."""

import re
from dataclasses import replace

from lightning_3d.errors import PlannerError, did_you_mean
from lightning_3d.module.show import parse_count, show_count
from lightning_3d.tools.planner.model_config import FAMILIES
from lightning_3d.tools.planner.plain_yaml import conf_folder, read_plain
from lightning_3d.tools.planner.transformer import Transformer


def _named(name: str, family: str, sequence: int, **sizes: object) -> Transformer:
    """A GPT has as many learned positions as a sample has tokens."""
    traits = {**FAMILIES[family], "positions": sequence if family == "gpt2" else 0, **sizes}
    return Transformer(name=name, sequence=sequence, **traits)


_SHAPES = read_plain(conf_folder() / "models" / "named.yaml", "models file")
ALIASES = {alias: name for name, shape in _SHAPES.items() for alias in shape.pop("aliases", ())}
MODELS = {name: _named(name, **shape) for name, shape in _SHAPES.items()}
_SIZE = re.compile(r"\d+(?:\.\d+)?[mbt]", re.IGNORECASE)


def named_model(name: str) -> Transformer:
    """The model called `name`, or a GPT of exactly the parameters that a size such as `7.5b` says."""
    key = ALIASES.get(name.lower(), name.lower())
    if key in MODELS:
        return MODELS[key]
    if _SIZE.fullmatch(key):
        return sized_model(key)
    hint = did_you_mean(key, [*MODELS, *ALIASES]) or ": write a name such as llama-7b or a size such as 7b."
    raise PlannerError(f"no model is called {name!r}{hint} A config.json file or module.Class works too.")


def sized_model(size: str) -> Transformer:
    """A GPT of exactly `size` parameters, with the layers of the nearest published GPT and width to match."""
    parameters = parse_count(size, "model size")
    gpts = [shape for shape in MODELS.values() if not shape.gated]
    nearest = min(gpts, key=lambda shape: abs(shape.parameters / parameters - parameters / shape.parameters))
    hidden = max(128, round((parameters / (12 * nearest.layers)) ** 0.5 / 128) * 128)
    shape = _named(size, "gpt2", 2048, layers=nearest.layers, hidden=hidden, heads=hidden // 128, vocabulary=51200)
    while shape.embedding_parameters > parameters / 2 and shape.hidden > 128:
        shape = replace(shape, hidden=shape.hidden - 128, heads=shape.heads - 1)
    if parameters < shape.embedding_parameters * 2:
        # Its blocks would have next to no parameters, or fewer than none.
        raise PlannerError(
            f"a GPT of {size} parameters would be little more than its embeddings: give at least"
            f" {show_count(2 * shape.embedding_parameters)}, or --layers --hidden --heads --vocabulary --sequence."
        )
    return replace(shape, nominal=parameters)
