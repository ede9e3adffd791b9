"""Gradients of replicated parameters, averaged over the data axis in the background of backward."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_3d.comm.buckets import Bucket, make_buckets
from lightning_3d.comm.collectives import Collectives
from lightning_3d.comm.control import exchange
from lightning_3d.comm.engine import Engine
from lightning_3d.errors import UnsupportedError


class Replicas:
    """Keeps replicas equal: after `finish()` every gradient is the mean over the ranks.

    A bucket is reduced as soon as its gradients are there and all buckets before it have been started, so every rank
    starts the same collectives in the same order, whatever its backward did. What is left is settled in `finish()`.

    Args:
        parameters: the replicated parameters, the same list on every rank. Frozen ones are left out by the step.
        collectives: over the ranks of the data axis, on a group that nothing else uses.
        engine: runs them in the background.
        bucket_mb: small gradients travel together in buckets of about this size.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], collectives: Collectives, engine: Engine, *, bucket_mb: float = 4.0
    ) -> None:
        self.collectives, self.engine, self.bucket_bytes = collectives, engine, int(bucket_mb * 2**20)
        self.parameters = list(dict.fromkeys(parameters))
        self._position = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._orders: dict[tuple[bool, ...], list[int]] = {}
        """Arrival order in backward for each set of trainable parameters that has occurred."""
        self._held = False
        self._ready: dict[nn.Parameter, None] = {}
        """Parameters whose gradient changed since the last sync, in order of arrival."""
        self._buckets: list[Bucket] | None = None
        self._started = 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters if _can_hook(p)]

    def hold(self, held: bool) -> None:
        """While held, gradients only accumulate on this rank."""
        self._held = held

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """`hold` as a context."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def finish(self) -> None:
        """End of a backward: average what it produced and wait for it. Every rank calls it, also with no gradient."""
        if not self._held:
            self.reduce()

    def reduce(self) -> None:
        """Average what has accumulated since the last sync, held or not. Every rank must call it."""
        raise NotImplementedError

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
