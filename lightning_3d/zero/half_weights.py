"""Mixed precision: weights that autocast would cast for every use are gathered in half precision.

They are half the bytes on the wire and in memory, and autograd keeps no casted copy of another block's weights. Norms,
embeddings and the user's own parameters are gathered in fp32, as autocast computes with them. Gradients are reduced in
fp32. Outside of a step, where the user's code runs without autocast, all weights are gathered in fp32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.anatomy import PRODUCTS, is_transposed_linear
from lightning_3d.module.forward import Layer, is_plain, sums_by_data
from lightning_3d.zero import fsdp_private

_WEIGHT = ("weight", "bias")
_CAST: dict[Any, tuple[str, ...]] = {kind.forward: _WEIGHT for kind in PRODUCTS}
_CAST[nn.MultiheadAttention.forward] = (
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight",
)  # fmt: skip
"""The forward of a module -> its parameters that autocast casts, and that nothing else reads."""


class HalfWeights:
    """The weights of `groups` that are gathered in `dtype` during a step."""

    def __init__(self, groups: Iterable[Any], dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device, self.active = dtype, device, False
        self.params: dict[Any, list[Any]] = {}
        self.used: set[nn.Module] = set()
        """Modules that autocast has computed in this step."""
        for group in groups:
            found = [param for param in group.fsdp_params if _is_cast(param)]
            if found:
                self.params[group] = found
                fsdp_private.reduce_in_full(group)

    def begin(self) -> None:
        self.used.clear()
        self._set(self.dtype)

    def end(self) -> None:
        """Gather in full precision from now on: the code outside of a step does not cast."""
        self._set(None)

    def _set(self, dtype: torch.dtype | None) -> None:
        if self.active != (dtype is not None):
            self.active = dtype is not None
            for group, params in self.params.items():
                fsdp_private.gather_in(group, params, dtype)

    def before_block(self, block: nn.Module, args: Any) -> None:
        """A hook of a block that tensor ranks divide: it may take weights before it calls their modules."""
        self.before_forward(block, self.params, block.modules())

    def before_forward(self, module: nn.Module, groups: Iterable[Any], inside: Iterable[nn.Module] = ()) -> None:
        """Gather weights of `groups` in full precision for good, where `module` is not called under autocast.

        They are those of `module` itself and of the modules `inside`. Some models compute a router in fp32.
        """
        if not self.active:
            return
        if torch.is_autocast_enabled(self.device):
            self.used.add(module)
            return
        here = {module, *inside}
        for group in groups:
            own = [param for param in self.params.get(group, ()) if fsdp_private.owned(param, here)]
            if own and module in self.used and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"A {type(module).__name__} is called under autocast and, later in the same step, without it. Its"
                    " weights are gathered in half precision for the first call, so the second would use rounded ones."
                    " Compute both in the same way, or use zero_stage=0."
                )
            if own:
                self.params[group] = [param for param in self.params[group] if param not in own]
                fsdp_private.gather_in(group, own, None)
                fsdp_private.move_gradients(group, own, self.dtype)


def cast_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of `module`, not yet sharded, that are gathered in half precision."""
    cast, other = set[nn.Parameter](), set[nn.Parameter]()
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            split = isinstance(parameter, DTensor) and parameter.requires_grad
            casts = parameter.dtype == torch.float32 and _casts(each, name, split)
            (cast if casts else other).add(parameter)
    return cast - other


def _is_cast(param: Any) -> bool:
    """Return True where each module that has `param` uses it in an operation for which autocast casts it."""
    return fsdp_private.is_plain_fp32(param) and all(
        _casts(module, name, param.is_dtensor and param.sharded_param.requires_grad)
        for module, name in fsdp_private.places(param)
    )


def _casts(module: nn.Module, name: str, split: bool) -> bool:
    """Return True where `module` uses a parameter as its own forward does: tensor ranks do so with shards.

    What they do not `split` has a gradient that they sum, in the precision of the parameter. Context ranks leave that
    sum to the data axis, which has fp32. A frozen shard is not gathered again inside of its block.
    """
    up_to = Layer.DATA if split or sums_by_data(module) else Layer.SPLIT
    kind = type(module)
    cast = _WEIGHT if is_transposed_linear(kind) else _CAST.get(kind.forward, ())
    return name in cast and is_plain(module, kind, up_to)
