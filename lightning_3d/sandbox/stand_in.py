"""Random numbers in place of a matrix that is read from a file, for runs that do not need its values."""

import torch
from torch import Tensor

from lightning_3d.sandbox.build_recorder import Recorded
from lightning_3d.sandbox.recorded_value import Geometry, Operation, Step, Use

PERIOD = 65521
"""Numbers that are drawn for a matrix, which repeats them. A prime, so that no two rows or experts are equal."""


def stand_in(matrix: Tensor, recorded: Recorded) -> Step:
    """Random numbers for the memory of `matrix`: the same where the recorded value is the same, also on other ranks."""
    count = recorded.nbytes // matrix.element_size()
    like = {"dtype": matrix.dtype, "device": matrix.device}
    made = Step.of(Operation(torch.ops.aten.empty_strided.default, ((count,), (1,)), like, None, None), None)
    memory = Use(made, Geometry(matrix.dtype, (count,), (1,), 0))
    scale = max(matrix.shape[1:]) ** -0.5
    return Step.of(Operation(_draw, (memory, scale, recorded.step.digest), {}, None, None), made)


def _draw(out: Tensor, scale: float, seed: bytes) -> None:
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    numbers = torch.randn(PERIOD, generator=generator).mul_(scale).to(out.device, out.dtype)
    whole = len(out) - len(out) % PERIOD
    out[:whole].view(-1, PERIOD).copy_(numbers)
    out[whole:].copy_(numbers[: len(out) - whole])
