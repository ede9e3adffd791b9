"""Names for `Trainer(strategy="...")`, registered when the package is imported."""

from typing import Any

NAMES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("3d", "the layout that the planner chooses", {"layout": "auto"}),
    ("3d_zero0", "data parallel, everything replicated", {"zero_stage": 0}),
    ("3d_zero1", "data parallel, optimizer states sharded", {"zero_stage": 1}),
    ("3d_zero2", "data parallel, gradients and optimizer states sharded", {"zero_stage": 2}),
    ("3d_zero3", "data parallel, everything sharded", {"zero_stage": 3}),
    ("3d_zero3_offload", "everything sharded and kept in host memory", {"zero_stage": 3, "offload": "all"}),
)
