"""A pipeline whose stages are sharded by FSDP2, two data ranks each: where the ZeRO layer must be called."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.context import StepCallbacks
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.split import apply_split, plan_split
from lightning_3d.sandbox.trees import loss_of
from lightning_3d.strategy.steps import EarlyGradients
from tests.pipeline.loop import make_optimizer, quiet
from tests.workers import run
from tests.zoo.batchless import GPT, gpt_batch


class Sharded:
    """The ZeRO layer's side: gather at the start of a step, reduce once at its end."""

    def __init__(self, module):
        self.module = module
        self.parts = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        fully_shard.state(module)._lazy_init()
        self.params = {
            param._param_fqn: param
            for state in fully_shard.state(module)._state_ctx.all_states
            for group in state._fsdp_param_groups
            for param in group.fsdp_params
        }

    def begin(self):
        self.module.set_is_last_backward(False)
        self.module.set_reshard_after_backward(False)
        self.module.set_requires_gradient_sync(False)
        for part in self.parts:
            part.unshard()

    def reduce(self):
        self.module.set_is_last_backward(True)
        self.module.set_reshard_after_backward(True)
        self.module.set_requires_gradient_sync(True)
        root = fully_shard.state(self.module)
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        root._root_post_backward_final_callback()

    @contextmanager
    def evaluating(self):
        self.begin()
        yield
        for state in fully_shard.state(self.module)._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._training_state = TrainingState.IDLE  # a step that was cut has not reached the root's hook
        for part in self.parts:
            part.reshard()

    def locate(self, name):
        return self.params[name].unsharded_param


def build(tied):
    torch.manual_seed(1)
    return GPT(tied=tied), [[gpt_batch(rows=4, seed=2 * step + rank) for rank in range(2)] for step in range(4)]


def reference(tied, accumulate):
    module, batches = build(tied)
    quiet(module)
    optimizer = make_optimizer(module, "AdamW")
    losses = []
    for index, pair in enumerate(batches):
        loss = sum(module.training_step(batch, index) for batch in pair) / 2
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}


def sharded(tied, accumulate, schedule):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline_parallel", "data_parallel"))
    group, data = mesh["pipeline_parallel"].get_group(), mesh["data_parallel"]
    module, batches = build(tied)
    quiet(module)
    split = plan_split(module, None, 2)
    applied = apply_split(module, split, [group.rank()])
    for block in module.transformer.h:
        if not any(parameter.is_meta for parameter in block.parameters()):
            fully_shard(block, mesh=data, reshard_after_forward=False)
    absent = {parameter for parameter in module.parameters() if parameter.is_meta}
    fully_shard(module, mesh=data, reshard_after_forward=False, ignored_params=absent)
    zero = Sharded(module)
    hooks = StepCallbacks(begin=zero.begin, reduce=zero.reduce, grad_holder=zero.locate, evaluating=zero.evaluating)
    pipeline = Pipeline(module, split, group, schedule=schedule, num_microbatches=2)
    pipeline.open(hooks, UndoStack())
    optimizer = make_optimizer(module, "AdamW")
    early = EarlyGradients(module, lambda: set(module.parameters()))
    losses, validated = [], []
    for index, pair in enumerate(batches):
        opens, closes = index % accumulate == 0, (index + 1) % accumulate == 0
        batch = pair[data.get_local_rank()]
        with early.computing(opens):
            output = pipeline.training_step(batch, index, last=closes, scale=1 / accumulate)
        if opens:
            optimizer.zero_grad()
        early.give(opens, closes)
        if closes:
            optimizer.step()
        loss = loss_of(output).detach()
        dist.all_reduce(loss, group=data.get_group())
        losses.append(loss.item() / 2)
        with torch.no_grad():
            validated.append(float(loss_of(pipeline.eval_step("validation_step", batch, index))))
    weights = {}
    for name, value in module.named_parameters():
        if name not in applied.absent:
            weights[name] = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return losses, weights


@pytest.mark.parametrize(("tied", "accumulate", "schedule"), [(True, 2, "1f1b"), (False, 1, "interleaved_zero_bubble")])
def test_parity_with_one_process(tied, accumulate, schedule):
    losses, weights = reference(tied, accumulate)
    for mine, held in run(sharded, tied, accumulate, schedule, world=4, group=True):
        assert mine == pytest.approx(losses, abs=1e-5)
        for name, value in held.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)
