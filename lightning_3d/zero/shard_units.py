"""The modules that are gathered and reduced together, and the parameters that FSDP2 cannot shard."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from lightning_3d.module.anatomy import Anatomy

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)


def shard_units(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Return the blocks that are sharded one by one, in the order of the module tree. The root takes what is left.

    A block that another pipeline stage owns is none; one whose parameters also occur outside of it (tied weights)
    stays with the root: FSDP2 wants one owner.
    """
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    units: dict[int, nn.Module] = {}
    for chain in anatomy.chains:
        for name in chain.blocks:
            for unit in _callable_modules(module.get_submodule(name)):
                inside = Counter(id(parameter) for _, parameter in unit.named_parameters(remove_duplicate=False))
                here = any(not parameter.is_meta for parameter in unit.parameters())
                if here and all(owners[key] == count for key, count in inside.items()):
                    units[id(unit)] = unit
    return list(units.values())


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module`, or its children where it is only a container that nobody calls."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _callable_modules(child)


def unshardable(units: list[nn.Module]) -> dict[nn.Parameter, str]:
    """Return the parameters that FSDP2 refuses, with the reason; they are replicated instead.

    Args:
        units: from `shard_units`, the root last.
    """
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
            elif parameter in sparse:
                refused[parameter] = "its gradients are sparse"
            elif usual is not None and parameter.requires_grad and parameter.dtype != usual:
                refused[parameter] = f"it is {parameter.dtype} among {usual}"
    return refused
