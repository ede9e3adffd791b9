"""One microbatch through the stages, one after the other: forward, and back again for the gradients."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.errors import RunError
from lightning_3d.pipeline.backward import gradients, halves_agree, leaves_below
from lightning_3d.pipeline.prints import Print, differ, fingerprint, grad_print
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.rehearsal import Rehearsal, Trace
from lightning_3d.pipeline.schedule import SPLIT
from lightning_3d.pipeline.step import loss_of, play
from lightning_3d.pipeline.traced import untrace

if TYPE_CHECKING:
    from lightning_3d.pipeline.runner import Pipeline


@dataclass
class Relay:
    """The stages of this rank on one microbatch."""

    pipeline: "Pipeline"
    trace: Trace
    received: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """What crossed the cut behind each stage; of the last one its loss, if it has one."""
    problem: str | None = None
    """What is wrong on this rank, if anything."""

    def forward(self, step: str, args: tuple[Any, ...], seed: int, whole: Rehearsal, result: Any) -> None:
        """Run every stage in turn and compare what it gets and gives with the whole step's."""
        arriving: list[Tensor] = []
        for stage in range(self._last + 1):
            if stage in self.pipeline.my_stages:
                self.received[stage] = arriving
                self.outputs[stage] = self._play(stage, step, args, seed, whole, result)
            if stage < self._last:
                arriving = self._pass_on(stage)

    def _play(
        self, stage: int, step: str, args: tuple[Any, ...], seed: int, whole: Rehearsal, result: Any
    ) -> list[Tensor]:
        try:
            output = play(
                self.pipeline, self.trace, self.trace.parts[stage], f"stage {stage}", step, args, seed,
                self.received[stage], Record(), whole.arguments,
            )  # fmt: skip
            if stage < self._last:
                return list(output)
            if differ(fingerprint(untrace(output)), result):
                self.problem = self.problem or "Cut into stages, the step returns another result than whole."
            loss = loss_of(output)
            return [] if loss is None else [loss]
        except RunError:
            raise
        except Exception as error:  # told to every rank, which all raise it
            self.problem = self.problem or _text(error, stage)
            specs = self.trace.specs(stage) if stage < self._last else []
            return [spec.empty(self.pipeline.wire.device).zero_() for spec in specs]

    def _pass_on(self, stage: int) -> list[Tensor]:
        """What the next stage starts from, where that is on this rank."""
        specs = self.trace.specs(stage)
        what = f"stage {stage + 1}: rehearsal, microbatch 0, receiving activations from stage {stage}"
        tensors = self._move(self.outputs.get(stage), specs, stage, stage + 1, stage, what)
        return [tensor.requires_grad_(spec.requires_grad) for tensor, spec in zip(tensors, specs, strict=False)]

    def _move(
        self, tensors: list[Tensor] | None, specs: list[Any], source: int, target: int, tag: int, what: str
    ) -> list[Tensor]:
        """`tensors` of stage `source` on the rank of stage `target`; nothing elsewhere."""
        wire, ranks = self.pipeline.wire, self.pipeline.stage_rank
        given = [tensor.detach() for tensor in tensors or []]
        if ranks[source] == ranks[target]:
            return given
        if wire.rank == ranks[source]:
            wire.send(given, ranks[target], tag, what)
            wire.finish()
        return wire.start_receive(specs, ranks[source], tag, what).wait() if wire.rank == ranks[target] else []

    def backward(self) -> list[dict[str, Print]]:
        """Run the backward of every stage in turn: fingerprints of the gradients, by parameter, of stages here.

        Nothing is added to any `.grad`.
        """
        arriving: list[Tensor] = []
        found = []
        for stage in reversed(range(self._last + 1)):
            back: list[Tensor] | None = None
            if stage in self.pipeline.my_stages:
                back, grads = self._try_to_differentiate(stage, arriving)
                found.append(grads)
            if stage:
                specs = [spec for spec in self.trace.specs(stage - 1) if spec.requires_grad]
                what = f"stage {stage - 1}: rehearsal, microbatch 0, receiving gradients from stage {stage}"
                arriving = self._move(back, specs, stage, stage - 1, self._last + stage, what)
        return found

    def _try_to_differentiate(self, stage: int, arriving: list[Tensor]) -> tuple[list[Tensor], dict[str, Print]]:
        try:
            return self._differentiate(stage, arriving)
        except RunError:
            raise
        except Exception as error:  # told to every rank, which all raise it
            self.problem = (
                f"stage {stage}: the backward fails when other stages' blocks are absent ({type(error).__name__}:"
                f" {error}). What is recomputed in backward must not reach over a cut: put cuts at the borders of"
                " checkpointed regions with pipeline_split, or recompute block by block. Call a function of autograd by"
                " its class (`Function.apply`), so that it is seen."
            )
            return [torch.zeros_like(tensor) for tensor in self.received[stage] if tensor.requires_grad], {}

    def unreached(self) -> frozenset[str]:
        """Parameters of this rank that no backward from the loss comes to, followed back from stage to stage.

        On one device they get no gradient, and optimizers leave them alone. Here zeros come over the wire for what a
        later stage makes of them.
        """
        pipeline, run, found = self.pipeline, set[int](), set[int]()
        used: list[bool] | None = None
        for stage in reversed(range(self._last + 1)):
            if stage in self.outputs:
                outputs = self.outputs[stage]
                run |= leaves_below(outputs)
                wanted = [True] * len(outputs) if used is None else used
                below = leaves_below([output for output, is_used in zip(outputs, wanted, strict=True) if is_used])
                found |= below
                used = [id(tensor) in below for tensor in self.received[stage]]
            used = pipeline.wire.share(used, pipeline.stage_rank[stage], ("reached", stage))
        # the gathered parameters themselves: to locate one is to begin to accumulate beside it in mixed precision
        return frozenset(name for name, parameter in pipeline.module.named_parameters() if id(parameter) in run - found)

    def _differentiate(self, stage: int, arriving: list[Tensor]) -> tuple[list[Tensor], dict[str, Print]]:
        """Gradients of what a stage received, and fingerprints of those of its parameters."""
        mine = dict(self._parameters(stage))
        entering = [tensor for tensor in self.received[stage] if tensor.requires_grad]
        pairs = list(self._pairs(stage, arriving))
        if not pairs:
            return [torch.zeros_like(tensor) for tensor in entering], {}
        outputs, seeds = [output for output, _ in pairs], [grad for _, grad in pairs]
        wanted, halved = [*entering, *mine.values()], self.pipeline.schedule in SPLIT
        grads = gradients(outputs, seeds, wanted, again=halved)
        if halved and not halves_agree(outputs, seeds, self.received[stage], list(mine.values()), grads):
            self._keep_whole(stage)
        back = [
            torch.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(entering, grads[: len(entering)], strict=True)
        ]
        own = zip(mine, grads[len(entering) :], strict=True)
        return back, {name: grad_print(grad) for name, grad in own if grad is not None}

    def _keep_whole(self, stage: int) -> None:
        if stage not in self.pipeline.unsplit:
            self.pipeline.unsplit.add(stage)
            warnings.warn(
                f"schedule={self.pipeline.schedule!r}: on stage {stage} gradients of weights cannot be computed apart"
                " from those of inputs (a weight used at two depths, a hook on a gradient, recomputation). Its"
                " backwards run in one piece: the numbers are right, some idle time is not filled.",
                stacklevel=2,
            )

    def _pairs(self, stage: int, arriving: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Outputs that are differentiated, with their gradients; the loss has none."""
        if stage == self._last:
            yield from ((output, None) for output in self.outputs[stage] if output.requires_grad)
            return
        waiting = iter(arriving)
        for output, spec in zip(self.outputs[stage], self.trace.specs(stage), strict=True):
            if spec.requires_grad:
                grad = next(waiting)
                if output.requires_grad:
                    yield output, grad

    def _parameters(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        held = {id(tensor) for tensor in self.pipeline.stage_parameters(stage)}
        for name, parameter in self.pipeline.module.named_parameters():
            if id(parameter) in held:
                yield name, parameter

    @property
    def _last(self) -> int:
        return self.pipeline.split.num_stages - 1


def _text(error: Exception, stage: int) -> str:
    if type(error).__module__.startswith("lightning_3d."):
        return str(error)
    return (
        f"stage {stage}: the step fails when other stages' blocks are absent ({type(error).__name__}: {error}). Code"
        " outside of the blocks must not need more of a block than what it returns."
    )
