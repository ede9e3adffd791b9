"""The rules for operations of the user's code on shards: random numbers, and slices.

Random numbers: each rank would draw for its shard from the same stream, so that shards repeat each other. Views: a
slice across the shards of several ranks is a copy, and what is written into it is lost.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.module.torch_private import TorchDispatchMode, schema, tree_leaves
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks.shards import like, local
from lightning_3d.sandbox.interceptor import storage

REMEDY = "Do so in setup, where tensors are unsplit, or use data parallelism with zero_stage=0."
_COPY = "_lightning_3d_copy"
"""Set on a tensor that would be a view on one device, and is a copy here."""


def is_copy(tensor: Any) -> bool:
    """Return True for a copy that would be a view on one device."""
    return hasattr(tensor, _COPY)


class ShardRules(TorchDispatchMode):
    """Entered around one operation of the code called `name`, which uses parameters of `parallel.module`."""

    def __init__(self, name: str, parallel: ParallelModule) -> None:
        super().__init__()
        self.name, self.parallel = name, parallel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        arguments = schema(func).arguments
        named = ((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)
        for argument, value in (*zip(arguments, args, strict=False), *named):
            if argument.is_write and any(map(is_copy, tree_leaves(value))):
                raise UnsupportedError(
                    f"{self.name} writes into a slice of a sharded tensor. The slice crosses the shards of several"
                    " ranks, so it is a copy, and the tensor would not change. In on_train_batch_start or"
                    " on_train_batch_end, assign to it (weight[0] = values), or write into the same slice of the weight"
                    f" in self.state_dict(), called on every rank: the weight follows. {REMEDY}"
                )
        result = func(*args, **kwargs)
        if arguments and arguments[0].alias_info is not None and not arguments[0].is_write:
            self._note_copies(args[0], result)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw for the full tensor, as one device does, and keep this rank's shard."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self._concerns, tensors)):
            return func(*args, **kwargs)
        drawn_for, name = tensors[0], func.overloadpacket.__name__
        if len(tensors) > 1 or not name.endswith(("_", "_like")):
            raise UnsupportedError(
                f"{self.name} draws random numbers ({name}) by the values of a sharded tensor. They would not be those"
                f" of one device. Draw them with torch.rand_like(weight) first. {REMEDY}"
            )
        if self.parallel.stages is not None and self._is_gradient(drawn_for):
            raise UnsupportedError(
                f"{self.name} draws random numbers for a gradient. Other stages of the pipeline do not have it and"
                " would draw nothing, so all later random numbers would differ. Draw them for the parameter"
                f" instead (torch.randn_like(weight)), or use {NO_PIPELINE}."
            )
        here = drawn_for.device
        if drawn_for.is_meta:  # all ranks go through as many numbers
            here = next((p.device for p in self.parallel.module.parameters() if not p.is_meta), torch.device("cpu"))
        full = torch.empty_strided(drawn_for.shape, drawn_for.stride(), dtype=drawn_for.dtype, device=here)
        drawn = func(full, *args[1:], **kwargs)
        if drawn_for.is_meta:
            return drawn_for if name.endswith("_") else torch.empty_like(drawn, device="meta")
        if isinstance(drawn_for, DTensor):
            drawn = self.part(drawn_for, drawn, "draws random numbers for")
        return drawn_for.copy_(drawn) if name.endswith("_") else drawn

    def part(self, shard: DTensor, full: Tensor, does: str) -> Tensor:
        """The part of `full` for the rank of `shard`, as a shard. The code `does` something that needs its place."""
        owner = self.owner(shard, does)
        if owner is None:
            raise self._unknown(shard, does)
        return like(shard, local(self.parallel.parameters.shard(owner, full)))

    def _concerns(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor) or self.parallel.stages is None:
            return isinstance(tensor, DTensor)
        if tensor.is_meta:
            return any(p.is_meta and p.shape == tensor.shape for p in self.parallel.module.parameters())
        return self._is_gradient(tensor)

    def _is_gradient(self, tensor: Tensor) -> bool:
        gradients = (p.grad for p in self.parallel.module.parameters() if not p.is_meta)
        return any(grad is not None and storage(grad) == storage(tensor) for grad in gradients)

    def owner(self, tensor: DTensor, does: str) -> nn.Parameter | None:
        """A parameter that is sharded as `tensor` is, None where there is none.

        Raises where the candidates are sharded in several ways, since the code `does` something that needs to know.
        """
        shards = [held.now for held in self.parallel.parameters if isinstance(held.now, DTensor)]
        alike = [p for p in shards if (p.shape, p.placements) == (tensor.shape, tensor.placements)]
        itself = [p for p in alike if storage(tensor) in {storage(each) for each in (p, p.grad) if each is not None}]
        found = itself or alike
        if len({self.parallel.parameters.split(p) for p in found}) > 1:
            raise self._unknown(tensor, does)
        return found[0] if found else None

    def _unknown(self, tensor: Tensor, does: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} {does} a sharded tensor of shape {tuple(tensor.shape)} that is no parameter or gradient. The"
            f" place of its shards is therefore not known. Use the parameter itself. {REMEDY}"
        )

    def _note_copies(self, source: Any, result: Any) -> None:
        for view in tree_leaves(result):
            if isinstance(view, DTensor) and (is_copy(source) or storage(view) != storage(source)):
                owner = self.owner(source, "takes a slice of") if isinstance(source, DTensor) else None
                split = None if owner is None else self.parallel.parameters.split(owner)
                if split is not None and max(map(len, split.pieces)) > 1:
                    raise UnsupportedError(
                        f"{self.name} takes a slice of a fused matrix (shape {tuple(source.shape)}). Each tensor rank"
                        " has a shard of each section, so its rows are in another order here. Take the slice from"
                        f" state_dict(), called on every rank. {REMEDY}"
                    )
                setattr(view, _COPY, True)
