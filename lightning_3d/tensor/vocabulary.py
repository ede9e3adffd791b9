"""Embeddings and output heads that are split by vocabulary."""

from collections.abc import Collection, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.module.anatomy import parameter_names, place_of
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, is_plain, ranks_of
from lightning_3d.module.torch_private import own_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule
from lightning_3d.tensor.autograd_collectives import copy, gather, local_shard, reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.cross_entropy import on_other_rank
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_head import LateNote, expects_loss, hooks_around, is_plain_linear
from lightning_3d.tensor.late_product import Product, is_large
from lightning_3d.tensor.late_tensor import LateTensor, compute_late, is_part, may_wait
from lightning_3d.tensor.overlap import defer, early_sum

WORTH = 0.02
"""Share of the module's parameters from which an embedding is split. A smaller one does not repay a sum of ranks."""


def find_vocabulary(
    module: nn.Module, units: Collection[str], elsewhere: Collection[str], size: int, *, ends: Collection[str] | None
) -> dict[str, TensorSplit]:
    """Parameters of embeddings and heads to split, by name.

    These are the largest embeddings outside the blocks, or those with a head, and their heads.

    Parameters of `units`, or used `elsewhere` than in their own module's forward, are not split. `ends` are heads that
    a run showed. Without a run every linear outside the blocks that is as wide as an embedding counts as a head, and
    subclasses of torch's embedding are not split.
    """
    recorded = ends is not None
    total = sum(parameter.numel() for parameter in module.parameters())
    users = parameter_names(module)
    outside = {
        name: child for name, child in module.named_modules(remove_duplicate=False)
        if not any(name == unit or name.startswith(unit + ".") or not unit for unit in units)
    }  # fmt: skip
    embeddings = {name: child for name, child in outside.items() if _can_split_embedding(child, recorded)}
    tables = {id(child.weight) for child in embeddings.values()}
    heads = {
        name: child for name, child in outside.items()
        if is_plain_linear(child) and (id(child.weight) in tables or ends is None or name in ends)
    }  # fmt: skip
    most = max((child.num_embeddings for child in embeddings.values()), default=0)
    rows = {most, *(child.out_features for child in heads.values() if ends is not None)}
    large = {
        id(child.weight): child.num_embeddings
        for child in embeddings.values()
        if child.num_embeddings in rows and child.num_embeddings >= 4 * size and child.weight.numel() >= WORTH * total
    }
    chosen = {name: child for name, child in embeddings.items() if id(child.weight) in large}
    chosen |= {name: child for name, child in heads.items() if child.out_features in large.values()}
    matrices = (nn.Embedding, nn.Linear)
    free = {f"{other}.{own}" if other else own for other in chosen for own in ("weight", "bias")} | {
        name for names in users.values() for name in names
        if recorded and not isinstance(place_of(module, name)[0], matrices)
    }  # fmt: skip
    splits: dict[str, TensorSplit] = {}
    for child in chosen.values():
        own = [parameter for parameter in (child.weight, getattr(child, "bias", None)) if parameter is not None]
        names = [name for parameter in own for name in users[parameter]]
        if free.issuperset(names) and not set(names) & set(elsewhere):
            splits |= {name: TensorSplit.even(0, child.weight.shape[0], size) for name in names}
    return splits


def holding_heads(module: nn.Module, units: Collection[str], ends: Collection[str], size: int) -> list[str]:
    """Those of `units` that contain a head of an embedding outside of them: one of `ends`, or a tied one."""
    inside = lambda name: any(not unit or name.startswith(f"{unit}.") for unit in units)  # noqa: E731
    outside = [m for name, m in module.named_modules() if isinstance(m, nn.Embedding) and not inside(name)]
    rows = {embedding.num_embeddings for embedding in outside if embedding.num_embeddings >= 4 * size}
    tables = {id(embedding.weight) for embedding in outside}
    heads = [
        name for name, m in module.named_modules()
        if is_plain_linear(m) and m.out_features in rows and (name in ends or id(m.weight) in tables)
    ]  # fmt: skip
    return [unit for unit in units if unit and any(name.startswith(f"{unit}.") for name in heads)]


def patch_vocabulary(module: nn.Module, splits: Mapping[str, TensorSplit], axis: Axis, undo: UndoStack) -> None:
    """Patch the modules that own `splits`. `undo` reverts it."""
    for name in dict.fromkeys(name.rpartition(".")[0] for name in splits):
        owner = module.get_submodule(name)
        if not isinstance(owner, nn.Embedding | nn.Linear):
            continue  # it names another module's bias and does not use it
        split = splits[f"{name}.weight" if name else "weight"]
        if Layer.SPLIT in ranks_of(owner):
            continue
        if isinstance(owner, nn.Embedding):
            add_layer(ShardedEmbedding(owner, split, axis), undo)
        else:
            add_layer(ShardedHead(module, split, axis, name), undo)


class ShardedEmbedding(ForwardLayer, rank=Layer.SPLIT):
    """The forward of an `nn.Embedding` with sharded rows."""

    def __init__(self, module: nn.Embedding, split: TensorSplit, axis: Axis) -> None:
        super().__init__(module)
        self.axis, self.plain = axis, is_plain(module, nn.Embedding)
        ((self.start, self.stop),) = split.pieces[axis.rank]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.plain:
            return self.look_up(*args, **kwargs)
        with Interceptor(_LookUp(self)):  # the user's forward does more than look up: it may scale the rows
            return self.next(*args, **kwargs)

    def look_up(self, input: Tensor) -> Tensor:
        """The rows of the full embedding for `input`."""
        # An index that no rank has raises on every rank, as in an unsplit embedding.
        elsewhere = on_other_rank(input, self.start, self.stop, self.module.num_embeddings)
        index = (input - self.start).masked_fill(elsewhere, 0)
        # Rows of other ranks are masked, so only the padding row's own gradient needs care.
        padding = self.module.padding_idx
        padding = padding - self.start if padding is not None and self.start <= padding < self.stop else None
        found = F.embedding(index, local_shard(self.module.weight), padding)
        return reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis)


class _LookUp(Rule):
    """Inside an embedding's own forward, make a look-up in its weight a sharded one."""

    def __init__(self, sharded: ShardedEmbedding) -> None:
        self.sharded = sharded

    def before(self, call: Call) -> Call:
        named = dict(zip(("input", "weight"), call.args, strict=False)) | call.kwargs
        if call.func is F.embedding and named["weight"] is self.sharded.module.weight:
            return call._replace(func=self.sharded.look_up, args=(named["input"],), kwargs={})
        return call


class ShardedHead(ForwardLayer, rank=Layer.SPLIT):
    """The forward of the `nn.Linear` called `name` in `root`, with sharded outputs."""

    def __init__(self, root: nn.Module, split: TensorSplit, axis: Axis, name: str) -> None:
        super().__init__(root.get_submodule(name))
        self.split, self.axis, self.note = split, axis, LateNote(name)
        self.hooks = hooks_around(root, name)

    def __call__(self, input: Tensor) -> Tensor:
        late = expects_loss(self.module, self.hooks)
        part = input if late and may_wait() and is_part(input) else None
        input = compute_late(input if part is None else part.local)
        split = TensorSplit(input.dim() - 1, self.split.pieces)
        if part is not None or (late and may_wait() and is_large(input, self.split.size, self.axis.size)):
            bias = None if self.module.bias is None else local_shard(self.module.bias)
            rows, product = Product.of(copy(input, self.axis), local_shard(self.module.weight), bias)
            found = LateTensor.of(rows, split, self.axis, product=product)
            return self.note.once(found) if part is None else part.with_rows(found)
        logits = self._logits(input)
        return LateTensor.of(logits, split, self.axis) if late else gather(logits, self.axis, split)

    def _logits(self, input: Tensor) -> Tensor:
        early = early_sum(self.axis.begin_all_reduce)
        inside = copy(input, self.axis, early)
        weight, bias = local_shard(self.module.weight), self.module.bias
        bias = None if bias is None else local_shard(bias)
        deferral = defer(self.module, weight) if input.requires_grad else None
        if deferral is None or early is None:
            return F.linear(inside, weight, bias)
        return deferral.product(deferral.launch(inside, early), bias)


def _can_split_embedding(module: nn.Module, recorded: bool) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and "weight" in own_parameters(module)
        and (recorded or is_plain(module, nn.Embedding))
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )
