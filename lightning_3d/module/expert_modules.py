"""The experts of a module: parameters indexed by expert, or a list of equal experts. Reads, changes nothing.

Sizes and signatures show them, so each find is a candidate: whoever divides experts proves the division.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

ROUTING = re.compile("ind|idx|ids$|expert|chosen|select|top_?k")
"""Names of the argument that holds the numbers of each token's experts."""


class ExpertsKind(Enum):
    """How the code of a mixture reaches its experts."""

    ROUTED = "routed"
    """By a call (hidden states, numbers of experts, their weights): both last ones have a row for each token."""
    LISTED = "listed"
    """By a call of each expert, a child of an `nn.ModuleList` or `nn.ModuleDict`."""
    STACKED = "stacked"
    """By products over the expert dimension in the forward of the module that owns the parameters."""


@dataclass(frozen=True)
class Experts:
    """The experts of one mixture."""

    name: str
    """The module that owns the parameters, or the list of experts (which may have a forward of its own)."""
    count: int
    parameters: tuple[str, ...]
    """Full names. Dimension 0 counts the experts. Of a list, all parameters of all experts, expert by expert."""
    kind: ExpertsKind

    def of_expert(self, number: int) -> tuple[str, ...]:
        """The parameters of one expert of a list."""
        return of_expert(self.parameters, self.count, number)


def of_expert(parameters: tuple[str, ...], count: int, number: int) -> tuple[str, ...]:
    """Those of one expert, of the parameters of all `count` experts of a list, expert by expert."""
    size = len(parameters) // count
    return parameters[number * size : (number + 1) * size]


def find_experts(module: nn.Module) -> list[Experts]:
    """The experts in `module`, which may be on meta, in the order of its modules."""
    found: list[Experts] = []
    owners = {"": module}
    for name, child in module.named_modules():
        owners[name] = child
        if any(each.kind is ExpertsKind.LISTED and name.startswith(f"{each.name}.") for each in found):
            continue
        owner = owners[name.rpartition(".")[0]]
        experts = _listed(name, child, owner) or _indexed(name, child, owner)
        found += [experts] if experts is not None else []
    return found


def _listed(name: str, experts: nn.Module, owner: nn.Module) -> Experts | None:
    children = list(experts.named_children())
    if not isinstance(experts, nn.ModuleList | nn.ModuleDict) or len(children) < 2 or owner is experts:
        return None
    shapes = [{own: tuple(p.shape) for own, p in child.named_parameters()} for _, child in children]
    types = [[type(each) for each in child.modules()] for _, child in children]
    holds_lists = any(isinstance(each, nn.ModuleList) for each in children[0][1].modules())
    if holds_lists or shapes.count(shapes[0]) < len(shapes) or types.count(types[0]) < len(types):
        return None
    if not _has_router(owner, len(children), children[0][1].named_parameters(), inside=experts):
        return None
    names = tuple(f"{name}.{number}.{own}" for number, child in children for own, _ in child.named_parameters())
    return Experts(name, len(children), names, ExpertsKind.LISTED)


def _indexed(name: str, module: nn.Module, owner: nn.Module) -> Experts | None:
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    counts = Counter(parameter.shape[0] for parameter in own.values() if parameter.dim() == 3)
    if type(module).__module__.startswith("torch.nn") or not counts:  # a convolution
        return None
    count = counts.most_common(1)[0][0]
    indexed = [key for key, p in own.items() if p.dim() > 2 or (p.dim() == 2 and _is_bias(key))]
    indexed = [key for key in indexed if own[key].shape[0] == count]
    routed = _takes_routes(module)
    if count < 2 or not (routed or _has_router(owner, count, ((key, own[key]) for key in indexed), *indexed)):
        return None
    names = tuple(f"{name}.{key}" if name else key for key in indexed)
    return Experts(name, count, names, ExpertsKind.ROUTED if routed else ExpertsKind.STACKED)


def _is_bias(name: str) -> bool:
    return "bias" in name or name.startswith("b")


def _takes_routes(module: nn.Module) -> bool:
    """Return True for a forward of (hidden states, numbers of experts, weights)."""
    arguments = list(inspect.signature(module.forward).parameters)
    return len(arguments) > 2 and bool(ROUTING.search(arguments[1]))


def _has_router(
    owner: nn.Module, count: int, experts: Iterator[tuple[str, Tensor]], *indexed: str, inside: nn.Module | None = None
) -> bool:
    """Return True where `owner` has a matrix from a width of the experts to a score of each, not `inside` of a list."""
    widths = {size for _, parameter in experts if parameter.dim() > 1 for size in parameter.shape[-2:]}
    own = set() if inside is None else {id(parameter) for parameter in inside.parameters()}
    for name, parameter in owner.named_parameters():
        if parameter.dim() != 2 or id(parameter) in own or name.rpartition(".")[2] in indexed:
            continue
        rows, columns = parameter.shape
        if (rows == count and columns in widths) or (columns == count and rows in widths):
            return True
    return False
