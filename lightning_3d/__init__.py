"""Tensor, pipeline and ZeRO parallelism for an unchanged LightningModule.

Importing this package registers the names `3d`, `3d_zero0` ... `3d_zero3`, `3d_zero3_offload` with Lightning.
"""

from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

from lightning_3d.anatomy import Anatomy as Anatomy
from lightning_3d.layout import Layout as Layout
from lightning_3d.names import refuse_other_package as _refuse_other_package
from lightning_3d.precision import Precision3D as Precision3D
from lightning_3d.strategy import Strategy3D as Strategy3D

__version__ = "0.1.0"
__all__ = ["Anatomy", "Layout", "Precision3D", "Strategy3D"]

Strategy3D.register_strategies(_StrategyRegistry)
_refuse_other_package()
