"""Forwards that talk to other data ranks."""

from torch import nn


class DataForward:
    """A base class of what stands in place of a module's `forward` and talks to other data ranks."""


def talks_to_data_ranks(module: nn.Module) -> bool:
    """Return True if a forward of `module` talks to other data ranks."""
    return any(
        isinstance(each, nn.SyncBatchNorm) or isinstance(vars(each).get("forward"), DataForward)
        for each in module.modules()
    )
