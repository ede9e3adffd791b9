"""Parameters of a module by place: before, in and after its blocks, and those that tensor ranks or ZeRO treat alike."""

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_3d.module.anatomy import PRODUCTS, Chain

PLACES = ("first", "block", "last")
_HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "num_key_value_heads", "nhead")


def places(module: nn.Module, chain: Chain, called: Mapping[str, bool]) -> dict[nn.Parameter, set[str]]:
    """Each parameter with its `PLACES`: a pipeline cuts in the order of the first calls.

    `called` has the modules around the blocks, and True for those first called after a block. A module that was not
    called stays behind the one declared before it. A tied parameter may stand at several places.
    """
    found, outside = dict[nn.Parameter, set[str]](), "first"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(inside(chain)):
            place = outside = "block"
        else:
            late = called.get(name.rpartition(".")[0], outside != "first")
            place = outside = "last" if late else "first"
        found.setdefault(parameter, set()).add(place)
    return found


def around(module: nn.Module, chain: Chain) -> dict[nn.Module, str]:
    """The modules with parameters of their own outside of the blocks, with their names."""
    named = {part: name for name, part in module.named_modules() if not f"{name}.".startswith(inside(chain))}
    return {part: name for part, name in named.items() if any(True for _ in part.parameters(recurse=False))}


def inside(chain: Chain) -> str | tuple[str, ...]:
    """Beginnings of the names that are in the blocks."""
    return f"{chain.name}." if chain.name else tuple(f"{block}." for block in chain.blocks)


def backward_share(module: nn.Module, chain: Chain, *, before: bool) -> float:
    """The share of blocks that run a backward: all of them if something `before` the blocks is trained."""
    trained = [any(p.requires_grad for p in module.get_submodule(name).parameters()) for name in chain.blocks]
    ahead = trained.index(True) if True in trained else len(trained)
    return 1.0 if before else 1 - ahead / len(trained)


def vocabulary(module: nn.Module, chain: Chain) -> set[int]:
    """Ids of the parameters outside the blocks that tensor ranks split.

    These are the largest embedding, and the linear layers with as many rows: output heads.
    """
    inside = {id(parameter) for name in chain.blocks for parameter in module.get_submodule(name).parameters()}
    outside = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear) and id(m.weight) not in inside]
    rows = max((m.num_embeddings for m in outside if isinstance(m, nn.Embedding)), default=0)
    return {id(p) for m in outside if len(m.weight) == rows for p in m.parameters()}


def unsplit(module: nn.Module, chain: Chain) -> set[int]:
    """Ids of the parameters in the blocks that tensor ranks leave unsplit: norms, and biases of a block's output.

    A bias of queries, keys or values has the same length and is split.
    """
    return {id(p) for name in chain.blocks for p in _unsplit(module.get_submodule(name))}


def _unsplit(block: nn.Module) -> Iterator[nn.Parameter]:
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    width = linears[-1].out_features if linears else 0
    square = [part.bias for part in linears if part.in_features == part.out_features == width]
    for parameter in (one for one in block.parameters() if one.ndim == 1):
        split = any(parameter is bias for bias in square[:-1]) or (width and len(parameter) != width)
        if not split:
            yield parameter


def products(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of matrix products and of nothing else. A head that is tied to an embedding is not one of them."""
    parts = [part for part in module.modules() if isinstance(part, (*PRODUCTS, nn.MultiheadAttention))]
    others = {id(p) for part in module.modules() if part not in parts for p in part.parameters(recurse=False)}
    yield from (p for part in parts for p in part.parameters(recurse=False) if id(p) not in others)


def regions(block: nn.Module) -> tuple[int, int]:
    """The numbers of matrix products whose output is added to the stream between blocks, and of those that read it.

    Of several square ones (queries, keys, values, output) only the last is added.
    """
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    back = [part for part in linears if part.out_features == linears[-1].out_features]
    square = sum(part.in_features == part.out_features for part in back)
    added = max(1, len(back) - square + (square > 0))
    return added, max(added, len(linears) - added)


def splits(block: nn.Module) -> bool:
    """Return True if tensor ranks can divide a block: it has two matrices or more."""
    return sum(parameter.ndim > 1 for parameter in block.parameters()) > 1


def heads(block: nn.Module) -> tuple[int, ...]:
    """Head counts that modules of the block, or the configs that they keep, say they have."""
    owners = [owner for part in block.modules() for owner in (part, getattr(part, "config", None))]
    found = {getattr(owner, name, None) for owner in owners for name in _HEADS}
    return tuple(sorted(size for size in found if type(size) is int and size > 0))
