"""Evaluation: every rank runs the user's step, each unit runs where it lives and its output is shared."""

from typing import Any

from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.wire import Wire


class Conductor:
    """A `Director` that gives every rank the real output of every unit."""

    skipping = False

    def __init__(self, split: PipelineSplit, wire: Wire, stage_rank: tuple[int, ...], seed: int) -> None:
        self.split, self.wire, self.stage_rank, self.seed = split, wire, stage_rank, seed
        self.calls = 0
        self.reached = 0

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        seeds.restart(self.seed, 2 * self.calls)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        return self._share(unit, output)

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        return self._share(unit, None)

    def _share(self, unit: str, output: Any) -> Any:
        holders = self.split.holders[unit]
        self.reached = next((stage for stage in holders if stage >= self.reached), holders[-1])
        self.calls += 1
        shared = self.wire.share(output, self.stage_rank[self.reached], ("call", self.calls))
        seeds.restart(self.seed, 2 * self.calls - 1)
        return shared
