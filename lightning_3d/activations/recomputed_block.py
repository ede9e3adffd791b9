"""Blocks that keep what enters them, and compute the rest of their activations again in backward.

`RecomputedForward` is inside of FSDP2's hooks, so that weights are gathered once for the recomputation and the
backward. `torch.utils.checkpoint` (non-reentrant) does the work. Added here are Python's and numpy's random streams,
and buffers: the recomputation reads the values that the forward read, and its changes are undone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_3d.activations.kept_results import KeptResults
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer
from lightning_3d.module.torch_private import in_backward, in_checkpoint, own_buffers, version_of
from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks.random_streams import plain_streams, restored_streams
from lightning_3d.sandbox.interceptor import storage
from lightning_3d.sandbox.snapshot import isolated_buffers
from lightning_3d.sandbox.trees import leaves, map_leaves


class SavedBytes:
    """Count saved tensors inside of the context; each memory once, and none of `excluded`.

    Tensors that a checkpoint inside saves for its recomputation are its own business and not counted.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.excluded = {storage(tensor) for tensor in excluded}
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)

    def add(self, tensor: Tensor) -> "_Saved | None":
        """Count `tensor` until the result is released."""
        key = storage(tensor)
        if key in self.excluded or isinstance(tensor, nn.Parameter):
            return None
        return _Saved(self, key, tensor.untyped_storage().nbytes())

    def __enter__(self) -> "SavedBytes":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        return tensor.detach(), self.add(tensor)  # a result that its own node saves would keep itself alive

    def _unpack(self, packed: Any) -> Tensor:
        return packed[0]


class _Saved:
    """A user of a memory."""

    def __init__(self, meter: SavedBytes, key: int, size: int) -> None:
        self.meter, self.key, self.size = meter, key, size
        meter.users[key] += 1
        if meter.users[key] == 1:
            meter.now += size
            meter.peak = max(meter.peak, meter.now)

    def __del__(self) -> None:
        self.meter.users[self.key] -= 1
        if not self.meter.users[self.key]:
            self.meter.now -= self.size


Place = tuple[nn.Module, str]
"""A buffer: its module, and its name there."""
Noted = Mapping[Place, tuple[Tensor | None, int, Tensor | None]]
"""Each buffer before a forward, its version, and a copy where the forward may change it."""


class RecomputedForward(ForwardLayer, rank=Layer.RECOMPUTE):
    """The forward of a block that backward computes again.

    A region that the user's own code checkpoints is left to it.
    """

    def __init__(self, module: nn.Module, name: str, selective: bool) -> None:
        super().__init__(module)
        self.name, self.selective = name, selective
        self.buffers = _ChangedBuffers(module, name)
        self.on = True
        """False where the activations of this block are kept."""
        self.measured: BlockBytes | None = None
        """For a memory budget: what the block would keep, once a call is measured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.next
        if not torch.is_grad_enabled() or in_backward() or in_checkpoint():
            return forward(*args, **kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if _is_plain(leaf)]
        if self.measured is not None and self.measured.elements is None:
            self._measure(self.measured, tensors, lambda: forward(*args, **kwargs))
        if not self.on and (self.measured is None or self.measured.covers(tensors)):
            return forward(*args, **kwargs)
        frame = map_leaves(lambda leaf: _HOLE if _is_plain(leaf) else leaf, (args, kwargs))

        def compute(*given: Tensor) -> Any:
            left = iter(given)
            now: Any = map_leaves(lambda leaf: next(left) if leaf is _HOLE else leaf, frame)
            return forward(*now[0], **now[1])

        return checkpoint(compute, *tensors, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        keep, take = KeptResults().contexts() if self.selective else (nullcontext(), nullcontext())
        streams, buffers, measured = plain_streams(), self.buffers.before(), self.measured

        @contextmanager
        def first() -> Iterator[None]:
            with keep:
                yield
            self.buffers.note(buffers)
            if measured is not None:
                measured.begun()

        @contextmanager
        def again() -> Iterator[None]:
            if measured is not None:
                measured.ended()
            with restored_streams(streams), self.buffers.as_before(buffers), take:
                yield

        return first(), _Repeatable(again)

    def _measure(self, measured: "BlockBytes", tensors: list[Tensor], compute: Callable[[], Any]) -> None:
        """Run the block once more and count what it would keep, besides its arguments. No trace of the run remains."""
        own = [*tensors, *self.module.parameters(), *self.module.buffers()]
        names = [name for name, _ in self.module.named_buffers()]
        with restored_streams(), isolated_buffers(self.module, names), SavedBytes(own) as saved:
            result = compute()
        measured.extra, measured.elements = saved.peak, _elements(tensors)
        measured.order.append(self.name)
        del result


@dataclass
class BlockBytes:
    """Bytes that a block would keep if it were not computed again."""

    order: list[str] = field(default_factory=list)
    """Names of all measured blocks, in the order of their first calls."""
    extra: int = 0
    """Bytes in a call, besides its arguments."""
    elements: int | None = None
    """Elements of the arguments of the measured call; None before it."""
    running: int = 0
    """Calls whose backward has not begun."""
    most: int = 0
    """The most of them at one time."""
    together: bool = False
    """True where the block talks to other data ranks, which must all compute it again or none."""

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Return True unless a call with these arguments is larger than the measured one."""
        return self.together or self.elements is None or _elements(tensors) <= self.elements

    def begun(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    def ended(self) -> None:
        self.running -= 1


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class _Repeatable(AbstractContextManager[None]):
    """A context that may be entered again once it is left: a graph may be kept for a second backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make

    def __enter__(self) -> None:
        self.present = self.make()
        self.present.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.present.__exit__(*error)


class _Hole:
    """The place of a tensor in the arguments of a block."""


_HOLE = _Hole()


def _is_plain(leaf: Any) -> bool:
    """Return True for a tensor that autograd saves; others (sharded, gathered late) stay in the arguments."""
    return type(leaf) in (Tensor, nn.Parameter)


class _ChangedBuffers:
    """The buffers that a block's forward changes: statistics of batch norm, a codebook, a count."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.places = [(owner, leaf) for owner in module.modules() for leaf in own_buffers(owner)]
        self.changing: set[Place] | None = None
        """None until the first forward has shown them."""

    def before(self) -> Noted:
        noted = {}
        for owner, leaf in self.places:
            buffer = own_buffers(owner)[leaf]
            copied = buffer is not None and (self.changing is None or (owner, leaf) in self.changing)
            version = -1 if buffer is None or buffer.is_inference() else version_of(buffer)
            noted[owner, leaf] = buffer, version, buffer.detach().clone() if copied and buffer is not None else None
        return noted

    def note(self, noted: Noted) -> None:
        """Find what a forward has changed since `before`. Later forwards must change no more."""
        changed = {
            place
            for place, (buffer, version, copy) in noted.items()
            if own_buffers(place[0])[place[1]] is not buffer
            or (buffer is not None and version >= 0 and version_of(buffer) != version)
            or (
                (self.changing is None and buffer is not None and copy is not None)
                and not (buffer.is_meta or torch.equal(buffer, copy))
            )
        }
        if self.changing is None:
            owners = {owner for owner, _ in changed}  # batch norm writes to its statistics without a new version
            self.changing = {place for place in self.places if place[0] in owners}
        for owner, leaf in changed - self.changing:
            raise UnsupportedError(
                f"{self.name} changes its buffer {leaf!r} ({type(owner).__name__}) in this call, and did not in its"
                " first one. With recompute, backward runs the block again and would read the changed value. Change it"
                " in every call or in a hook between steps, or use recompute=None."
            )

    def as_before(self, noted: Noted) -> AbstractContextManager[None]:
        """Let the code inside work on the values before a forward; the present ones are back at the end.

        Nothing is written to the buffers themselves: a backward may still need their values.
        """
        copies = [(own_buffers(owner), leaf, noted[owner, leaf][2]) for owner, leaf in self.changing or ()]
        return replaced_entries((held, leaf, None if copy is None else copy.clone()) for held, leaf, copy in copies)
