"""Random calls of a forward, silenced for a proof or listed for a plan."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

DROPOUTS: frozenset[Any] = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.native_dropout,
})  # fmt: skip
"""Functions that zero a random part of their first argument."""


def _fill(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.fill_(value)


CONSTANTS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((torch.rand, torch.rand_like, Tensor.uniform_), _fill(0.5)),
    **dict.fromkeys((torch.randn, torch.randn_like, torch.normal, Tensor.normal_), _fill(0.0)),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_), _fill(1.0)),
}
"""Functions that draw a tensor, and what a silenced one returns."""
ATTENTION = inspect.signature(F.multi_head_attention_forward)


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws a dropout mask (also inside attention) from a generator."""
    if func is F.scaled_dot_product_attention:
        return attention_rate(args, kwargs) > 0
    return func in DROPOUTS


def attention_rate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The dropout of a call to `scaled_dot_product_attention`."""
    return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


class SilenceRandom(TorchFunctionMode):
    """No dropout, no noise: what is left is a function. Lists the shapes that dropout was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[tuple[int, ...]] = []
        """Shape of the first argument of each random call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # as a whole: what it calls is not seen
            args, kwargs = (), self._attention(args, kwargs)
        if is_random(func, args, kwargs):
            first = args[0] if args else kwargs["input" if "input" in kwargs else "query"]
            self.dropped.append(tuple(first.shape))
            if func is not F.scaled_dot_product_attention:
                return (first, torch.ones_like(first, dtype=torch.bool)) if func is torch.native_dropout else first
            args, kwargs = (
                (*args[:4], 0.0, *args[5:])[: len(args)],
                {**kwargs, **({} if len(args) > 4 else {"dropout_p": 0.0})},
            )
        if func in CONSTANTS:
            with torch.no_grad():
                return CONSTANTS[func](func(*args, **kwargs))
        return self.call(func, args, kwargs)

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of torch's whole attention, without dropout; lists what that would act on."""
        call = ATTENTION.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        query, key, heads = given["query"], given["key"], given["num_heads"]
        if given["training"] and given["dropout_p"] > 0:
            batch = query.shape[1] if query.dim() > 2 else 1
            last = key.shape[0] if given["need_weights"] else query.shape[-1] // heads
            self.dropped.append((batch, heads, query.shape[0], last))
        return {**given, "dropout_p": 0.0}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Everything that is not random."""
        return func(*args, **kwargs)
