"""Tensor parallelism that needs no written plan: it is inferred from the module, proven and applied.

`record_calls` records one batch, `plan_tensor` finds and proves a plan, `apply_tensor` makes the module compute by it.
"""

from lightning_3d.tensor.late_operations import OPERATIONS as OPERATIONS  # they are registered by the import
