"""Parameters of a module by place: before, in and after its blocks, and those that tensor ranks or ZeRO treat alike."""

from collections.abc import Callable, Iterator

from torch import nn

from lightning_3d.module.anatomy import PRODUCTS, Anatomy, Chain

_HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "num_key_value_heads", "nhead")


def frozen(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)


def backward_share(module: nn.Module, chain: Chain, *, before: bool) -> float:
    """Share of the blocks that gradients go back through: all where something `before` them is trained."""
    trained = [any(p.requires_grad for p in module.get_submodule(name).parameters()) for name in chain.blocks]
    ahead = trained.index(True) if True in trained else len(trained)
    return 1.0 if before else 1 - ahead / len(trained)


def outside(
    module: nn.Module, chain: Chain, counts: Callable[[str, nn.Parameter], bool] = lambda name, parameter: True
) -> tuple[int, int]:
    """Elements of the parameters that count, before and after the chain, in the order of registration."""
    before, after, passed = 0, 0, False
    for name, parameter in module.named_parameters():
        if name.startswith(f"{chain.name}." if chain.name else tuple(f"{block}." for block in chain.blocks)):
            passed = True
        elif passed:
            after += parameter.numel() * counts(name, parameter)
        else:
            before += parameter.numel() * counts(name, parameter)
    return before, after


def vocabulary(module: nn.Module, chain: Chain) -> set[int]:
    """Parameters outside the blocks that tensor ranks split: the largest embedding, and heads with as many rows."""
    inside = {id(parameter) for name in chain.blocks for parameter in module.get_submodule(name).parameters()}
    outside = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear) and id(m.weight) not in inside]
    rows = max((m.num_embeddings for m in outside if isinstance(m, nn.Embedding)), default=0)
    return {id(p) for m in outside if len(m.weight) == rows for p in m.parameters()}


def whole(module: nn.Module, chain: Chain) -> int:
    """Elements in the blocks that a tensor axis leaves unsplit: norms, and biases as long as the stream is wide.

    Of three products in a row (queries, keys, values) with such biases, the biases are split.
    """
    return sum(p.numel() for name in chain.blocks for p in _unsplit(module.get_submodule(name)))


def _unsplit(block: nn.Module) -> Iterator[nn.Parameter]:
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    width = linears[-1].out_features if linears else 0
    square = [part.bias for part in linears if part.in_features == part.out_features == width]
    for parameter in (one for one in block.parameters() if one.ndim == 1):
        split = any(parameter is bias for bias in square[:-1]) or (width and len(parameter) != width)
        if not split:
            yield parameter


def products(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that only products use. A head that is tied to an embedding is none."""
    parts = [part for part in module.modules() if isinstance(part, (*PRODUCTS, nn.MultiheadAttention))]
    others = {id(p) for part in module.modules() if part not in parts for p in part.parameters(recurse=False)}
    yield from (p for part in parts for p in part.parameters(recurse=False) if id(p) not in others)


def half(block: nn.Module) -> int:
    return sum(parameter.numel() for parameter in products(block))


def regions(block: nn.Module) -> int:
    """Products that lead back to the stream between blocks. Of several square ones, one does."""
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    back = [part for part in linears if part.out_features == linears[-1].out_features]
    square = sum(part.in_features == part.out_features for part in back)
    return max(1, len(back) - square + (square > 0))


def vectors(module: nn.Module, chain: Chain) -> int:
    """Elements in the blocks that are no matrices."""
    blocks = (module.get_submodule(name) for name in chain.blocks)
    return sum(parameter.numel() for block in blocks for parameter in block.parameters() if parameter.ndim < 2)


def tied(module: nn.Module, anatomy: Anatomy) -> int:
    return sum(module.get_parameter(group[0]).numel() for group in anatomy.tied)


def matrices(block: nn.Module) -> int:
    """Parameters of a block that a tensor axis could divide: of two in a row the first by columns, the next by rows."""
    return sum(parameter.ndim > 1 for parameter in block.parameters())


def heads(block: nn.Module) -> tuple[int, ...]:
    """Head counts that modules of the block, or the configs that they keep, say they have."""
    owners = [owner for part in block.modules() for owner in (part, getattr(part, "config", None))]
    found = {getattr(owner, name, None) for owner in owners for name in _HEADS}
    return tuple(sorted(size for size in found if type(size) is int and size > 0))
