"""Tensor parallelism that needs no written plan: it is inferred from the module, proven and applied.

`record_calls` records one batch, `plan_tensor` finds and proves a plan, `apply_tensor` makes the module compute by it,
`render_plan` prints it. Files in the order of reading:

- plan: `block_calls`, `blocks`, `plan_module`, `plan_block`, `regions` (which product feeds which), `divide` (which
  rank needs which elements), `sizes` (numbers that shrink), `proof`, `tensor_plan` (the result)
- run: `apply`, `patch`, `block_forward`, `module_forward`, `autograd_collectives`, `late_tensor` (filled by
  `late_operations`), `vocabulary`
"""

from lightning_3d.tensor.apply import AppliedTensor as AppliedTensor
from lightning_3d.tensor.apply import apply_tensor as apply_tensor
from lightning_3d.tensor.apply import full_tensor as full_tensor
from lightning_3d.tensor.block_calls import Recording as Recording
from lightning_3d.tensor.block_calls import record_calls as record_calls
from lightning_3d.tensor.geometry import TensorSplit as TensorSplit
from lightning_3d.tensor.geometry import local_part as local_part
from lightning_3d.tensor.late_operations import OPERATIONS as OPERATIONS
from lightning_3d.tensor.late_tensor import compute_late as compute_late
from lightning_3d.tensor.plan_module import plan_tensor as plan_tensor
from lightning_3d.tensor.render import render_plan as render_plan
from lightning_3d.tensor.render import wire_bytes as wire_bytes
from lightning_3d.tensor.tensor_plan import TensorPlan as TensorPlan
