"""Parameters of a module by place: before, in and after its blocks, and those that tensor ranks or ZeRO treat alike."""

from collections.abc import Iterator, Mapping
from statistics import mean

from torch import nn

from lightning_3d.module.anatomy import PRODUCTS, Anatomy, Chain, is_transposed_linear

PLACES = ("first", "block", "last")
STACK_SHARE = 0.25
"""Size of the blocks of a second stack, over that of the largest: smaller ones are heads and stems."""
_CONVOLUTIONS = tuple(kind for kind in PRODUCTS if kind is not nn.Linear)
_HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "num_key_value_heads", "nhead")


def main_chain(module: nn.Module, anatomy: Anatomy) -> Chain | None:
    """The blocks that a pipeline would cut between: those of all large stacks, as of an encoder and a decoder."""
    stacks = [chain for chain in anatomy.chains if len(chain.blocks) > 1]
    large = [one for one in stacks if _block_size(one) >= STACK_SHARE * _block_size(stacks[0])]
    if len(large) < 2:
        return next(iter(stacks), None)
    names = {name for one in large for name in one.blocks}
    blocks = tuple(name for name, _ in module.named_modules() if name in names)
    return Chain(name="", blocks=blocks, parameters=sum(one.parameters for one in large))


def _block_size(chain: Chain) -> float:
    return chain.parameters / len(chain.blocks)


def places(module: nn.Module, chain: Chain, called: Mapping[str, bool]) -> dict[nn.Parameter, set[str]]:
    """Each parameter with its `PLACES`: a pipeline cuts in the order of the first calls. See `units_by_place`.

    A tied parameter may stand at several places.
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


def inside(chain: Chain) -> tuple[str, ...]:
    """Beginnings of the names that are in the blocks."""
    return tuple(f"{block}." for block in chain.blocks)


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
    """Ids of the parameters in the blocks that tensor ranks leave unsplit: norms, convolutions, biases of outputs.

    A bias of queries, keys or values has the same length and is split. A block with one matrix stays whole.
    """
    return {id(p) for name in chain.blocks for p in _unsplit(module.get_submodule(name))}


def shared_biases(module: nn.Module, chain: Chain) -> set[int]:
    """Ids of the vectors in the blocks that tensor ranks split, which each of them has."""
    blocks = (module.get_submodule(name) for name in chain.blocks)
    return {id(p) for block in blocks if splits(block) for p in _unsplit(block) if p.ndim < 2}


def _unsplit(block: nn.Module) -> Iterator[nn.Parameter]:
    if not splits(block):
        yield from block.parameters()
        return
    yield from _convolved(block)
    width = _width(block)
    square = [[part.bias for part in own if features(part) == (width, width)] for own in _linears(block).values()]
    split = {id(bias) for own in square for bias in own[:-1]}
    yield from (p for p in block.parameters() if p.ndim == 1 and id(p) not in split and len(p) == (width or len(p)))


def _width(block: nn.Module) -> int:
    """Features that the last product of a block gives; 0 where it has none."""
    last = next(reversed(_linears(block).values()), None)
    return features(last[-1])[1] if last else 0


def _convolved(block: nn.Module) -> Iterator[nn.Parameter]:
    yield from (p for part in block.modules() if isinstance(part, _CONVOLUTIONS) for p in part.parameters())


def channel_dimension(block: nn.Module) -> int:
    """The dimension of features in what passes between blocks: the second where blocks have convolutions."""
    return 1 if any(isinstance(part, _CONVOLUTIONS) for part in block.modules()) else -1


def _linears(block: nn.Module) -> dict[str, list[nn.Module]]:
    """Matrix products of a block, by the module around them. The output of BERT's attention is with its queries."""
    found: dict[str, list[nn.Module]] = {}
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear) or is_transposed_linear(type(part)):
            found.setdefault(name.rpartition(".")[0], []).append(part)
    groups: dict[str, list[nn.Module]] = {}
    for around, own in found.items():
        before = next(reversed(groups), around)
        open_end = len(groups.get(before, ())) > 1 and all(map(_is_square, groups[before]))
        groups.setdefault(before if len(own) == 1 and _is_square(own[0]) and open_end else around, []).extend(own)
    return groups


def features(part: nn.Module) -> tuple[int, int]:
    """Features that a product takes and gives."""
    first, second = part.weight.shape  # type: ignore[misc, operator, union-attr]
    return (first, second) if is_transposed_linear(type(part)) else (second, first)


def _is_square(part: nn.Module) -> bool:
    return len(set(features(part))) == 1


def products(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of matrix products and of nothing else. A head that is tied to an embedding is not one of them."""
    parts = [part for part in module.modules() if isinstance(part, (*PRODUCTS, nn.MultiheadAttention))]
    others = {id(p) for part in module.modules() if part not in parts for p in part.parameters(recurse=False)}
    yield from (p for part in parts for p in part.parameters(recurse=False) if id(p) not in others)


def regions(module: nn.Module, chain: Chain) -> tuple[float, float]:
    """The numbers of matrix products of the mean block whose output is added to the stream, and of those that read it.

    Of several square ones in a module (queries, keys, values, output) only the last is added.
    """
    found = [_regions(block) for block in (module.get_submodule(name) for name in chain.blocks) if splits(block)]
    share = len(found) / len(chain.blocks)
    return (mean(added for added, _ in found) * share, mean(read for _, read in found) * share) if found else (0.0, 0.0)


def _regions(block: nn.Module) -> tuple[int, int]:
    linears, width, added = _linears(block), _width(block), 0
    for own in linears.values():
        back = [features(part) for part in own if features(part)[1] == width]
        square = back.count((width, width))
        added += len(back) - square + (square > 0)
    return max(1, added), max(1, added, sum(map(len, linears.values())) - added)


def splits(block: nn.Module) -> bool:
    """Return True if tensor ranks can divide a block: it has two matrices or more."""
    convolved = {id(parameter) for parameter in _convolved(block)}
    return sum(parameter.ndim > 1 and id(parameter) not in convolved for parameter in block.parameters()) > 1


def heads(module: nn.Module, chain: Chain) -> tuple[int, ...]:
    """Head counts that modules of the blocks, or the configs that they keep, say they have."""
    parts = [part for name in chain.blocks for part in module.get_submodule(name).modules()]
    owners = [owner for part in parts for owner in (part, getattr(part, "config", None))]
    found = {getattr(owner, name, None) for owner in owners for name in _HEADS}
    return tuple(sorted(size for size in found if type(size) is int and size > 0))
