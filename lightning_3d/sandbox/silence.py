"""The rule that makes random calls of a forward constant, and lists them."""

import inspect
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.sandbox.interceptor import Call, Rule

SDPA: Any = F.scaled_dot_product_attention
"""torch's own function, also while another one has its name."""
DROPOUTS: frozenset[Any] = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.native_dropout,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
})  # fmt: skip
"""Functions that zero a random part of their first argument."""
DROPOUT_MODULES = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
"""Modules that call one of them with their own rate `p`."""


NORMAL = (torch.randn, torch.randn_like, torch.normal, Tensor.normal_)
CONSTANTS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((torch.rand, torch.rand_like, Tensor.uniform_), methodcaller("fill_", 0.5)),
    **dict.fromkeys(NORMAL, methodcaller("fill_", 1.0)),  # not 0: code divides noise by its norm
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_), methodcaller("fill_", 1.0)),
}
"""Functions that draw a tensor, and how the result of a silenced one is filled."""
CHOICES = (
    torch.randint, torch.randint_like, torch.randperm, torch.multinomial, Tensor.multinomial, Tensor.random_,
    torch.poisson, torch.binomial, F.gumbel_softmax, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_,
    Tensor.log_normal_,
)  # fmt: skip
"""The others that draw: indices, or numbers which a constant would not stand for."""
ATTENTION = inspect.signature(F.multi_head_attention_forward)


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call draws a dropout mask (also inside attention) from a generator."""
    if func is SDPA:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    return func in DROPOUTS


class SilenceRandom(Rule):
    """Drop nothing and draw constants, so that a forward is a function. Lists the shapes that dropout was asked for.
    The constant is `extreme` in place of numbers between 0 and 1, where code is to take each of its branches.
    """

    def __init__(self, extreme: float | None = None) -> None:
        self.extreme, self.draws = extreme, 0
        self.dropped: list[tuple[int, ...]] = []
        """Shape of the first argument of each random call."""
        self.modules: list[nn.Module | None] = []
        """The module of `DROPOUT_MODULES` that made each call, None for calls of other code."""
        self.functions: list[Any] = []
        """The function that each call is of. `SDPA` for attention of any name."""
        self.lengths = set[int]()
        """Of the random tensors that were drawn, dropout apart; 0 for one number."""

    def before(self, call: Call) -> Call:
        if call.func is F.multi_head_attention_forward:  # the calls within it are not intercepted
            call = call._replace(args=(), kwargs=self._attention(call))
        func, args, kwargs = call.func, call.args, call.kwargs
        if is_random(func, args, kwargs):
            first = args[0] if args else kwargs["input" if "input" in kwargs else "query"]
            self.dropped.append(tuple(first.shape))
            self.modules.append(_dropout_module(call.caller))
            self.functions.append(func)
            if func is SDPA:
                rate = {} if len(args) > 4 else {"dropout_p": 0.0}
                return call._replace(args=(*args[:4], 0.0, *args[5:])[: len(args)], kwargs={**kwargs, **rate})
            kept = _keep_all if func is torch.native_dropout else _identity
            return call._replace(func=kept, args=(first,), kwargs={})
        if func not in CONSTANTS:
            return call
        self.draws += 1
        if self.draws > (10_000 if self.extreme is None else 1_000):
            raise RuntimeError(f"code draws {self.draws:,} times, maybe until a number fits (rejection sampling).")
        fill = CONSTANTS[func] if self.extreme is None or func in NORMAL else methodcaller("fill_", self.extreme)
        return call._replace(func=partial(_constant, func, fill))

    def after(self, call: Call, result: Any) -> None:
        if call.func in CONSTANTS or call.func in CHOICES:
            self.lengths.add(len(result) if result.ndim and len(result) > 1 else 0)

    def _attention(self, call: Call) -> dict[str, Any]:
        """The arguments of a call to torch's own attention, without dropout. Lists the shape of its mask."""
        bound = ATTENTION.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, key, heads = given["query"], given["key"], given["num_heads"]
        if given["training"] and given["dropout_p"] > 0:
            batch = query.shape[1] if query.dim() > 2 else 1
            last = key.shape[0] if given["need_weights"] else query.shape[-1] // heads
            self.dropped.append((batch, heads, query.shape[0], last))
            self.modules.append(None)
            self.functions.append(SDPA)
        return {**given, "dropout_p": 0.0}


class OwnGenerators(Rule):
    """Call `found` where code draws from a generator of its own, or without it let the default one give the numbers."""

    def __init__(self, found: Callable[[], None] | None = None) -> None:
        self.found = found

    def before(self, call: Call) -> Call:
        if call.kwargs.get("generator") is None or not (call.func in CONSTANTS or call.func in CHOICES):
            return call
        if self.found is None:
            return call._replace(kwargs={**call.kwargs, "generator": None})
        self.found()
        return call


def _dropout_module(frame: FrameType | None) -> nn.Module | None:
    while frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", F.__name__):
        frame = frame.f_back
    owner = frame.f_locals.get("self") if frame is not None else None
    ours = isinstance(owner, DROPOUT_MODULES) and frame is not None and frame.f_code is type(owner).forward.__code__
    return owner if ours else None


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _keep_all(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, torch.ones_like(tensor, dtype=torch.bool)


def _constant(func: Any, fill: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return fill(func(*args, **kwargs))
