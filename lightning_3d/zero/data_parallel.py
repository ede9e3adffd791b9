"""The interface of a data-parallel engine, for any ZeRO stage."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_3d.axes.parameters import Held
from lightning_3d.comm import ReplicatedGradients
from lightning_3d.module.torch_private import at_end_of_backward, running_backward
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Rule


class DataParallel:
    """Gradient synchronisation over the data axis, in the order in which a step calls it.

    This one is for one data rank, which has nothing to synchronise.
    """

    rules: Sequence[Rule] = ()  # for code of a step that uses shards

    def gather(self) -> None:
        """Gather the parameters before a forward, or start to."""

    def forbid_writes(self) -> AbstractContextManager[Any]:
        """Raise where the training step inside changes weights in a way that would be lost."""
        return nullcontext()

    def meet(self) -> None:
        """Raise where another data rank is elsewhere in its step, before a message of the user. Collective."""

    def finish_forward(self) -> None:
        """End a forward without backward (evaluation)."""

    def evaluating(self) -> AbstractContextManager[Any]:
        """Have backwards inside send nothing where a rank may have more batches than another."""
        return nullcontext()

    def check_backward(self, loss: Tensor, inputs: Iterable[Tensor]) -> None:
        """Raise where the backward of `loss`, by `inputs`, would lose gradients."""

    def check_gradients(self) -> None:
        """Raise where an optimizer would miss a gradient that no backward has given, before it steps."""

    def before_backward(self, loss: Tensor) -> None:
        """Called before `loss.backward()`."""

    def after_backward(self) -> None:
        """Finish `loss.backward()`: `.grad` is then the mean over the data axis, unless gradients only accumulate."""

    def reduce(self) -> None:
        """Average the gradients that backwards have accumulated on this rank, outside of a backward (for pipelines)."""

    def grad_holder(self, name: str) -> Tensor | None:
        """Return the tensor whose `.grad` accumulates before it is reduced; None: the parameter."""
        return None

    def accumulate_only(self, on: bool) -> None:
        """Have backwards only accumulate on this rank, or not (all but the last batch of an accumulation window)."""

    def discard_pending(self) -> None:
        """Discard gradients of batches that no optimizer step followed, where `zero_grad` does not reach them."""

    def gradients_stay(self) -> AbstractContextManager[Any]:
        """Have backwards inside add to the `.grad` of parameters only, whose values a trial puts back."""
        return nullcontext()

    def reshard(self) -> None:
        """Free all gathered parameters, between steps."""

    def gathered(self, *, before: bool = False) -> Sequence[tuple[Tensor, nn.Parameter]]:
        """Return each gathered parameter with its shard; if `before`, also those that were gathered once."""
        return ()

    def shards_registered(self) -> AbstractContextManager[Any]:
        """Have modules list shards inside also where parameters are gathered, with the gradients of a window."""
        return nullcontext()

    def used_again(self) -> Iterable[nn.Parameter]:
        """Return the shards whose values the next backward or batch takes otherwise than the last forward did."""
        return ()

    def full(self, held: Held, shard: Tensor) -> Tensor:
        return shard

    def shard(self, held: Held, full: Tensor) -> Tensor:
        return full


@dataclass
class OwnExperts:
    """The experts of a rank, where data ranks share them: gradients are averaged over replicas only."""

    modules: list[nn.Module] = field(default_factory=list)
    """Those of this stage that have no other parameters. Ranks that own the same share their shards."""
    alone: list[nn.Parameter] = field(default_factory=list)
    """Those of other modules, and of lists. Ranks that own the same have copies."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*(parameter for part in self.modules for parameter in part.parameters()), *self.alone]


class ReplicatedData(DataParallel):
    """Plain parameters, gradients synchronised by `comm.ReplicatedGradients`.

    Those of `experts` are, over the ranks that own the same, once a backward has ended. Their order of arrival differs
    from rank to rank, and other ranks would start messages in another order.
    """

    def __init__(
        self, replicas: ReplicatedGradients | None, undo: UndoStack, experts: ReplicatedGradients | None = None
    ) -> None:
        self.replicas = [] if replicas is None else [replicas]
        self.experts = [] if experts is None else [experts]
        self.accumulates = self.in_backward = False
        self.ending = -1
        """The last backward that was not the strategy's."""
        for each in self.experts:
            each.accumulate_only(True)
        for each in (*self.replicas, *self.experts):
            each.on_arrival = self._arrived
            undo.callback(each.detach)

    def _arrived(self) -> None:
        """Have a backward that is not the strategy's (`loss.backward()` of the user) end as that one does."""
        if not self.in_backward and not self.accumulates and self.ending != (running := running_backward()):
            self.ending = running
            at_end_of_backward(self.after_backward)

    def forbid_writes(self) -> AbstractContextManager[Any]:
        self.in_backward = False  # of one whose error code has caught
        return nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.accumulate_only(True)
        try:
            yield
        finally:
            self.accumulate_only(False)

    def before_backward(self, loss: Tensor) -> None:
        self.in_backward = True
        for each in self.replicas:
            each.hook_last()

    def after_backward(self) -> None:
        self.in_backward = False
        for each in self.replicas:
            each.finish()
        for each in () if self.accumulates else self.experts:
            each.reduce()

    def reduce(self) -> None:
        for each in (*self.replicas, *self.experts):
            each.reduce()

    def accumulate_only(self, on: bool) -> None:
        self.accumulates = on
        for each in self.replicas:
            each.accumulate_only(on)
