"""The modules that are gathered and reduced together, and the parameters that FSDP2 cannot shard."""

import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeGuard

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import APART_BYTES
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.expert_modules import ExpertsKind, find_experts, run_before
from lightning_3d.module.forward import Layer, is_plain
from lightning_3d.module.packed_weights import PACKED_KINDS, is_special, is_whole
from lightning_3d.module.torch_private import is_compiled
from lightning_3d.ranks.shards import local
from lightning_3d.sandbox.writes import step_writes

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
_LIMITED = (
    "since each data rank would shorten the rows of its own samples. Leave max_norm={0} out, and shorten all rows"
    " between steps: weight.mul_(({0} / weight.norm(dim=1, keepdim=True)).clamp(max=1))"
)
TOGETHER_BYTES = 4 * 2**20
"""Parameters of fewer bytes in all are one unit where a step frees none.

For so few bytes the hooks of each block cost more than overlap gives. A step of eight blocks of width 64 took 32 ms of
the host, and 17 ms as one unit.
"""


def shard_units(module: nn.Module, anatomy: Anatomy, *, freed: bool, warns: bool = False) -> list[nn.Module]:
    """Return the blocks that are sharded one by one, in the order of the module tree. The root takes what is left.

    Blocks of other pipeline stages are left out. A block whose parameters also occur outside of it (tied weights) stays
    with the root, because FSDP2 wants one owner. Where it `warns`, it names blocks of the root that may be experts. A
    block is `freed` where its parameters are freed after its forward.
    """
    if not freed and _is_small(module):
        return []
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    units, within = dict[int, nn.Module](), set[int]()
    found = (each for each in find_experts(module) if each.kind is ExpertsKind.LISTED)
    lists = {experts.name for experts in found if not run_before(module, experts)}
    for chain in anatomy.chains:
        # ranks call an expert each where their tokens go there, and a mixture equally often
        mixture = [name] if (name := chain.name.rpartition(".")[0]) else []
        if warns and chain.name in lists and not mixture:
            rank_zero_warn(_MAY_BE_EXPERTS.format(chain.name))
        for name in mixture if chain.name in lists else chain.blocks:
            for unit in _callable_modules(module.get_submodule(name)):
                inside = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
                here = any(not parameter.is_meta for parameter in unit.parameters())
                if here and all(owners[key] == count for key, count in inside.items()):
                    units[id(unit)] = unit
                    if name in mixture and chain.name in lists:  # a gate of several layers is a chain too
                        within.update(id(inner) for inner in unit.modules() if inner is not unit)
    return [unit for key, unit in units.items() if key not in within]


_MAY_BE_EXPERTS = (
    "{!r} may be a list of experts: a weight beside it has a row for each of them. Ranks may call other experts, so"
    " zero_stage=3 gathers them with the rest and keeps them. Put blocks that run one after the other into an"
    " nn.Sequential: they are freed one by one."
)


def outside_units(module: nn.Module, units: list[nn.Module]) -> dict[str, nn.Module]:
    """Return the large modules outside of `units` that are gathered for their calls, by name.

    A module that is called inside of compiled code stays with the root, since hooks would end the compiled graph. So
    does one whose weight another module has too.
    """
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    left_out = {id(part) for unit in units for part in unit.modules()}
    found = {}
    for name, part in module.named_modules():
        if is_compiled(part):
            left_out.update(id(inner) for inner in part.modules())
        own = [parameter for parameter in part.parameters(recurse=False) if not parameter.is_meta]
        if id(part) in left_out or not own or part is module or not _is_unit(part):
            continue
        if sum(local(parameter).nbytes for parameter in own) >= APART_BYTES and all(owners[id(p)] == 1 for p in own):
            found[name] = part
    return found


def refuse_layer_drop(module: nn.Module) -> None:
    """Raise where code skips blocks at random, as Hugging Face's encoders do by `layerdrop`.

    Each data rank draws others. Where code asks if FSDP shards it, as that of wav2vec2 does, it skips none instead.
    """
    for name, inner in module.named_modules():
        draws = inner.training or any(parameter.requires_grad for parameter in inner.parameters())  # it may train later
        code = getattr(inspect.unwrap(type(inner).forward), "__code__", None)
        for key in [each for each in code.co_names if "layerdrop" in each.replace("_", "")] if code and draws else []:
            value = getattr(inner, key, getattr(getattr(inner, "config", None), key, None))
            if isinstance(value, float) and value > 0:
                raise UnsupportedError(
                    f"{name!r} skips its blocks at random in training ({key}={value:g}), on each data rank others."
                    " zero_stage=1 to 3 gathers a block and adds its gradients on all of them at once. Set it to 0"
                    " where the model is configured, or use zero_stage=0."
                )


def _is_unit(module: nn.Module) -> bool:
    """Return True for a module that is called, has all its parameters itself, and that FSDP2 can shard."""
    called = type(module).forward is not nn.Module.forward and not isinstance(module, ParametrizationList)
    inside = sum(1 for _ in module.parameters())
    own = {parameter.dtype for parameter in module.parameters(recurse=False)}
    sparse = isinstance(module, _LOOKED_UP) and module.sparse
    return called and not sparse and len(own) == 1 and inside == sum(1 for _ in module.parameters(recurse=False))


def looks_up(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return True for a module that only looks up rows of its weight, whose values its backward does not need."""
    return isinstance(module, nn.Embedding) and is_plain(module, nn.Embedding, up_to=Layer.OWN)  # ours does too


def _is_small(module: nn.Module) -> bool:
    """Return True for few parameters of one dtype: FSDP2 refuses a unit of several."""
    here = {parameter for parameter in module.parameters() if not parameter.is_meta}
    if len({parameter.dtype for parameter in here}) > 1:
        return False
    return sum(local(parameter).nbytes for parameter in here) < TOGETHER_BYTES


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module`, or its children where it is only a container that nobody calls.

    What `torch.compile` returns has its forward as an attribute. Hooks inside of it would end the compiled graph.
    """
    if type(module).forward is not nn.Module.forward or is_compiled(module):
        yield module
        return
    for child in module.children():
        yield from _callable_modules(child)


def unshardable(units: list[nn.Module], owned: Collection[nn.Parameter] = ()) -> dict[nn.Parameter, str]:
    """Return the parameters that are not sharded, with the reason; they are replicated instead. The root comes last."""
    refused: dict[nn.Parameter, str] = {}
    sparse = {
        module.weight for unit in units for module in unit.modules() if isinstance(module, _LOOKED_UP) and module.sparse
    }
    seen: set[nn.Parameter] = set()
    for unit in units:
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        dtypes = Counter(p.dtype for p in own if p.ndim and p.requires_grad and not p.is_meta)
        usual = dtypes.most_common(1)[0][0] if dtypes else None
        for parameter in own:
            if parameter.is_meta:
                refused[parameter] = "another pipeline stage owns it"
            elif parameter.ndim == 0:
                refused[parameter] = "it is a scalar"
            elif not parameter.numel():
                refused[parameter] = "it has no elements"
            elif is_whole(parameter):
                refused[parameter] = (
                    f"it is quantised ({type(parameter).__name__}), and only {PACKED_KINDS} are divided"
                )
            elif is_special(parameter):
                refused[parameter] = f"its optimizer knows it by its class ({type(parameter).__name__})"
            elif parameter in sparse:
                refused[parameter] = "its gradients are sparse"
            elif usual is not None and parameter.requires_grad and parameter.dtype != usual:
                refused[parameter] = f"it is {parameter.dtype} among {usual}"
    refused |= dict.fromkeys(owned, "its experts are those of other ranks")
    return refused


def refuse_limited(module: nn.Module) -> None:
    """Raise for an embedding with `max_norm`, whose look-up shortens rows: those of this rank's samples alone."""
    for name, inner in module.named_modules():
        if isinstance(inner, _LOOKED_UP) and inner.max_norm is not None:
            raise step_writes(f"{name}.weight", _LIMITED.format(inner.max_norm))
