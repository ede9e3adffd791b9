"""Tensor parallelism that needs no written plan: it is inferred from the module, proven and applied.

`record_calls` records one batch, `plan_tensor` finds and proves a plan, `apply_tensor` makes the module compute by it,
`render_plan` prints it. Files in the order of reading:

- plan: `block_calls`, `blocks`, `plan_module`, `plan_block`, `regions` (which product feeds which), `divide` (which
  rank needs which elements), `sizes` (numbers that shrink), `proof`, `tensor_plan` (the result)
- run: `apply`, `patch`, `block_forward`, `module_forward`, `autograd_collectives`, `late_tensor` (filled by
  `late_operations`), `vocabulary`
"""

from lightning_3d.tensor.late_operations import OPERATIONS as OPERATIONS  # they are registered by the import
