"""Names for `Trainer(strategy="...")`, registered when the package is imported."""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from lightning_3d.errors import ConfigurationError
from lightning_3d.launch.served_names import REMEDY

NAMES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("3d", "the layout that the planner chooses", {"layout": "auto"}),
    ("3d_zero0", "data parallel, everything replicated", {"zero_stage": 0}),
    ("3d_zero1", "data parallel, optimizer states sharded", {"zero_stage": 1}),
    ("3d_zero2", "data parallel, gradients and optimizer states sharded", {"zero_stage": 2}),
    ("3d_zero3", "data parallel, everything sharded", {"zero_stage": 3}),
    ("3d_zero3_offload", "everything sharded and kept in host memory", {"zero_stage": 3, "offload": "all"}),
)

MISTAKES = (
    "3d_zero", *(f"3d_zero{stage}" for stage in range(4, 10)), *(f"3d_zero{stage}_offload" for stage in range(3)),
    "3d_auto", "3d_offload", "3d_fsdp", "3d_ddp", *(f"zero{stage}" for stage in range(4)),
)  # fmt: skip
"""Names that users guess. Lightning answers an unknown name with a list that has none of ours."""


OTHER_NAMES = dict.fromkeys(("cp_size", "sp_size", "ulysses_degree"), "context_parallel_size") | dict.fromkeys(
    ("ep_size", "expert_model_parallel_size", "expert_parallel_degree"), "expert_parallel_size"
)
"""Names of arguments elsewhere -> ours. Others call the context axis "sequence" too, or by its exchange."""
_SHARED = {
    "context_parallel_size": "The ranks that share a sequence, which others call the context or sequence axis,",
    "expert_parallel_size": "The data ranks that share the experts of a mixture",
}


def refuse_other_names(arguments: Iterable[str]) -> None:
    for name in arguments:
        if name in OTHER_NAMES:
            ours = OTHER_NAMES[name]
            raise ConfigurationError(
                f"Strategy3D has no argument {name}. {_SHARED[ours]} are {ours} here. Write Strategy3D({ours}=...)."
            )


def refuse_mistakes(registry: Any) -> None:
    """Register each name of `MISTAKES` as one that raises. The command line knows it by the description."""
    for name in MISTAKES:
        registry.register(name, partial(_refuse_name, name), description="not a strategy", override=True)


def _refuse_name(name: str) -> NoReturn:
    ours = ", ".join(known for known, *_ in NAMES)
    raise ConfigurationError(
        f"strategy={name!r} is not a registered strategy. This package registers {ours}. For other settings pass an"
        " object: strategy=Strategy3D(tensor_parallel_size=2, zero_stage=3)."
    )


def refuse_other_package() -> None:
    """Let the names raise in Trainers of the separate package `pytorch_lightning`, if it is loaded."""
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None and other is not sys.modules.get("lightning.pytorch.strategies"):
        for name, description, _ in NAMES:
            other.StrategyRegistry.register(name, _refuse, description=description, override=True)


def _refuse() -> NoReturn:
    raise ConfigurationError(
        "lightning_3d works with the package `lightning`, and this Trainer is of the separate package"
        f" `pytorch_lightning`, which has other classes. {REMEDY} In code of your own, import Trainer and"
        " LightningModule from `lightning.pytorch`; the code is the same."
    )
