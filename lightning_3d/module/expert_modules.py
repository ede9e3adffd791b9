"""The experts of a module: parameters indexed by expert, or a list of equal experts. Reads, changes nothing.

Sizes and signatures show them, so each find is a candidate: whoever divides experts proves the division.
"""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from textwrap import dedent
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import own_parameters

ROUTING = re.compile("ind|idx|ids$|expert|chosen|select|top_?k")
"""Names of the argument that holds the numbers of each token's experts."""
FACTORS = re.compile("weight|prob|score|gate")
"""Names of the argument that holds their weights, which some of `ROUTING` are part of too."""


class ExpertsKind(Enum):
    """The way in which the code of a mixture reaches its experts."""

    ROUTED = "routed"
    """By a call with hidden states, the numbers of each token's experts, and their weights."""
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
    routers: tuple[str, ...] = ()
    """Parameters beside a list that may choose of it, named as in the module that has both."""


def of_expert(parameters: tuple[str, ...], count: int, number: int) -> tuple[str, ...]:
    """Those of one expert, of the parameters of all `count` experts of a list, expert by expert."""
    size = len(parameters) // count
    return parameters[number * size : (number + 1) * size]


class RoutedCall:
    """The arguments of experts that are called with hidden states, numbers of experts and weights, in their order."""

    def __init__(self, module: nn.Module) -> None:
        self.name, self.arguments = type(module).__name__, list(inspect.signature(module.forward).parameters)
        first, *others = self.arguments[:3]
        numbers = [name for name in others if ROUTING.search(name)] if len(others) == 2 else []
        numbers.sort(key=lambda name: bool(FACTORS.search(name)))
        self.routes = [first, numbers[0], *(name for name in others if name != numbers[0])] if numbers else []
        """Names of hidden states, numbers of experts and their weights. Empty for another forward."""

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Hidden states, numbers and weights of a call, and its other arguments."""
        others = dict(zip(self.arguments, args, strict=False)) | kwargs
        return [others.pop(name) for name in self.routes], others

    def check(self, hidden: Tensor, index: Tensor, weights: Tensor, instead: str) -> None:
        """Raise where tokens have no numbers and weights of their own. `instead` is what the user can do."""
        if index.shape != weights.shape or hidden.shape[:-1] != index.shape[:-1]:
            raise UnsupportedError(
                f"{self.name} is called with hidden states of shape {tuple(hidden.shape)}, experts of shape"
                f" {tuple(index.shape)} and weights of shape {tuple(weights.shape)}. Ranks divide experts that are"
                f" called with some experts and as many weights for each token. {instead}"
            )

    def run(self, forward: Callable[..., Tensor], routes: list[Tensor], others: dict[str, Any]) -> Tensor:
        """The result of rows of tokens. The user's code may not run without rows: it gets one that nothing uses."""
        empty = not len(routes[0])
        given = dict(zip(self.routes, [pad(each, (0, 0, 0, 1)) for each in routes] if empty else routes, strict=True))
        result = forward(*(given[name] for name in self.arguments[:3]), **others)
        return result[:0] if empty else result


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


def routed_experts(module: nn.Module) -> list[Experts]:
    """Those of `find_experts` that are called with routes: the numbers that travel to them are known."""
    return [each for each in find_experts(module) if each.kind is ExpertsKind.ROUTED]


def expert_around(module: nn.Module, name: str) -> str:
    """The expert of another mixture that has the module `name` inside, "" where there is none."""
    for path, listed in module.named_modules():
        lists = isinstance(listed, nn.ModuleList | nn.ModuleDict) and len(listed) > 1
        if lists and path and name.startswith(f"{path}."):
            owner, first = module.get_submodule(path.rpartition(".")[0]), next(listed.children())
            if any(_routers(owner, len(listed), first.named_parameters(), inside=listed)):
                return f"{path}.{name.removeprefix(path + '.').partition('.')[0]}"
    return ""


def _listed(name: str, experts: nn.Module, owner: nn.Module) -> Experts | None:
    children = list(experts.named_children())
    if not isinstance(experts, nn.ModuleList | nn.ModuleDict) or len(children) < 2 or owner is experts:
        return None
    shapes = [{own: tuple(p.shape) for own, p in child.named_parameters()} for _, child in children]
    types = [[type(each) for each in child.modules()] for _, child in children]
    holds_lists = any(isinstance(each, nn.ModuleList) for each in children[0][1].modules())
    if holds_lists or shapes.count(shapes[0]) < len(shapes) or types.count(types[0]) < len(types):
        return None
    routers = tuple(_routers(owner, len(children), children[0][1].named_parameters(), inside=experts))
    names = tuple(f"{name}.{number}.{own}" for number, child in children for own, _ in child.named_parameters())
    return Experts(name, len(children), names, ExpertsKind.LISTED, routers) if routers else None


def _indexed(name: str, module: nn.Module, owner: nn.Module) -> Experts | None:
    own = {key: parameter for key, parameter in own_parameters(module).items() if parameter is not None}
    counts = Counter(parameter.shape[0] for parameter in own.values() if parameter.dim() == 3)
    if type(module).__module__.startswith("torch.nn") or not counts:  # a convolution
        return None
    count = counts.most_common(1)[0][0]
    indexed = [key for key, p in own.items() if p.dim() > 2 or (p.dim() == 2 and ("bias" in key or key[0] == "b"))]
    indexed = [key for key in indexed if own[key].shape[0] == count]
    routed = bool(RoutedCall(module).routes)
    if count < 2 or not (routed or any(_routers(owner, count, ((key, own[key]) for key in indexed), *indexed))):
        return None
    names = tuple(f"{name}.{key}" if name else key for key in indexed)
    return Experts(name, count, names, ExpertsKind.ROUTED if routed else ExpertsKind.STACKED)


def _routers(
    owner: nn.Module, count: int, experts: Iterator[tuple[str, Tensor]], *indexed: str, inside: nn.Module | None = None
) -> Iterator[str]:
    """Matrices of `owner` from a width of the experts to a score of each, not `inside` of a list."""
    widths = {size for _, parameter in experts if parameter.dim() > 1 for size in parameter.shape[-2:]}
    own = set() if inside is None else {id(parameter) for parameter in inside.parameters()}
    for path, part in owner.named_modules():
        for name, parameter in part.named_parameters(path, recurse=False):
            if parameter.dim() != 2 or id(parameter) in own or name in indexed or isinstance(part, nn.Embedding):
                continue
            rows, columns = parameter.shape
            scores = columns == count and rows in widths and not isinstance(part, nn.Linear)  # else it has features
            if scores or (rows == count and columns in widths):
                yield name


def run_before(module: nn.Module, experts: Experts) -> bool:
    """Return True where code has looped over a list when it reads what may choose of it: a head of as many classes."""
    path, _, name = experts.name.rpartition(".")
    known = [list(_read_by(type(module.get_submodule(path)), method)) for method in ("forward", "training_step")]
    firsts = {router.partition(".")[0] for router in experts.routers}
    loops = [(read, len(read) - read[::-1].index(name)) for read in known if name in read]
    ends = [(read, read.index("", start) if "" in read[start:] else len(read)) for read, start in loops]
    return bool(ends) and all(firsts <= {*read[end:]} - {*read[:end]} for read, end in ends)


def _read_by(kind: type, name: str, *within: str) -> Iterator[str]:
    """Attributes that a method reads, in the order of its code, and methods that it calls; "" where a loop ends."""
    method = inspect.unwrap(getattr(kind, name, int))
    users = isinstance(method, FunctionType) and not method.__module__.startswith(("torch", "lightning"))
    try:
        code = ast.parse(dedent(inspect.getsource(method))) if users and name not in within else None
    except (OSError, SyntaxError):  # it has no source
        code = None
    yield from (name,) if code is None else _read_in(code, kind, name, *within)


def _read_in(node: ast.AST, kind: type, *within: str) -> Iterator[str]:
    called = getattr(node, "func", None)
    for part in sorted(ast.iter_child_nodes(node), key=lambda part: part is called):  # after the arguments
        yield from _read_in(part, kind, *within)
    if isinstance(node, ast.Attribute):
        yield from _read_by(kind, node.attr, *within)
    elif isinstance(node, ast.For | ast.While | ast.comprehension):
        yield ""
