"""The rows that the loss is computed on: those of a microbatch, or the full batch.

A mean over samples is the mean over microbatches. Any other loss (a mean over tokens that are not padding, a loss over
pairs of samples) needs the full batch. That has a price: no backward begins before the last forward.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_3d.layout import Layout
from lightning_3d.pipeline.loss_mean import UNSEEN, Mixing
from lightning_3d.pipeline.microbatch import Path
from lightning_3d.pipeline.observe import UncutRun

Scope = Literal["microbatch", "batch"]
LossScope = Literal["auto", "microbatch", "batch"]


@dataclass(frozen=True)
class ChosenScope:
    """A choice, and the line that the opening lines have about it."""

    value: Scope
    line: str = ""
    mixing: Mixing | None = None
    """The first call of a block that a microbatch gives other values for: the head must have it."""
    left_out: tuple[tuple[Path, int], ...] = ()
    """See `across_samples.LeftOut.targets`."""


MICROBATCH = ChosenScope("microbatch")


def choose_scope(wanted: LossScope, uncut_run: UncutRun | None, layout: Layout) -> ChosenScope:
    """The scope that `wanted` stands for.

    The loss of a step that draws random numbers by itself (mixup) is computed on microbatches. It uses the numbers that
    were drawn for the inputs of each.
    """
    mean = uncut_run.loss_mean if uncut_run is not None else UNSEEN
    if wanted != "auto":
        return ChosenScope(wanted, mixing=mean.mixing)
    if mean.verdict == "mean" or layout.num_microbatches == 1:
        return ChosenScope("microbatch", left_out=mean.left_out)
    if mean.verdict == "random":
        return ChosenScope("microbatch", f"  loss: of each microbatch, not compared with the full batch: {mean.reason}")
    why, instead = f"no mean over samples ({mean.reason})", ""
    if mean.verdict != "no mean":
        why = f"unknown ({mean.reason})"
        instead = ". Where you know that it is a mean over samples: loss_scope='microbatch'"
    line = f"  loss: {why}, so it is computed once on the full batch (loss_scope='batch'). {_cost(layout)}{instead}"
    return ChosenScope("batch", line, mean.mixing)


def _cost(layout: Layout) -> str:
    instead = "" if layout.schedule == "gpipe" else f" in place of {layout.schedule}"
    return f"All forwards run before all backwards{instead}: a stage keeps the activations of the full batch"
