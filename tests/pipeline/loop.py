"""Training a module in a plain loop, on one process and over a pipeline, the way the strategy drives it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.layout import stage_ranks
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.cut_module import StepCallbacks
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit, apply_split, plan_split
from lightning_3d.sandbox.trees import loss_of
from lightning_3d.strategy.steps import EarlyGradients

Build = Callable[[], tuple[Any, list[Any]]]
"""A seeded module and its batches."""


def whole(build: Build, accumulate: int = 1, optimizer: str = "AdamW") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of one process."""
    module, batches = build()
    quiet(module)
    optimizer = make_optimizer(module, optimizer)
    losses = []
    for index, batch in enumerate(batches):
        loss = loss_of(module.training_step(batch, index))
        if index % accumulate == 0:
            optimizer.zero_grad()
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}


def pipelined(
    build: Build,
    schedule: str = "1f1b",
    num_microbatches: int | str = 4,
    accumulate: int = 1,
    per_rank: int = 1,
    validate: bool = False,
    optimizer: str = "AdamW",
    lr: float = 1e-2,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """The same on each rank of a pipeline: losses, the parameters that are real here, validation losses."""
    torch.manual_seed(0)
    module, batches = build()
    quiet(module)
    group = dist.group.WORLD
    per_rank = stages_per_rank(schedule, per_rank)
    split = plan_split(module, None, group.size() * per_rank)
    placement = stage_ranks(schedule, group.size(), per_rank)
    applied = apply_split(module, split, [stage for stage, rank in enumerate(placement) if rank == group.rank()])
    undo = UndoStack()
    pipeline = opened(module, split, group, undo, schedule=schedule, num_microbatches=num_microbatches, **options)
    made = make_optimizer(module, optimizer, lr)
    early = EarlyGradients(module, lambda: set(module.parameters()))
    losses, validated = [], []
    for index, batch in enumerate(batches):
        opens, closes = index % accumulate == 0, (index + 1) % accumulate == 0
        with early.computing(opens):
            output = pipeline.training_step(batch, index, last=closes, scale=1 / accumulate)
        if opens:
            made.zero_grad()
        early.give(opens, closes)
        if closes:
            made.step()
        losses.append(loss_of(output).item())
        if validate:
            module.eval()
            with torch.no_grad():
                validated.append(float(loss_of(pipeline.eval_step("validation_step", batch, index))))
            module.train()
    undo.close()
    applied.undo(group, placement)
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}, validated


def opened(module: Any, split: PipelineSplit, group: dist.ProcessGroup, undo: UndoStack, **options: Any) -> Pipeline:
    """A pipeline that runs steps of `module` until `undo` closes."""
    pipeline = Pipeline(module, split, group, **options)
    pipeline.open(StepCallbacks(), undo)
    return pipeline


def quiet(module: nn.Module) -> None:
    """`log` without a Trainer."""
    module.logged = []  # type: ignore[assignment]
    module.log = lambda name, value, **kwargs: module.logged.append((name, copy.copy(value)))  # type: ignore[assignment,operator]


def make_optimizer(module: nn.Module, name: str, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Adam with an epsilon above the rounding of gradients that are zero in exact arithmetic (a key's bias)."""
    cls = getattr(torch.optim, name)
    return cls(module.parameters(), lr=lr, **({"eps": 1e-3} if "Adam" in name else {}))


def assert_same(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Losses and parameters of two trainings are equal."""
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=0, atol=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        torch.testing.assert_close(
            value, other[1][name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
