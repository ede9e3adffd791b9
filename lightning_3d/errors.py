"""What this package raises.

::

    Lightning3DError
    ├── ConfigurationError (ValueError)   something the user set, or the module they gave, cannot be used
    │   ├── LayoutError                   degrees, ranks, schedule, ZeRO stage do not fit together or the world
    │   ├── TensorPlanError               a tensor plan that matches nothing or does not compute the same thing
    │   ├── PipelineSplitError            the module cannot be cut into stages
    │   ├── UnsupportedError              a feature that this layout cannot keep
    │   │   └── WritesError               the step changes weights by itself
    │   └── PlannerError                  a question to the planner that has no answer
    └── RunError (RuntimeError)           something went wrong while running
        ├── PeerError                     another rank died, hung or failed
        ├── DivergenceError               ranks that must agree (data, replicas, layout) do not
        └── CheckpointError               a checkpoint is incomplete, damaged, or does not fit the module

A message says what is wrong, with the numbers, and the remedy. Configuration errors are raised on every rank before
training starts.
"""


class Lightning3DError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(Lightning3DError, ValueError):
    """Something the user set, or the module they gave, cannot be used."""


class LayoutError(ConfigurationError):
    """Degrees, ranks, schedule or ZeRO stage do not fit together or the world."""


class TensorPlanError(ConfigurationError):
    """A tensor plan matches nothing, or does not compute the same thing as the whole module."""


class PipelineSplitError(ConfigurationError):
    """The module cannot be cut into the stages asked for."""


class UnsupportedError(ConfigurationError):
    """A feature of the Trainer or the module that this layout cannot keep."""


class WritesError(UnsupportedError):
    """The step changes weights by itself, in a way that this layout cannot keep."""


class PlannerError(ConfigurationError):
    """A question to the planner that has no answer."""


class RunError(Lightning3DError, RuntimeError):
    """Something went wrong while running."""


class PeerError(RunError):
    """Another rank died, hung or failed."""


class DivergenceError(RunError):
    """Ranks that must agree do not."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, damaged, or does not fit the module."""
