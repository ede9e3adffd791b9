"""The rehearsal: one microbatch through the full step on every rank, before any of that shape is trained on.

Every rank runs the user's step. Each unit runs on the rank that owns it and its output is shared, so all values are
real everywhere. Where tensors are computed and used determines which of them must cross each cut.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from traceback import walk_stack
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils import checkpoint

from lightning_3d.errors import NO_PIPELINE, PipelineSplitError, UnsupportedError
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.traced_tensor import Node, StepTape, TracedTensor
from lightning_3d.pipeline.wire import Spec, Wire
from lightning_3d.ranks import agreement, random_streams
from lightning_3d.sandbox.fingerprint import fingerprint
from lightning_3d.sandbox.trees import leaves, map_leaves, untrace

_END = 1 << 60
_ENDS = (
    "a gradient that crossed a cut of the pipeline in the first step ends in training_step now (detach, no_grad, a term"
    " left out). Weights that have no other gradient get zeros, and none on one device: momentum, Adam and weight decay"
    " go on changing them here. Freeze them instead (requires_grad_(False) in on_train_batch_start), or begin with the"
    " first step."
)


@dataclass(frozen=True)
class BlockCall:
    unit: str
    stage: int
    output: Any
    """The output, with a `Spec` for each tensor."""


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a cut."""

    node: Node
    spec: Spec
    mark: list[list[float]]
    """Fingerprint of its values in the rehearsal."""


@dataclass(frozen=True)
class StagePart:
    """The part of a step that one stage runs: calls `start` up to `stop`."""

    start: int
    stop: int
    before: tuple[Carried, ...]
    """Tensors computed before the part and used in it or later."""
    after: tuple[Carried, ...]
    """Tensors computed up to its end and used later."""


@dataclass(frozen=True)
class StepTrace:
    """Calls and tensors of a step, for one shape of microbatch."""

    calls: tuple[BlockCall, ...]
    parts: tuple[StagePart, ...]
    """One per stage."""
    heads: tuple[StagePart, ...]
    """Candidates for the head, with the loss on the full batch: from each call of the last stage on, latest first."""
    changed: tuple[str, ...] = ()
    """Buffers outside of units that the step changes."""
    unreached: frozenset[str] = frozenset()
    """Parameters of this rank that run in the step but that the loss does not depend on."""
    tail: tuple[Carried, ...] = ()
    """In evaluation: the tensors that the step uses behind its blocks."""
    differentiable: frozenset[Node] = frozenset()
    """Tensors whose `requires_grad` the code between blocks has read as True."""
    drawn: int = _END
    """Calls of units that have ended when code between them first draws random numbers."""
    made: frozenset[Node] = frozenset()
    """All tensors that the step computes between units."""
    zeros: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Placeholders of this rank for outputs of other stages, by shape and type."""
    ended: dict[Any, set[int]] = field(default_factory=dict, compare=False, repr=False)
    """By stage or head: the received tensors without a gradient in the first step."""

    def note_ends(self, where: Any, received: Sequence[Tensor]) -> None:
        """Warn once where a gradient ends that flowed on in the first step."""
        ended = {at for at, tensor in enumerate(received) if tensor.requires_grad and tensor.grad is None}
        if not ended <= self.ended.setdefault(where, ended):
            warnings.warn(_ENDS, stacklevel=2)
            self.ended[where] |= ended

    def specs(self, cut: int) -> list[Spec]:
        """Specs of the tensors that cross from stage `cut` to the next one."""
        return [carried.spec for carried in self.parts[cut].after]

    @property
    def pattern(self) -> Any:
        """All but the shapes: the blocks with their stages, and the tensors that cross the cuts."""
        crossing = [[(item.node, item.spec.requires_grad) for item in part.after] for part in self.parts]
        return repr(([(call.unit, call.stage) for call in self.calls], crossing))

    def with_head(self, head: int) -> "StepTrace":
        """This trace with a last stage that stops where that head begins."""
        last, chosen = self.parts[-1], self.heads[head]
        return replace(self, parts=(*self.parts[:-1], replace(last, stop=chosen.start, after=chosen.before)))

    def without_tail(self) -> "StepTrace":
        """This trace with a last stage that ends behind its last call."""
        return replace(self, parts=(*self.parts[:-1], replace(self.parts[-1], after=self.tail)))

    def origin(self, node: Node) -> str:
        return f"computed after {self.calls[node[0] - 1].unit!r}" if node[0] else "computed before the first block"


class Rehearsal(StepTape):
    """Runs units on the ranks that own them, shares outputs, and records uses. A `Director` and a `StepTape`."""

    skipping = False
    divides = True
    """Messages may have parts of results: in training."""

    def __init__(self, split: PipelineSplit, wire: Wire, stage_rank: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.split, self.wire, self.stage_rank, self.seed = split, wire, stage_rank, seed
        self.calls: list[BlockCall] = []
        self.specs: dict[Node, Spec] = {}
        self.marks: dict[Node, list[list[float]]] = {}
        self.last_use: dict[Node, float] = {}
        """The calls that have begun before a tensor is last used; those of its own use as an argument count half."""
        self.reads: list[tuple[int, Node, str]] = []
        self.differentiable: set[Node] = set()
        self.recomputed: list[tuple[FrameType, str, int]] = []
        """Regions that the step's own code checkpoints, each with a unit called in it and the unit's stage."""
        self.arguments: dict[int, list[list[float]]] = {}
        """By index of the call, for units that run here: fingerprints of the arguments."""
        self.drawn = _END
        random_streams.restart_python(seed)  # as the step does where it begins
        self.state = random_streams.plain_print()
        self.ended: Exception | None = None
        """The error that ended it on all ranks."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise on every rank the first error that any rank raises inside. Ranks meet before each message."""
        try:
            yield
        except Exception as error:
            if self.ended is None and not agreement.is_alone(error):
                self._meet("an error", error)
            raise
        self._meet("the end of the step")

    def _meet(self, at: str, error: Exception | None = None) -> None:
        if self.ended is not None:  # the user's code has caught it
            raise self.ended
        try:
            self.wire.meet(at, error)
        except Exception as ended:
            self.ended = ended
            raise

    def requires_grad(self, tensor: TracedTensor) -> bool:
        if found := super().requires_grad(tensor):
            self.differentiable.add(tensor.node)
        return found

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._use((args, kwargs), self.call + 0.5)
        args, kwargs = untrace(args), untrace(kwargs)
        if self._begin(unit):
            self.arguments[self.call - 1] = fingerprint((args, kwargs))
        return args, kwargs

    def note_draw(self) -> None:
        self.drawn = min(self.drawn, self.call)

    def leave(self, unit: str, output: Any) -> Any:
        return self._share(output)

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        self._use((args, kwargs), self.call + 0.5)
        self._begin(unit)
        return self._share(None)

    def _begin(self, unit: str) -> bool:
        stage = self._place(unit)
        self._check_recomputed(unit, stage)
        if random_streams.drawn_since_restart() or self.state != random_streams.plain_print():
            self.note_draw()
        self.calls.append(BlockCall(unit, stage, None))
        random_streams.restart(self.seed, 2 * self.next_call())
        return self.stage_rank[stage] == self.wire.rank

    def _share(self, output: Any) -> Any:
        call = self.calls[-1]
        self._meet(f"call {self.call}: {call.unit!r}")
        output = self.wire.share(output, self.stage_rank[call.stage], ("rehearsal", self.call))
        spec = map_leaves(lambda leaf: Spec.of(leaf) if isinstance(leaf, Tensor) else leaf, output)
        self.calls[-1] = BlockCall(call.unit, call.stage, spec)
        random_streams.restart(self.seed, 2 * self.call - 1)
        self.state = random_streams.plain_print()
        return self.trace(output, absent=False)

    def _place(self, unit: str) -> int:
        """The stage that runs this call: the first that has the unit and is not before the stage reached."""
        reached = self.calls[-1].stage if self.calls else 0
        holders = self.split.holders[unit]
        later = [stage for stage in holders if stage >= reached]
        if later:
            return later[0]
        if any(call.unit == unit for call in self.calls):
            raise UnsupportedError(
                f"The step calls {unit!r} (stage {holders[-1]}) again after blocks of stage {reached} have run: a"
                " training_step that calls the chain of blocks twice cannot be pipelined. Call it once on a joined"
                f" batch, or use {NO_PIPELINE}."
            )
        raise PipelineSplitError(
            f"{unit!r} was placed on stage {holders[-1]} but runs after {self.calls[-1].unit!r} of stage {reached}."
            " Declare modules in the order in which they run, or name the cuts with pipeline_split. Where blocks of"
            f" several stages call it (a rotary embedding), give each a copy of its own, or use {NO_PIPELINE}."
        )

    def _check_recomputed(self, unit: str, stage: int) -> None:
        region = _checkpointed_region()
        if region is None:
            return
        for known, other, reached in self.recomputed:
            if known is region and reached != stage:
                raise UnsupportedError(
                    f"The step computes {other!r} (stage {reached}) and {unit!r} (stage {stage}) inside one"
                    " torch.utils.checkpoint, so that backward would have to compute both stages again. Checkpoint"
                    " smaller parts, or name other cuts with pipeline_split."
                )
        self.recomputed.append((region, unit, stage))

    def on_made(self, node: Node, value: Tensor) -> None:
        self.specs[node], self.marks[node] = Spec.of(value), fingerprint(value)

    def on_use(self, node: Node, when: float) -> None:
        self.last_use[node] = max(when, self.last_use.get(node, -1))

    def on_read(self, inputs: list[TracedTensor], missing: list[TracedTensor], name: str) -> None:
        self.reads += [(self.call, leaf.node, name) for leaf in inputs]

    def on_written(self, inputs: list[TracedTensor], missing: list[TracedTensor]) -> None:
        for leaf in inputs:  # the tensor that they are written into may be read later
            self.on_use(leaf.node, _END)

    def use_at_end(self, value: Any) -> None:
        """Record that `value` is returned or logged."""
        self._use(value, _END)

    def _use(self, value: Any, when: float) -> None:
        traced = [leaf for leaf in leaves(value) if isinstance(leaf, TracedTensor)]
        self.refresh(traced)
        for leaf in traced:
            self.on_use(leaf.node, when)

    def trace_of_step(self) -> StepTrace:
        """The trace. Raises where the step cannot be cut."""
        stages = [call.stage for call in self.calls]
        last = self.split.num_stages - 1
        if last not in stages:
            raise PipelineSplitError(
                f"No block of the last stage ({', '.join(self.split.stages[last])}) runs in the step, so it would have"
                " nothing to compute the loss from. Name other cuts with pipeline_split. Where a step returns None for"
                " some batches, leave these out of the loader, or multiply their loss by 0."
            )
        cuts = [sum(stage <= cut for stage in stages) for cut in range(last)]
        bounds = [0, *cuts, len(stages)]
        crossing = [(), *(self._carried(cut) for cut in cuts), ()]
        parts = [StagePart(bounds[at], bounds[at + 1], crossing[at], crossing[at + 1]) for at in range(last + 1)]
        starts = range(len(stages) - 1, bounds[last] - 1, -1)
        heads = tuple(StagePart(start, len(stages), self._carried(start), ()) for start in starts)
        trace = StepTrace(tuple(self.calls), tuple(parts), heads, drawn=self.drawn, made=frozenset(self.specs))
        trace = replace(trace, differentiable=frozenset(self.differentiable))
        for when, node, name in self.reads:
            if cuts and when <= cuts[-1]:
                raise PipelineSplitError(
                    f"The step reads a tensor's value in Python (`{name}`; {trace.origin(node)}) before the last"
                    " stage's blocks have run. Later stages do not have it: move the branch behind the last block, or"
                    f" use {NO_PIPELINE} for code that is not yours. Distributions of torch check their arguments by"
                    " such reads: Normal(..., validate_args=False)."
                )
        return trace

    def _carried(self, cut: int) -> tuple[Carried, ...]:
        nodes = sorted(node for node, when in self.last_use.items() if node[0] <= cut < when)
        return tuple(map(self.carried, nodes))

    def carried(self, node: Node) -> Carried:
        calls, index = node
        spec, known = self.specs[node], calls > 0 and self.divides
        spec = self.wire.parts.sent(self.calls[calls - 1].unit, index, spec) if known else spec
        return Carried(node, spec, self.marks[node])


def _checkpointed_region() -> FrameType | None:
    """The innermost call of `torch.utils.checkpoint.checkpoint` that is running."""
    calls = ((frame, frame.f_code) for frame, _ in walk_stack(sys._getframe(1)))
    found = (frame for frame, code in calls if (code.co_name, code.co_filename) == ("checkpoint", checkpoint.__file__))
    return next(found, None)
