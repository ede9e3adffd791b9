"""Written plans: the user's `tensor_plan`, and the plan that a Hugging Face module declares.

Both are proven like inferred plans. A user's plan that does not compute the same is an error. A declared plan is only
tried first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_3d.errors import TensorPlanError, did_you_mean
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.regions import Region
from lightning_3d.tensor.tensor_plan import UnitPlan

KINDS = ("column", "row", "whole", "experts")


@dataclass(frozen=True)
class WrittenSplit:
    kind: str
    """One of `KINDS`."""
    groups: int = 1
    """Equal sections of a fused matrix, each divided over the ranks."""


def read_plan(module: nn.Module, tensor_plan: Mapping[str, str]) -> dict[str, WrittenSplit]:
    """The user's plan by parameter name. Later patterns win. Raises `TensorPlanError` for a pattern without a match."""
    ways: dict[str, WrittenSplit] = {}
    modules = {name for name, _ in module.named_modules()} - {""}
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for pattern, text in tensor_plan.items():
        way = _parse(pattern, text)
        matched = [name for name in names if any(fnmatchcase(at, pattern) for at in around(name))]
        if not matched:
            hint = did_you_mean(pattern, sorted({*modules, *names})) or "."
            raise TensorPlanError(
                f"tensor_plan: {pattern!r} matches no parameter of {type(module).__name__}, and no module with"
                f" parameters{hint}"
            )
        ways |= dict.fromkeys(matched, way)
    return ways


def declared_plan(module: nn.Module) -> dict[str, WrittenSplit]:
    """Splits declared in the configurations of Hugging Face modules in `module` (`base_model_tp_plan`)."""
    known = {
        "colwise": WrittenSplit("column"),
        "rowwise": WrittenSplit("row"),
        "packed_colwise": WrittenSplit("column", 2),
    }
    ways: dict[str, WrittenSplit] = {}
    for prefix, child in module.named_modules():
        declared = getattr(getattr(child, "config", None), "base_model_tp_plan", None)
        if not isinstance(declared, dict) or getattr(child, "base_model_prefix", "") in dict(child.named_children()):
            continue
        for name, _ in child.named_parameters():
            text = next(
                (how for glob, how in declared.items() if any(fnmatchcase(at, glob) for at in around(name))), None
            )
            if text in known:
                ways[f"{prefix}.{name}" if prefix else name] = known[text]
    return ways


def divide_as_written(
    region: Region,
    parameters: Mapping[str, Tensor],
    ways: Mapping[str, WrittenSplit],
    modules: Mapping[str, nn.Module],
    ranks: int,
) -> UnitPlan:
    """The division of `region` written in `ways`. Other products get the role that they have in the region."""
    splits, shared = dict[str, TensorSplit](), list[str]()
    for sites, kind in ((region.sources, "column"), (region.sinks, "row")):
        for name in (name for site in sites for name in site):
            way, parameter = ways.get(name, WrittenSplit(kind)), parameters[name]
            if parameter.dim() < 2 and way.kind == "row":
                shared.append(name)
                continue
            out = _out_dim(modules[name.rpartition(".")[0]], parameter)
            last = parameter.dim() - 1
            dim = out if way.kind == "column" else last - (out == last)
            size = parameter.shape[dim]
            if size % way.groups or size // way.groups < ranks:
                raise TensorPlanError(
                    f"tensor_plan: {name} has {size} {way.kind}s, which are not {way.groups} equal sections of at least"
                    f" {ranks} (tensor_parallel_size)."
                )
            splits[name] = TensorSplit.even(dim, size, ranks, sections=[size // way.groups] * way.groups)
    return UnitPlan(splits=splits, summed=region.inner, shared=tuple(shared), inputs=dict.fromkeys(region.inputs))


def _parse(pattern: str, text: str) -> WrittenSplit:
    kind, _, groups = str(text).partition(":")
    if kind not in KINDS or (groups and not groups.isdigit()) or (groups and kind in KINDS[2:]):
        raise TensorPlanError(
            f'tensor_plan: {pattern!r} is {text!r}; it must be "column", "row", "whole", "experts" (each rank has whole'
            ' ones), or "column:3" for a matrix of three fused sections.'
        )
    return WrittenSplit(kind, int(groups or 1))


def around(name: str) -> Iterator[str]:
    """A name, and the names of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def innermost(name: str, called: set[str]) -> str:
    """The innermost module around a parameter whose forward ran."""
    return next((at for at in around(name) if at in called), "")


def _out_dim(module: nn.Module, parameter: Tensor) -> int:
    """The dimension of outputs: the first, or the last where the module has its width as an attribute."""
    if parameter.dim() < 2:
        return 0
    width = getattr(module, "nf", None)  # Hugging Face's Conv1D stores its matrix transposed
    return (
        parameter.dim() - 1
        if width == parameter.shape[-1] and not isinstance(module, nn.Linear)
        else parameter.dim() - 2
    )
