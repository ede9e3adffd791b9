"""Runs the actions of one rank: forwards, backwards, sends and receives of every microbatch of a step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.backward import WeightHalf, full_backward, input_half
from lightning_3d.pipeline.cut_module import CutModule
from lightning_3d.pipeline.rehearsal import StepTrace
from lightning_3d.pipeline.schedule import Action
from lightning_3d.pipeline.wire import Receipt


@dataclass
class InFlight:
    """A microbatch on a stage between its forward and its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    grads: list[Tensor | None] | None = None
    """Gradients of the outputs from a later stage on this rank; None where they come over the wire."""
    half: WeightHalf | None = None


_CHANGED = (
    "Code changed a tensor in place (a buffer that a block draws anew, say), and the backward of an earlier microbatch"
    " needs its values. On one device each forward has its backward before the next. Use num_microbatches=1, or assign"
    " a new tensor in place of the change."
)
_CONTENT = {"F": "activations", "B": "gradients"}
Forward = Callable[[int, int, list[Tensor]], list[Tensor]]
"""(stage, microbatch, received) -> the tensors that cross the cut; on the last stage the loss."""
Head = Callable[[list[list[Tensor]]], list[list[Tensor | None]]]
"""Outputs of the last blocks for each microbatch -> their gradients."""


@dataclass
class Execution:
    pipeline: CutModule
    traces: Sequence[StepTrace]
    """One per microbatch."""
    forward: Forward
    head: Head | None = None
    """With the loss on the full batch."""
    trains: bool = True
    """False where only forwards run: nothing is kept for a backward."""
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    arriving: dict[tuple[str, int, int], Receipt] = field(default_factory=dict)
    passed_on: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Activations for a next stage on this same rank."""
    leaving: dict[tuple[str, int, int], list[Tensor]] = field(default_factory=dict)

    def run(self, actions: Sequence[Action]) -> None:
        steps: dict[str, Callable[[int, int], None]] = {
            "F": self._forward, "W": self._backward_weights,
            "B": partial(self._backward, "B"), "I": partial(self._backward, "I"),
            "SEND_F": partial(self._send, "F", 1), "SEND_B": partial(self._send, "B", -1),
            "RECV_F": partial(self._receive, "F", -1), "RECV_B": partial(self._receive, "B", 1),
        }  # fmt: skip
        try:
            for action in actions:
                steps[action.kind](action.stage, action.microbatch)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error) or len(self.traces) == 1:
                raise
            raise UnsupportedError(f"{_CHANGED} Torch: {error}") from error
        self.pipeline.wire.finish()

    def _forward(self, stage: int, index: int) -> None:
        inputs = self._inputs(stage, index)
        with self._timing("F", stage, index):
            outputs = self.forward(stage, index, inputs)
        if self.trains:
            self.in_flight[stage, index] = InFlight(inputs, outputs)
        if stage < self.pipeline.last_stage:
            if self._local(stage + 1):
                self.passed_on[stage + 1, index] = [output.detach() for output in outputs]
            else:
                self.leaving["F", stage, index] = outputs

    def _inputs(self, stage: int, index: int) -> list[Tensor]:
        if stage == 0:
            return []
        if self._local(stage - 1):
            received = self.passed_on.pop((stage, index))
        else:
            received = self.arriving.pop(("F", stage, index)).wait()
        specs = self.traces[index].specs(stage - 1)
        return [tensor.requires_grad_(spec.requires_grad) for tensor, spec in zip(received, specs, strict=True)]

    def _output_grads(self, in_flight: InFlight, stage: int, index: int) -> list[Tensor | None]:
        if stage == self.pipeline.last_stage and self.head is not None:
            self._run_head()
        if in_flight.grads is not None:
            return in_flight.grads
        if stage == self.pipeline.last_stage:
            return [None] * len(in_flight.outputs)
        received = iter(self.arriving.pop(("B", stage, index)).wait())
        return [
            next(received) if carried.spec.requires_grad else None for carried in self.traces[index].parts[stage].after
        ]

    def _run_head(self) -> None:
        assert self.head is not None
        waiting = [self.in_flight[self.pipeline.last_stage, index] for index in range(len(self.traces))]
        with self._timing("H", self.pipeline.last_stage, 0):
            all_grads = self.head([in_flight.outputs for in_flight in waiting])
        for in_flight, grads in zip(waiting, all_grads, strict=True):
            in_flight.grads = grads
        self.head = None

    def _backward(self, kind: str, stage: int, index: int) -> None:
        """The whole backward ("B"), or the half that gives gradients of the inputs ("I")."""
        in_flight = self.in_flight[stage, index]
        grads = self._output_grads(in_flight, stage, index)
        with self._timing(kind, stage, index):
            if kind == "B" or stage in self.pipeline.in_one_piece:
                full_backward(in_flight.outputs, grads)
                in_flight.outputs = []
            else:
                in_flight.half = input_half(
                    in_flight.outputs, grads, in_flight.inputs, self.pipeline.stage_parameters(stage)
                )
        if kind == "B":
            del self.in_flight[stage, index]
        self._pass_back(in_flight, stage, index)

    def _backward_weights(self, stage: int, index: int) -> None:
        half = self.in_flight.pop((stage, index)).half
        if half is not None:
            with self._timing("W", stage, index):
                half.run(self.pipeline.stage_parameters(stage))

    def _pass_back(self, in_flight: InFlight, stage: int, index: int) -> None:
        if stage == 0:
            return
        self.traces[index].note_ends(stage, in_flight.inputs)
        grads = [
            (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad) if tensor.requires_grad else None
            for tensor in in_flight.inputs
        ]
        in_flight.inputs = []
        if self._local(stage - 1):
            self.in_flight[stage - 1, index].grads = grads
        else:
            self.leaving["B", stage, index] = [grad for grad in grads if grad is not None]

    def _send(self, kind: str, step: int, stage: int, index: int) -> None:
        to, tensors = stage + step, self.leaving.pop((kind, stage, index))
        what = f"stage {stage}, microbatch {index}: sending {_CONTENT[kind]} to stage {to}"
        self.pipeline.wire.send(tensors, self.pipeline.stage_rank[to], _tag(min(stage, to), index, kind == "B"), what)

    def _receive(self, kind: str, step: int, stage: int, index: int) -> None:
        source, cut = stage + step, min(stage, stage + step)
        what = f"stage {stage}, microbatch {index}: receiving {_CONTENT[kind]} from stage {source}"
        specs = [spec for spec in self.traces[index].specs(cut) if kind == "F" or spec.requires_grad]
        rank, tag = self.pipeline.stage_rank[source], _tag(cut, index, kind == "B")
        self.arriving[kind, stage, index] = self.pipeline.wire.start_receive(specs, rank, tag, what)

    def _timing(self, kind: str, stage: int, index: int) -> AbstractContextManager[None]:
        clock = self.pipeline.clock if self.trains else None
        return nullcontext() if clock is None else clock.timing(kind, stage, index)

    def _local(self, stage: int) -> bool:
        return self.pipeline.stage_rank[stage] == self.pipeline.wire.rank


def _tag(cut: int, index: int, backward: bool) -> int:
    """One number per message of a step, so that two stages of one rank cannot receive each other's messages."""
    return ((cut << 14) + index << 1) + backward
