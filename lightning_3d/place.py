"""From what the user chose to what is done to this module: plans before it is placed, steps after."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.anatomy import Anatomy
from lightning_3d.comm.ledger import Ledger
from lightning_3d.compose import Composed, Plans, keep_within_stages, plan_pipeline
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.pipeline.runner import Hooks, Pipeline
from lightning_3d.precision import Precision3D
from lightning_3d.randomness import StepRandom
from lightning_3d.same_batch import compare_first_batch
from lightning_3d.samples import observe_one_batch, record_one_batch
from lightning_3d.steps import PipelinedSteps, PlacedSteps, PlainSteps, prove
from lightning_3d.tensor.infer import plan_tensor
from lightning_3d.tensor.plan import TensorPlan

LossScope = Literal["microbatch", "batch"]
OnRankZero = Callable[[Callable[[], TensorPlan]], TensorPlan]
"""Decides on rank 0 and tells every rank, also what went wrong."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user chose about one module, beside the layout."""

    pipeline_split: Sequence[str] | None = None
    """Names of the first block of each stage but the first."""
    loss_scope: LossScope = "microbatch"
    """Whether the loss is computed per microbatch or once on the whole batch."""
    tensor_plan: Mapping[str, str] | None = None
    """Patterns of names -> how to split them."""


def make_plans(
    trainer: Trainer,
    module: LightningModule,
    layout: Layout,
    choices: Choices,
    to_device: Callable[[Any], Any],
    on_rank_zero: OnRankZero,
    plugin: Precision3D,
) -> Plans:
    """Decide on the whole module what will be done to it, the same on every rank."""
    compare_first_batch(trainer, layout)
    anatomy = Anatomy.of(module)
    split = plan_pipeline(module, anatomy, layout, None)
    whole = None
    if split is not None and not split.solo:
        units = [unit.name for unit in split.units]
        mean = choices.loss_scope == "microbatch"
        _ = trainer.log_dir  # asked of rank 0 while all ranks do: a pipelined step may ask where it runs alone
        whole = observe_one_batch(trainer, module, units, layout, to_device, plugin.forward_context, mean)
    split = plan_pipeline(module, anatomy, layout, choices.pipeline_split, whole)
    if layout.tensor_parallel_size == 1:
        return Plans(anatomy, split, whole=whole)
    calls = record_one_batch(trainer, module, to_device)
    tensor = on_rank_zero(
        lambda: plan_tensor(
            module,
            layout.tensor_parallel_size,
            tensor_plan=choices.tensor_plan,
            sequence_parallel=layout.sequence_parallel,
            calls=calls,
        )
    )
    return Plans(anatomy, split, keep_within_stages(tensor, split), whole)


def pipelines(
    plans: Plans, layout: Layout, choices: Choices, *, mesh: DeviceMesh, device: torch.device, ledger: Ledger
) -> Callable[[nn.Module, Hooks], Pipeline]:
    """What builds the pipeline of a module that was cut by these plans, around hooks."""

    def make(module: nn.Module, hooks: Hooks) -> Pipeline:
        assert plans.split is not None
        return Pipeline(
            module,
            plans.split,
            mesh.get_group(PIPELINE_AXIS),
            device=device,
            schedule=layout.schedule,
            num_microbatches=layout.num_microbatches,
            loss_scope=choices.loss_scope,
            hooks=hooks,
            ledger=ledger,
        )

    return make


def prove_cut(cut: Composed, plans: Plans, make: Callable[[nn.Module, Hooks], Pipeline], plugin: Precision3D) -> None:
    """Compare the stages with the uncut module before blocks are divided over tensor ranks: dropout in shards gives
    other numbers. Without tensor ranks `make_steps` compares, and what is learnt there is kept. Collective.

    Args:
        make: see `pipelines`.
    """
    if plans.tensor is not None and plans.whole is not None and plans.whole.compared:
        pipeline = make(cut.module, Hooks(context=plugin.forward_context))
        prove(pipeline, plans.whole)
        pipeline.close()


def make_steps(
    trainer: Trainer,
    composed: Composed,
    plans: Plans,
    make: Callable[[nn.Module, Hooks], Pipeline],
    *,
    random: StepRandom,
    plugin: Precision3D,
) -> PlacedSteps:
    """What the strategy's step hooks call."""
    module = composed.module

    def opens() -> bool:
        """As Lightning finds out when to zero gradients: a callback may end an epoch within a window."""
        automatic: bool = module.automatic_optimization  # type: ignore[assignment]
        return automatic and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    if plans.split is None:
        return PlainSteps(composed, random, opens)

    def scale() -> float:
        return plugin.loss_scale() / trainer.accumulate_grad_batches

    steps = PipelinedSteps(composed, random, opens, partial(make, module), scale, plugin.forward_context)
    if plans.tensor is None and plans.whole is not None and plans.whole.compared:
        steps.prove(plans.whole)
    return steps
