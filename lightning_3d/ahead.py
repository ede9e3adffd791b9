"""A training step run ahead, on tensors that have shapes and no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_3d.early import optimizers_on_demand
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.microbatch import map_leaves
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.rehearse import as_before
from lightning_3d.planner.inspection import Trace, traced
from lightning_3d.samples import step_arguments


def run_ahead(module: LightningModule, batch: Any, trace: Trace) -> tuple[Any, Record]:
    """Note in `trace` what `training_step` does with `batch`; what it returned and logged. Nothing is changed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = module.training_step
    fakes = map_leaves(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    record = Record()
    with seeds.set_aside(), as_before(module), optimizers_on_demand(module), LogTap(module).recording(record):
        with fake_tensors(module, mode), mode, torch.enable_grad(), traced(module, trace):
            return step(*step_arguments(step, fakes)), record


@contextmanager
def fake_tensors(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """`module` with parameters and buffers that have shapes and no memory, tied ones still tied.

    What is assigned to attributes of its parts meanwhile is forgotten.
    """
    made: dict[int, Any] = {}

    def fake(tensors: dict[str, Any]) -> None:
        for name, real in tensors.items():
            if real is not None:
                tensors[name] = made.setdefault(id(real), mode.from_tensor(real))

    before = [(part, dict(part.__dict__), dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        for part in module.modules():
            fake(part._parameters)
            fake(part._buffers)
        yield
    finally:
        for part, attributes, parameters, buffers in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._parameters.update(parameters)
            part._buffers.update(buffers)
