"""Dropout inside a split region: masks differ by tensor rank there, and agree everywhere else.

All tensor ranks draw from equal generators, so masks on unsplit activations agree. For a call on a shard the ranks draw
a common seed from that generator, which keeps them in step. Seed and rank give the mask. This holds on every device and
under recomputation, because only the generator's state matters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.sandbox.silence import SDPA, is_random
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.tensor_plan import UnitPlan


class ShardDropout(TorchFunctionMode):
    """For one forward of a block: the n-th random call acts on a shard where `acts_on_shard[n]` says so. Without
    `attention`, its calls are not counted: it draws by itself.
    """

    def __init__(self, acts_on_shard: Sequence[bool], axis: Axis, *, attention: bool = True) -> None:
        super().__init__()
        self.left, self.axis, self.attention = list(acts_on_shard), axis, attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counted = self.attention or func is not SDPA
        if counted and is_random(func, args, kwargs) and self._next() and draws_mask(func, args, kwargs):
            first = args[0] if args else next(iter(kwargs.values()))
            with own_stream(self.axis, first):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _next(self) -> bool:
        return self.left.pop(0) if self.left else False


class ShardDraws:
    """Tells from the present rates if training calls of `block` draw masks for shards."""

    def __init__(self, block: nn.Module, plan: UnitPlan) -> None:
        calls = zip(plan.dropouts, plan.dropout_modules, strict=True)
        names = [name for acts_on_shard, name in calls if acts_on_shard]
        self.always = None in names
        """True where other code than a dropout module draws."""
        self.modules = [block.get_submodule(name) for name in names if name is not None]

    def __bool__(self) -> bool:
        return self.always or any(module.p for module in self.modules)


def draws_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a random call draws from a generator. With a rate of 0 it does not.

    A seed for such a call would move the main stream, and so the order of samples, away from one device's.
    """
    if func is SDPA:
        return True  # `is_random` checked the rate
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and rate > 0


@contextmanager
def own_stream(axis: Axis, like: Tensor) -> Iterator[None]:
    """A random stream of this tensor rank, from a seed that all ranks draw together."""
    seed = int(torch.randint(2**40, ()))
    devices = [like.device] if like.device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=like.device.type if devices else "cuda"):
        torch.manual_seed(seed * axis.size + axis.rank)
        yield
