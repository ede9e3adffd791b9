"""Tensor parallelism that needs no plan: inferred from the module, proven, applied.

`record_calls` watches one batch go through a module, `plan_tensor` finds and proves a plan, `apply_tensor` makes the
module
compute by it, `render_plan` shows it. To read the package: `regions.py` (what feeds what), `touched.py` (which rank
needs what),
`search.py` and `proof.py` (candidates and their test), `forwards.py` (what runs).
"""

from lightning_3d.tensor.apply import AppliedTensor as AppliedTensor
from lightning_3d.tensor.apply import apply_tensor as apply_tensor
from lightning_3d.tensor.apply import full_tensor as full_tensor
from lightning_3d.tensor.block_calls import Recording as Recording
from lightning_3d.tensor.block_calls import record_calls as record_calls
from lightning_3d.tensor.geometry import TensorSplit as TensorSplit
from lightning_3d.tensor.geometry import local_part as local_part
from lightning_3d.tensor.late_gather import whole as whole
from lightning_3d.tensor.plan_module import plan_tensor as plan_tensor
from lightning_3d.tensor.render import render_plan as render_plan
from lightning_3d.tensor.render import wire_bytes as wire_bytes
from lightning_3d.tensor.tensor_plan import TensorPlan as TensorPlan
