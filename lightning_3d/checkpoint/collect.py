"""The contribution of one rank to a checkpoint: tensors with their placements, and everything else as plain JSON.

Optimizer states by parameter name instead of by number: numbers depend on the layout, names do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.placement import Placement, Splits, describe
from lightning_3d.checkpoint.plain_json import dumps, parse
from lightning_3d.checkpoint.safetensors_files import NAMES
from lightning_3d.errors import CheckpointError
from lightning_3d.module.anatomy import parameter_names
from lightning_3d.tensor.geometry import TensorSplit

OPTIMIZERS, WEIGHTS = "optimizer_states", "state_dict"


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    placement: Placement
    replicated: bool = True
    """True where ranks with the same box have the same values. Otherwise the values of the first rank are saved."""


@dataclass
class Collected:
    """One rank's share of a checkpoint."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    listing: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    """Values without a plain form."""
    rest: str = "{}"
    """Everything that is not a tensor, as JSON."""
    optimizers: str = "[]"
    own: str = "{}"
    """The rank-local state: random streams, for example."""


class Collector:
    def __init__(self, module: nn.Module, splits: Splits, copies: Mapping[int, TensorSplit | None], rank: int) -> None:
        self.names, self.splits, self.copies, self.rank = parameter_names(module), splits, copies, rank
        self.of_parameter: dict[int, TensorSplit | None] = {}
        self.found = Collected()

    def collect(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], own: Mapping[str, Any]
    ) -> Collected:
        checkpoint = dict(checkpoint)
        named = {name: parameter for parameter, names in self.names.items() for name in names}
        self.of_parameter = dict(self.copies) | {
            id(value): self.splits(named[name]) for name, value in checkpoint.get(WEIGHTS, {}).items() if name in named
        }
        stored = checkpoint.pop(OPTIMIZERS, None)
        pairs = () if stored is None else zip(stored, optimizers, strict=True)  # None: weights alone are saved
        states = [self._named(state, optimizer) for state, optimizer in pairs]
        self.found.rest = self._encode(checkpoint, "")
        self.found.optimizers = self._encode(states, OPTIMIZERS)
        self.found.own = self._encode(dict(own), f"rank{self.rank}")
        return self.found

    def _encode(self, value: Any, at: str) -> str:
        return dumps(value, self._keep, at).decode()

    def _named(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        parameters = parameters_of(optimizer)
        for key, values in state["state"].items():
            for value in values.values() if isinstance(key, int) else ():
                if isinstance(value, Tensor) and value.shape == parameters[key].shape:
                    self.of_parameter[id(value)] = self.splits(parameters[key])
        return to_names(state, labels(parameters, self.names))

    def _keep(self, value: Any, at: str) -> str:
        name = at.lstrip(".")
        while name in self.found.listing or name in self.found.objects:
            name += "~"
        if not isinstance(value, Tensor):
            self.found.objects[name] = value
            return name
        if value.dtype not in NAMES or value.layout.__repr__() != "torch.strided" or value.is_quantized:
            raise CheckpointError(
                f"{name} is a tensor of {value.dtype} and layout {value.layout}, which a sharded checkpoint cannot"
                ' store. Use checkpoint_format="full".'
            )
        placement = describe(value, self.of_parameter.get(id(value)))
        self.found.tensors[name] = value
        # buffers may differ between data ranks; as with DDP, the first rank's count
        self.found.listing[name] = TensorEntry(NAMES[value.dtype], placement, replicated=id(value) in self.of_parameter)
        return name


def merge_optimizers(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The encoded optimizer states of all ranks as one: some parameters have their state on one stage only."""
    merged: list[dict[str, Any]] = parse(texts[0].encode(), OPTIMIZERS)
    for text in dict.fromkeys(texts[1:]):
        for mine, other in zip(merged, parse(text.encode(), OPTIMIZERS), strict=True):
            mine["state"] = {**other["state"], **mine["state"]}
    return merged


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def labels(parameters: Sequence[nn.Parameter], names: Mapping[nn.Parameter, tuple[str, ...]]) -> list[str]:
    """One name for each parameter; what the module does not know is numbered."""
    return [names[p][0] if p in names else f"(parameter {index})" for index, p in enumerate(parameters)]


def to_names(state: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """A `state_dict` with names in place of numbers."""
    groups = [{**group, "params": [labels[number] for number in group["params"]]} for group in state["param_groups"]]
    entries = {labels[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def to_numbers(state: Mapping[str, Any], aliases: Sequence[Sequence[str]], what: str) -> dict[str, Any]:
    """A named state as the `state_dict` of an optimizer whose parameters have these names, in its own order."""
    groups = state["param_groups"]
    stored = [name for group in groups for name in group["params"]]
    number = {name: index for index, names in enumerate(aliases) for name in names}
    missing = sorted(name for name in stored if name not in number)
    if missing or len(stored) != len(aliases):
        raise CheckpointError(
            f"{what} was saved for {len(stored)} parameters and is now built for {len(aliases)}"
            + (f"; {missing[0]!r} is not among them" if missing else "")
            + ". Build the optimizers for the same parameters as when the checkpoint was saved."
        )
    entries = {number.get(key, key): value for key, value in state["state"].items()}
    numbered = [{**group, "params": sorted(number[name] for name in group["params"])} for group in groups]
    if [index for group in numbered for index in group["params"]] != list(range(len(aliases))):
        raise CheckpointError(f"{what} was saved with its parameters in other groups. Build the same groups as then.")
    return {**state, "state": entries, "param_groups": numbered}
