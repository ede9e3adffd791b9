"""Tensor, pipeline and ZeRO parallelism for an unchanged LightningModule."""

__version__ = "0.1.0"
