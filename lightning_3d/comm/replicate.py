"""Gradients of replicated parameters, averaged over the data axis in the background of backward.

Gradients are sent in buckets, one collective each.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from lightning_3d.axes.group import Group
from lightning_3d.axes.ring import SMALL_BYTES
from lightning_3d.comm.background_queue import BackgroundQueue, Ending, Handle
from lightning_3d.comm.compression import Compression
from lightning_3d.errors import CheckpointError, DivergenceError, UnsupportedError
from lightning_3d.module.torch_private import grad_hooks
from lightning_3d.ranks.shards import local
from lightning_3d.ranks.talk import PendingMax

LEAST_BYTES, PARTS = 2**20, 4
"""A module with this many times so many bytes has as many buckets."""


class Bucket:
    """Some parameters whose gradients are reduced in one collective.

    Large gradients are reduced in place. Small ones are packed into one buffer, of which they are views afterwards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], packed: bool) -> None:
        self.parameters, self.packed = list(parameters), packed
        self.keys: list[str] = []
        self.awaited: set[nn.Parameter] = set()
        """Those whose gradient has not arrived yet in this backward."""

    def begin(self, gradients: Sequence[Tensor | None], collectives: Group) -> Ending:
        """Begin to average `gradients` (one per parameter; None counts as zero) over the ranks.

        Returns what waits for the averages and makes them the gradients.
        """
        if self.packed:
            buffer, views = self._pack(gradients)
            pieces = [buffer]
        else:
            pieces = views = [self._piece(*both) for both in zip(self.parameters, gradients, strict=True)]
        together = [pieces] if collectives.takes_pieces else pieces
        endings = [collectives.begin_all_reduce(each, average=True) for each in together]

        def end() -> None:
            for ending in endings:
                ending()
            for parameter, gradient, view in zip(self.parameters, gradients, views, strict=True):
                _give(parameter, gradient, view)

        return end

    def _piece(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        """Return the large gradient as it is sent: itself, if it is contiguous."""
        if gradient is None:
            return torch.zeros_like(local(parameter), memory_format=torch.contiguous_format)
        return gradient.contiguous()

    def _pack(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        locals_ = [local(parameter) for parameter in self.parameters]
        buffer = torch.empty(sum(p.numel() for p in locals_), dtype=locals_[0].dtype, device=locals_[0].device)
        pieces = buffer.split([p.numel() for p in locals_])
        views = [piece.view(p.shape) for piece, p in zip(pieces, locals_, strict=True)]
        present = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        if len(present) < len(views):
            buffer.zero_()
        torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        return buffer, views


def _give(parameter: nn.Parameter, gradient: Tensor | None, average: Tensor) -> None:
    """Make `average` the gradient: itself, or its values where the gradient has a graph, a memory format or shards."""
    if gradient is None or gradient.data_ptr() == average.data_ptr():
        return
    grad = parameter.grad
    if type(grad) is Tensor and grad.is_contiguous() and not grad.requires_grad:
        parameter.grad = average
    else:
        gradient.copy_(average)


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut `parameters`, in the order their gradients are expected, into buckets of one dtype and device each.

    Of a small module they are smaller than `bucket_bytes`: the first is sent while backward computes the others.
    """
    bucket_bytes = min(bucket_bytes, max(LEAST_BYTES, sum(map(_size, parameters)) // PARTS))
    buckets: list[Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, _size(parameter) < SMALL_BYTES)
        gathered = open_.setdefault(kind, [])
        gathered.append(parameter)
        if sum(map(_size, gathered)) >= bucket_bytes:
            buckets.append(Bucket(open_.pop(kind), kind[2]))
    return buckets + [Bucket(gathered, kind[2]) for kind, gathered in open_.items()]


def _size(parameter: nn.Parameter) -> int:
    part = local(parameter)
    return part.numel() * part.element_size()


class ReplicatedGradients:
    """Keeps replicas equal: after `finish()` every gradient is the mean over the ranks.

    A bucket is reduced as soon as its gradients are there and all buckets before it have been started. So every rank
    starts the same collectives in the same order, whatever its backward did.

    `finish()` reduces the other buckets. There the ranks send how far they got and which parameters they used. A
    parameter that no rank used keeps `grad=None`. A parameter that some used gets the mean on all; the others count as
    zero. A rank that used all of them does not wait for this.

    Args:
        parameters: the replicated parameters, in the same order on every rank. Frozen ones may be among them.
        collectives: over the ranks of the data axis, on a group that nothing else uses.
        hosts: the same ranks, for messages of the main thread.
        bucket_mb: gradients travel together in buckets of about this size.
        compression: over the same ranks; its memory goes by the position in `parameters`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        collectives: Group,
        engine: BackgroundQueue,
        hosts: dist.ProcessGroup,
        *,
        bucket_mb: float = 25.0,
        compression: Compression | None = None,
    ) -> None:
        self.collectives, self.engine, self.hosts, self.compression = collectives, engine, hosts, compression
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.keys = {parameter: str(index) for index, parameter in enumerate(parameters)}
        self.parameters = [p for p in dict.fromkeys(parameters) if p.is_floating_point() or p.is_complex()]
        self._plans: dict[bytes, list[Bucket]] = {}
        """Buckets for each set of trainable parameters that has occurred, in arrival order once that is known."""
        self._learned: dict[bytes, list[int]] = {}
        """The order of arrival behind a plan, where it is known."""
        self._only_accumulates = False
        self.on_arrival: Callable[[], None] | None = None
        """Called for each gradient of a backward, before it is sent."""
        self._touched: dict[nn.Parameter, None] = {}
        """Parameters whose gradient changed since the last sync, in the order in which they did."""
        self._trained: set[nn.Parameter] = set()
        """Those that were trainable in a backward since then: equal on every rank, whichever its data used."""
        self._current: list[Bucket] | None = None
        self._home: dict[nn.Parameter, Bucket] = {}
        self._handles: list[Handle] = []
        self._last_answer: PendingMax | None = None
        """The answers of the ranks in the last step, if this rank did not wait for it."""
        self._hooks = [_hook(parameter, self._arrived) for parameter in self.parameters]

    def hook_last(self) -> None:
        """Come after hooks that code has added since: they change a gradient before it is sent, as under DDP."""
        for parameter, hook in zip(self.parameters, self._hooks, strict=True):
            late: Any = grad_hooks(parameter, late=True)
            if next(reversed(late)) != hook.id:
                late[hook.id] = late.pop(hook.id)

    def accumulate_only(self, on: bool) -> None:
        """Have gradients only accumulate on this rank, without `finish()` doing anything, or not."""
        self._only_accumulates = on

    def finish(self) -> None:
        """Average the gradients of a backward, at its end. Every rank calls it, also one that used nothing."""
        if self._only_accumulates:
            self._trained.update(p for p in self.parameters if p.requires_grad)
        else:
            self._sync()

    def reduce(self) -> None:
        """Average every gradient there is, accumulated or set, also without a backward. Every rank must call it."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._touched.setdefault(parameter)
        self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        if self.collectives.size > 1:
            self._finish_reductions()
        self._touched.clear()
        self._trained.clear()
        self._current, self._handles = None, []

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        """A gradient was accumulated (autograd calls this in backward)."""
        if not parameter.requires_grad:  # it was frozen after the forward: autograd calls this, and adds nothing
            return
        self._touched[parameter] = None
        if self.on_arrival is not None:
            self.on_arrival()
        if self._only_accumulates or self.collectives.size == 1:
            return
        if parameter.grad is None:
            raise UnsupportedError(
                f"a hook on the gradient of a parameter of shape {tuple(parameter.shape)} takes it away (p.grad = None)"
                " before ranks have averaged it, as where an optimizer steps in the backward. Ranks would get different"
                " weights. Return that optimizer from configure_optimizers."
            )
        current = self._current if self._current is not None else self._begin()
        bucket = self._home[parameter]
        if not bucket.awaited:
            raise UnsupportedError(
                "a gradient was accumulated again in the same backward, after it had been sent to the other ranks."
                " Reentrant activation checkpointing does this: use checkpoint(..., use_reentrant=False). So does code"
                " that goes on after an error of a backward."
            )
        bucket.awaited.discard(parameter)
        while len(self._handles) < len(current) and not current[len(self._handles)].awaited:
            self._start(current[len(self._handles)])

    def _begin(self) -> list[Bucket]:
        """Take the buckets of the parameters that are trainable now, or were so earlier in the window."""
        kept = self._trained.union(p for p in self._touched if p.grad is not None)
        key = bytes(p.requires_grad or p in kept for p in self.parameters)
        if key not in self._plans:
            trainable = [parameter for parameter, own in zip(self.parameters, key, strict=True) if own]
            self._plans[key] = make_buckets(trainable[::-1], self.bucket_bytes)
        self._key, self._current, self._handles = key, self._plans[key], []
        for bucket in self._current:
            bucket.awaited = set(bucket.parameters)
        self._home = {parameter: bucket for bucket in self._current for parameter in bucket.parameters}
        return self._current

    def _start(self, bucket: Bucket) -> None:
        gradients = [_gradient(parameter) for parameter in bucket.parameters]
        bucket.keys = [self.keys[parameter] for parameter in bucket.parameters]

        def job() -> Ending | None:
            if self.compression is None:
                return bucket.begin(gradients, self.collectives)
            present = [
                torch.zeros_like(local(parameter)) if gradient is None else gradient
                for parameter, gradient in zip(bucket.parameters, gradients, strict=True)
            ]
            self.compression.all_reduce(present, bucket.keys)
            return None

        self._handles.append(self.engine.submit(job, f"all_reduce on {self.collectives.axis}"))

    def _finish_reductions(self) -> None:
        """Start what is left, the same on every rank, and wait for all.

        A rank waits for the answers of the others in two cases: until the order of arrival is known, and where some of
        its gradients are missing. Otherwise it reads the answers one step late, to compare.
        """
        current = self._current if self._current is not None else self._begin()
        answer, before = self._ask(), self._last_answer
        self._last_answer = None
        if before is not None:
            self._read(before)
        if len(self._handles) < len(current) or self._key not in self._learned:
            furthest, used, arrivals = self._read(answer)
            self._start_missing(furthest, used)
        else:
            self._last_answer = answer
            arrivals = []
        try:
            for handle in self._handles:
                handle.wait()
        except Exception:
            if self._last_answer is not None:
                self._read(self._last_answer)  # the reason, where ranks train different parameters
            raise
        if self._key not in self._learned and any(arrivals):
            self._learn(arrivals)

    def _start_missing(self, furthest: int, used: set[nn.Parameter]) -> None:
        assert self._current is not None
        for index in range(len(self._handles), len(self._current)):
            needed = used.intersection(self._current[index].parameters)
            for parameter in needed:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            if needed or index < furthest:
                self._start(self._current[index])

    def _ask(self) -> PendingMax:
        """Say how far this rank got, which parameters it used, and on the first rank their order of arrival."""
        place = {parameter: place for place, parameter in enumerate(self._touched, start=1)}
        arrivals = [place.get(p, 0) if own and p.grad is not None else 0
                    for p, own in zip(self.parameters, self._key, strict=True)]  # fmt: skip
        used = [int(place > 0) for place in arrivals]
        key = zlib.crc32(self._key)
        first = arrivals if self.collectives.rank == 0 else [0] * len(arrivals)
        return PendingMax([key, -key, len(self._handles), *used, *first], self.hosts)

    def _read(self, answer: PendingMax) -> tuple[int, set[nn.Parameter], list[int]]:
        """Return the buckets that the furthest rank has started, the parameters that any used, and the order."""
        key, negative, furthest, *columns = answer.wait()
        if key != -negative:
            raise DivergenceError(
                f"rank {self.collectives.rank} of the data axis trains {sum(self._key)} of {len(self._key)} replicated"
                " parameters and another rank trains others. Freeze and unfreeze the same parameters on every rank."
            )
        used, arrivals = columns[: len(self.parameters)], columns[len(self.parameters) :]
        return furthest, {p for p, some in zip(self.parameters, used, strict=True) if some}, arrivals

    def _learn(self, arrivals: list[int]) -> None:
        """Cut the buckets anew, in the order in which gradients arrived on the first rank."""
        after = len(arrivals) + 1
        order = [(place or after, -index) for index, place in enumerate(arrivals)]
        self._arrange(self._key, [-index for _, index in sorted(order) if self._key[-index]])

    def _arrange(self, key: bytes, order: list[int]) -> None:
        self._plans[key] = make_buckets([self.parameters[index] for index in order], self.bucket_bytes)
        self._learned[key] = order

    def state_dict(self) -> dict[str, Any]:
        """The orders of arrival: what travels together is rounded together, so a resumed run must cut the same."""
        return {key.hex(): order for key, order in self._learned.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, order in state.items():
            trainable = [index for index, used in enumerate(bytes.fromhex(key)) if used]
            if sorted(order) != trainable or trainable[-1:] >= [len(self.parameters)]:
                raise CheckpointError("the order of gradients in the checkpoint is not that of these parameters.")
            self._arrange(bytes.fromhex(key), list(order))


def _hook(parameter: nn.Parameter, arrived: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Call `arrived` after each accumulation, also for a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch refuses the hook otherwise; it outlives freezing
    handle = parameter.register_post_accumulate_grad_hook(arrived)
    parameter.requires_grad_(not frozen)
    return handle


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """The dense local gradient, to be reduced in place."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.to_dense()
    return local(gradient).detach()
